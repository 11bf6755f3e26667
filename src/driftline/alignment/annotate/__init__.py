"""Annotators: text that is added to a finished plan, such as source lines and fusions.

They never change a pair.
"""
