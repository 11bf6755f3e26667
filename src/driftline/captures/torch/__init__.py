"""Capture of torch modules."""
