"""The commands of older tools, handed on to `driftline`."""
