"""Error check: what was found about NaN, infinities, saturation and underflow, whatever the
framework.
"""
