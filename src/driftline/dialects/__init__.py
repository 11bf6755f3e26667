"""Dialects: the interfaces of other accuracy tools, answered by Driftline.

Nothing else imports this folder at its top; it is loaded when its names are used.
"""
