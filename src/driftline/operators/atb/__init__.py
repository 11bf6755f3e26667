"""Operators of ATB dumps: which tensors belong to a call, and how it is run again on the device."""
