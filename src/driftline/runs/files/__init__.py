"""Bytes on a local disk: owned descriptors, mapped files, shards."""
