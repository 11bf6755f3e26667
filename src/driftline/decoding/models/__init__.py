"""Decoders of transformers and ibm-fms: how they are found, loaded, placed, compiled and called.

Knows nothing about prompts, scores or files of results.
"""
