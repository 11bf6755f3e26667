"""Launch: run somebody's unchanged program with a capture inside it, and report what came out.

One environment variable is set, which a `.pth` file in our site-packages looks at when a Python
starts. That survives scripts that set `PYTHONPATH`, bring their own `sitecustomize`, or start
Python with `-E` or `-I`. For a program in another environment than ours, a folder with nothing but
the `driftline` package and a `sitecustomize` that calls the user's own is put in front of
`PYTHONPATH`. Nothing happens until the program imports a framework; a rank folder appears with its
first tensor. `bootstrap` runs at interpreter start: standard library only.
"""
