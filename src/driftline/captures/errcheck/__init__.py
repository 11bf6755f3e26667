"""Error check: findings of NaN, infinities, saturation and underflow, for every framework."""
