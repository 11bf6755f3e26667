"""Comparison: a plan becomes a judged table.

`pipeline` is the one way there: prepare, measure, gather evidence, judge. Nothing here guesses
causes.
"""
