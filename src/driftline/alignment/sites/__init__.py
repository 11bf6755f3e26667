"""Sites: the calls of a run in order, their kinds, roles and tensors, as matching rules see
them.
"""
