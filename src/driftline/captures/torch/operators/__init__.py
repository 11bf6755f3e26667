"""Capture of single torch operators through the dispatcher."""
