"""Labels of tensors to compare: see `compare`."""
