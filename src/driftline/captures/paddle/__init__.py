"""Capture of Paddle layers; the files correspond to those of torch.

`paddle.nn.Layer.__call__` is wrapped. Gradients of outputs and parameters come from hooks on
tensors, gradients of inputs from post hooks on the backward nodes of the layer's own part of the
graph. Paddle does not accept lists of tensors from such a hook, so only nodes of operations without
lists are hooked (`backward_graph` reads their names from the header of the installed Paddle).
Gradients of `concat`, `stack`, `add_n`, `einsum` and every `PyLayer` are derived where Python calls
these operations (`list_operations`). For all others (an LSTM) the gradient is the total gradient of
the input minus the gradients that other operations send to it; these operations are known when a
pass begins (`gradients`).

Nothing is inserted into the graph: an identity at a layer's border would change the order in which
gradients are added. Optimizers have no hooks, so `step` is wrapped in every class that defines it.
While a static graph is made, the wrapper only makes the plain call.
"""
