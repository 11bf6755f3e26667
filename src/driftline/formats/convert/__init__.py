"""Conversion of a run into another layout."""
