"""Dumps of ATB, the Ascend transformer boost library."""
