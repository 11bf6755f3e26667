"""Capture of ONNX Runtime sessions. onnx and onnxruntime are imported when they are used.

Values of a graph are captured by making them outputs of the graph that ONNX Runtime has already
optimised, which then runs with optimisation off (`sessions`). If they were outputs of the original
graph, ONNX Runtime would not fuse their nodes. A value is identified by its name: optimisers keep
names, so the site has the same name at every optimisation level, and the exporter's metadata of a
node also holds for the optimised graph. Modules are found from this metadata: the values that cross
the border of a module's nodes are its inputs and outputs (`scopes`).

The protobuf is read without its weights (`model_file`). The model is executed once for each portion
of the values, which limits memory: a model of 2.4 GB in three portions took 2636 MB at its peak,
the plain session 2620.
"""
