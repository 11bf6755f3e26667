"""Families of mistakes that one hypothesis with parameters covers.

Each is read by algebra out of what a site was given and what it made: which elements a sum counts,
which places a value is taken from, which function or factor of its inputs a number is, which map an
output is of its input.
"""
