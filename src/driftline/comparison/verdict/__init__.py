"""Verdicts: rows and their limits become statuses, a first divergence and a verdict. Reads rows
only.
"""
