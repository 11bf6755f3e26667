"""Kinds of bugs, one family per file: each looks at one site's error and says how well it fits.

A rule sees arrays only; which site is guilty was decided before. `catalogue.py` lists them all.
"""
