"""Capture of what torch.compile runs: FX graphs node by node, and the results of inductor's
kernels.
"""
