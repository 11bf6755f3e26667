"""Placements: the distribution of tensors over the ranks of a device mesh, and how to join them.

This package knows shards, replicas and pipeline stages, but not which tensors of two runs are
paired.
"""
