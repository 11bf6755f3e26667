"""Matching rules: which tensors of two runs are paired. The strongest rules are tried first.

A rule knows names, structure, values and graphs; it does not know how a difference is judged.
"""
