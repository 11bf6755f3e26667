"""Capture on a GPU: tensors are summarised or copied there without waiting for the device."""
