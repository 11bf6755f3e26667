"""Runs: what one execution left on disk, written and read. Nothing in a run that is read is
trusted.

Does not know frameworks or comparisons.
"""
