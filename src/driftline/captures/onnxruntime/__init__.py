"""Capture of ONNX Runtime sessions. Imports onnx and onnxruntime when they are used.

Values of a graph are captured by making them its outputs, in the graph that ONNX Runtime has
optimised already, run with optimisation off (`sessions`): asked for them earlier it would not fuse.
A value's name is its identity: an optimiser keeps it, so it is the site's name at every level, and
what the exporter wrote about a node holds for the optimised graph too. Modules are drawn from that:
what crosses the border of a module's nodes is what it takes and gives (`scopes`).

The protobuf is read without its weights (`model_file`), and one execution per portion of values
bounds memory: a model of 2.4 GB in three portions took 2636 MB at its peak, the plain session 2620.
"""
