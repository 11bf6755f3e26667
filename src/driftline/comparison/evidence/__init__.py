"""Evidence: what else in the two runs a fair judgement of a row needs, such as pads or cancelled
sums.

It reads runs and adds columns; it decides no verdict.
"""
