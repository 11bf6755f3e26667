"""One row per engine and model: how much pairs, what a clean pair and a planted fault are called.

A family of engines is a module here with `CASES`; `__main__` runs them and writes the table of
docs/engines.md. Nothing here is a test, and no rule may be tuned to these models alone.
"""
