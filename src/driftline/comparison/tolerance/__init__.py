"""Tolerances: what difference is allowed, by default limits, by the user's limits or by
thresholds.
"""
