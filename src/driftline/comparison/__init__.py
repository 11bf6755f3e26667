"""Comparison: a plan becomes a judged table.

`pipeline` performs all steps: prepare, measure, gather evidence, judge. This package does not guess
causes.
"""
