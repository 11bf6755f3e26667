"""Measurement: the tensors of a pair become figures.

Besides this package, only `evidence` reads values, and only for single rows.
"""
