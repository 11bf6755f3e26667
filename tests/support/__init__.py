"""Shared by tests: writers of other tools' dumps, and small models made with them."""
