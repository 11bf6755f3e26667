"""Comparison: a plan becomes a judged table.

`pipeline` is the one way there: prepare, measure, gather evidence, judge. Causes are guessed
in `diagnosis`, not here.
"""
