"""Placements: how tensors are distributed over the ranks of a device mesh, and how they are
joined.

Knows shards, replicas and pipeline stages; does not know which tensors of two runs are paired.
"""
