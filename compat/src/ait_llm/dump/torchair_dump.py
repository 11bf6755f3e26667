"""`ait_llm.dump.torchair_dump`, as its document imports it."""

from driftline.dialects.ait.torchair import get_fx_dump_config, get_ge_dump_config

__all__ = ["get_fx_dump_config", "get_ge_dump_config"]
