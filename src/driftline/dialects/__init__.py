"""Dialects: the interfaces of other accuracy tools, provided by Driftline.

No other package imports this folder at its top; it is loaded when one of its names is used.
"""
