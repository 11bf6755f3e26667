"""Ascend's element types, storage layouts and protocol buffers, used by both ATB and GE."""
