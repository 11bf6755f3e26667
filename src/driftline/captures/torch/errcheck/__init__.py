"""Error check of torch programs: which operator or module produced the first bad value."""
