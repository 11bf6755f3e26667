"""Kinds of bugs, one family per file: each detector examines one site's error and scores its fit.

A detector sees arrays only; which site is guilty was decided before. `registry.py` lists them all.
"""
