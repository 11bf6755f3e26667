"""Where the drift starts, whether it was introduced there, what kind of bug it is, how sure we are.

Pure analysis of runs and tables: starts no program and imports no framework.
"""
