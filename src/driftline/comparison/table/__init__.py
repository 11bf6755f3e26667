"""Tables: rows, the table of a comparison, its files on disk and its parts made elsewhere."""
