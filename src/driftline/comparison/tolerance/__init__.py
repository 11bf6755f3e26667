"""Tolerances: the allowed difference, by default limits, by the user's limits or by thresholds."""
