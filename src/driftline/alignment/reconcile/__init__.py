"""Reconcilers: give a pair the transformations (a recipe) that make its two tensors comparable.

They never change which tensors are paired.
"""
