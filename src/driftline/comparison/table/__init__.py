"""Tables: rows, the table of a comparison, its files on disk, and parts made by other processes."""
