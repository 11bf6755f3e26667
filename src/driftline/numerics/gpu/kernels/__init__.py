"""Triton kernels: summaries of a tensor and moments of a pair."""
