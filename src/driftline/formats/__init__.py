"""Formats: read dumps of other tools as runs, and write runs as files of other tools.

No file is trusted. Nothing here compares.
"""
