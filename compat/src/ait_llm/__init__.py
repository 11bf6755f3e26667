"""`ait_llm`, as its document imports it."""

from driftline import DumpConfig, register_hook

__all__ = ["DumpConfig", "register_hook"]
