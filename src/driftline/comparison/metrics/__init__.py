"""Metrics: names, directions and definitions of the figures in a row. They know no run."""
