"""Capture of what torch.compile runs: FX graphs node by node, and the results of inductor's
kernels.

Without `--graph` the wrapper of module calls is the plain call while Dynamo traces, so what is
compiled is what would be compiled without capture; the compiled model's own inputs and outputs are
captured, and modules inside wherever the graph breaks. With `--graph` a graph is executed node by
node where Dynamo gives it to its backend, or, for inductor, one line is added after each kernel
call that its scheduler writes, before memory is given back.

Operator calls are counted where they are traced, before they are decomposed (`call_origins`). What
a fused kernel computes on the way is computed separately, from the kernel's inputs (`fusion_plan`
plans it once for a graph, `fusion_values` does it while the program runs).
"""
