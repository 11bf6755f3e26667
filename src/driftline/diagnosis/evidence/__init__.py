"""Evidence sources of a diagnosis: replay, noise runs, error growth.

Each says how a site stands and how far it can be trusted; none names a cause.
"""
