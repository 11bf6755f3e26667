"""The same figures on a GPU: Triton kernels and their launcher."""
