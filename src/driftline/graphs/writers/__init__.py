"""Writers of graphs: ONNX, Model Explorer, ATB's JSON."""
