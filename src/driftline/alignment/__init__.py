"""Alignment: two runs become a plan that says which tensors are compared with each other.

A plan also says by which rule a pair was made, with what confidence, which transformations are
applied first, and why a tensor has no partner. Nothing here measures or judges a difference.
"""
