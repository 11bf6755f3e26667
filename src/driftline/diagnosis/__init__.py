"""Diagnosis: where two runs begin to disagree, whether a site caused it, and what kind of bug.

The package only analyses runs and tables. It starts no program and imports no framework, except in
`experiments`, where programs are run again to obtain more evidence.
"""
