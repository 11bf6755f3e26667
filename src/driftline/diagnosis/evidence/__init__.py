"""Evidence for a diagnosis: replay, noise runs, results of bisections, and their files.

The evidence judges sites and says how far it can be trusted; it names no cause.
"""
