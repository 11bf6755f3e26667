"""Alignment: two runs become a plan that says which tensors are compared with each other.

A plan also gives the rule and the confidence of each pair, the transformations that are applied
first, and the reason why a tensor has no partner. Nothing here measures or judges a difference.
"""
