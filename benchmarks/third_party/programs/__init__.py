"""The programs, by the kind of their data."""
