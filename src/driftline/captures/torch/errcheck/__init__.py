"""Error check of torch programs: which operator or module produced the first bad value.

A session whose only tap screens what operators return. Without its sign the bit pattern of a float
sorts like its value, so one unsigned maximum over an output (`numerics.peaks`) says whether
anything is not finite and how near it came; inputs are read only when an output is suspicious.
Where a value that is not finite came from is remembered per storage, by weak references to the
storage, because addresses are used again.
"""
