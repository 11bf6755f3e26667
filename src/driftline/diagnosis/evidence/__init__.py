"""Evidence sources of a diagnosis: replay, noise runs, error growth, and the files they come in.

Each says how a site stands and how far it can be trusted; none names a cause.
"""
