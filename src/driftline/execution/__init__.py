"""Execution: who does a piece of work, threads, processes, shards or Ray. Does not know what the
work is.
"""
