"""Sites: the calls of one run in order, with their kinds, roles, dataflow and tensors.

Matching rules are built on this. A module here describes one run, or pairs the tensors of two calls
that are already paired; `rules` decides which calls are paired.
"""
