"""Metrics: names, directions and definitions of the figures in a row. Knows no run."""
