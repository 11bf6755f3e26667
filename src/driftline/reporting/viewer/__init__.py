"""The local viewer: a server on the loopback interface that opens tensors on demand.

It serves one reader on one machine. Every address begins with a random token, which is compared in
constant time. A request under another `Host`, from another `Origin` or with a body is refused
first. Addresses are looked up in a table and never joined to a path. The page shows text from a run
as text, never as markup. Its `Content-Security-Policy` (by hash) allows no other script and no
other host.
"""
