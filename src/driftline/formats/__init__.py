"""Formats: dumps of other tools become runs, and runs become files of other tools.

Every file is untrusted. Nothing here compares.
"""
