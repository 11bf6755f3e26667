"""The commands: each function's signature is its command line and its docstring the help page.

A module here is imported when one of its commands runs or is asked for help. What is slow to
import (torch, numpy, pyarrow, reports) is imported inside the functions, after the words were read.
"""
