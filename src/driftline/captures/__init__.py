"""Capture: a live program becomes a run.

This folder holds what every framework shares; a framework's own part is in a folder of its name.
It imports the standard library, numpy and, in a framework's folder, that framework: it runs inside
other people's programs. It does not know how runs are compared.

The folder is called `captures` because `driftline.capture` is the public function.
"""
