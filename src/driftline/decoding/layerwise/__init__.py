"""Two decoders in lockstep, and the outputs of their layers compared row by row.

Knows nothing about files: metrics are passed to a callback when they are computed.
"""
