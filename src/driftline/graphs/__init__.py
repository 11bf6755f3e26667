"""Graphs: the module tree and the operator graphs of a run, their sources and their writers."""
