"""Execution: how work runs in threads, processes, shards or Ray. Does not know what the work is."""
