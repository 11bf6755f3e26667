"""Capture of tensors that live on a GPU: reduced there, or copied without waiting for them."""
