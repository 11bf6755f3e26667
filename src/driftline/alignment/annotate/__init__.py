"""Annotators: text added to a finished plan, such as source lines and fusions.

They never change a pair.
"""
