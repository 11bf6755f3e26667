"""Dumps of other tools: msprobe, Paddle's hook, decoder scripts, transformers' debugger."""
