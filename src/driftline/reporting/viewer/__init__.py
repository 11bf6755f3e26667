"""The local viewer: a server on the loopback interface that opens tensors on demand.

It serves one reader on one machine: every address begins with a random token that is compared in
constant time, and a request under another `Host`, from another `Origin` or with a body is refused
before it is looked at. Addresses are looked up in a table; none is ever joined to a path. What a
page shows of a run is set as text, never as markup, and its policy (`Content-Security-Policy`, by
hash) lets no other script run and no other host be asked.
"""
