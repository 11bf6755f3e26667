"""Sites: the calls of one run in order, with their kinds, roles, dataflow and tensors.

Matching rules are built on this. A module here describes one run, or pairs the tensors of two calls
that are paired already; which calls are paired is decided in `rules`.
"""
