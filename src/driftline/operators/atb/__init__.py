"""ATB dumps: which tensors belong to an operator, and how it is executed again on the device."""
