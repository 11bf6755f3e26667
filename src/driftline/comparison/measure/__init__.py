"""Measurement: the tensors of a pair become figures. The only place of a comparison that reads
values.
"""
