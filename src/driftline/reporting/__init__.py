"""Reporting: results become views, and views become text, pages and files.

Nothing in this package measures or judges.
"""
