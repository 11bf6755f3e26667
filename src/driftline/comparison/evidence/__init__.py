"""Evidence: facts from the runs that a fair judgement needs, such as pads or cancelled sums.

It reads runs and adds columns; it decides no verdict.
"""
