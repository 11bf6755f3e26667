"""Verdicts: rows and their limits become statuses, a first divergence and a verdict.

This package reads rows only.
"""
