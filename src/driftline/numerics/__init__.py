"""Numerics: element types, and the figures of one tensor or a pair, in numpy, C and Triton.

The numpy definition says what a figure means; the kernels must agree with it. Knows no run.
"""
