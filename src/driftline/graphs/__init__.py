"""Graphs: the module tree and the operator graphs of a run, where they come from and how they
are drawn.
"""
