"""Reporting: results become views, and views become text, pages and files. Nothing here measures
or judges.
"""
