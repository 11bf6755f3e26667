"""Numerics: element types, and the figures of one tensor or of a pair, in numpy, C and Triton.

The numpy definitions say what each figure means; the kernels must agree with them. This package
does not know runs.
"""
