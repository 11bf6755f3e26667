"""Calls of torch operators, executed again from what a run captured of them."""
