"""Launch: run a user's unchanged program with a capture inside it, and report the outcome.

One environment variable is set. A `.pth` file in our site-packages reads it whenever Python starts.
This also works for scripts that set `PYTHONPATH`, bring their own `sitecustomize`, or start Python
with `-E` or `-I`. For programs in another environment than ours, a folder is put in front of
`PYTHONPATH`. It holds only the `driftline` package and a `sitecustomize` that calls the user's own.
Nothing is captured until the program imports a framework; the folder of a process appears with its
first watched call. `bootstrap` runs when the interpreter starts and uses only the standard library.
"""
