"""Launch: run somebody's unchanged program with a capture inside it, and report what came out.

`bootstrap` runs at interpreter start: standard library only.
"""
