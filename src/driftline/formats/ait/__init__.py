"""Dumps and side files of `ait llm`."""
