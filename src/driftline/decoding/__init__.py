"""Text models on two targets: metrics of tokens and layers, validation, thresholds.

`pipeline` runs the tasks `metrics`, `layers` and `validate`; `models/` loads decoders, `layerwise/`
compares their layers, `files/` knows every file that is written or read. How tensors are aligned
and measured is not known here, nor any command line.
"""
