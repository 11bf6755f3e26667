"""Capture: record the tensors of a running program as a run.

This folder holds the parts that all frameworks share; each framework's own part is in a folder of
its name. Because this code runs inside other people's programs, it imports only the standard
library, numpy and, in a framework's folder, that framework. It does not know how runs are compared.

The folder is called `captures` because `driftline.capture` is the public function.
"""
