"""Capture of Paddle layers: the same shape as torch's, by other means.

`paddle.nn.Layer.__call__` is wrapped. Gradients of outputs and parameters come from hooks on
tensors, those of inputs from hooks behind the backward nodes of the layer's own piece of the graph.
Paddle takes no lists of tensors back from such a hook, so only nodes of operations without lists
are hooked (`backward_graph` reads them from the header of the installed Paddle). Of the others,
`concat`, `stack`, `add_n`, `einsum` and every `PyLayer` are seen where Python calls them
(`list_operations`); for what is left (an LSTM) an input's whole gradient is taken, less what other
operations send to it, which is known when a pass begins (`gradients`).

Nothing is put into the graph: an identity at a layer's border would change the order in which
gradients are added up. Optimizers have no hooks, so `step` is wrapped wherever a class defines it.
While a static graph is made the wrapper is the plain call.
"""
