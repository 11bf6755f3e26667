"""Side files of a run: recorded operator calls and operator tables."""
