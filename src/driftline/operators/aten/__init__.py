"""Calls of torch operators, replayed from what a run captured of them."""
