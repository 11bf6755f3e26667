"""Definitions of operators in float64. They import numpy and each other only, because
`driftline opcheck --repro` copies these files into stand-alone scripts.
"""
