"""Error check of torch programs: which operator or module produced the first bad value.

The check is a session whose only tap screens the results of operators. Without its sign, the bit
pattern of a float has the same order as its value. So one unsigned maximum over an output
(`numerics.peaks`) shows whether all elements are finite, and how near they are to the limit. Inputs
are read only if an output is suspicious. The origin of values that are not finite is remembered for
each storage, by a weak reference, because addresses are reused.
"""
