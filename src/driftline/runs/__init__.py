"""Runs: what one execution stored on disk, written and read. No file of a run is trusted.

This package does not know frameworks or comparisons.
"""
