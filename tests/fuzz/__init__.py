"""Fuzzing of everything that reads a file: `make fuzz`, or `python -m fuzz` in tests/.

`readers` lists the readers and what may come of any bytes, `seeds` writes the corpus, `mutation`
damages inputs where no coverage-guided fuzzer is installed, `__main__` spends a time budget.
"""
