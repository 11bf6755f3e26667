"""Capture of ONNX Runtime sessions. Imports onnx and onnxruntime when they are used."""
