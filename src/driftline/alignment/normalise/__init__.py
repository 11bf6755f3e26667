"""Normalisers: change the view of one run before matching, such as gathered ranks or mapped steps.

They know one run at a time; `alignment.rules` decides which tensors are paired.
"""
