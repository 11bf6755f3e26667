"""The commands: a function's signature is its command line, and its docstring is its help page.

A module here is imported when one of its commands runs or prints its help. What is slow to import
(torch, numpy, pyarrow, reports) is imported inside the functions, after the command line was read.
"""
