"""Ascend's element types, storage layouts and protocol buffers, shared by ATB and GE."""
