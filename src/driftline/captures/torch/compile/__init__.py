"""Capture inside torch.compile: FX graphs node by node, or the results of inductor's kernels.

Without `--graph` the wrapper of module calls only makes the plain call while Dynamo traces, so the
same code is compiled as without capture. The inputs and outputs of the compiled model are captured,
and modules inside it after a graph break. With `--graph` a graph is executed node by node instead
of by the program's backend; or, for inductor, lines that record the results are added after each
kernel call in the program that inductor writes, before memory is released.

Operator calls are counted while they are traced, before they are decomposed (`call_origins`).
Intermediate values of a fused kernel are computed separately, from the kernel's inputs:
`fusion_plan` plans this once for each graph, `fusion_values` does it while the program runs.
"""
