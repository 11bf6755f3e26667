"""Two decoders in lockstep, and the outputs of their layers compared row by row.

Knows nothing about files: metrics are handed to a callback as they are found.
"""
