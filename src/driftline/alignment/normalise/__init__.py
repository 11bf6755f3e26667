"""Normalisers: one run is seen in another way before matching, such as gathered ranks or mapped
steps.

They know one run at a time; which tensors belong together is for `alignment.rules`.
"""
