"""A stand-in for the AIU: a package `torch_sendnn` whose backend can compute with faults.

The fault is a factor on linear layers or embeddings, which a layer debugger must find.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = '''"""Stand-in for the AIU's package."""
import torch
from torch._dynamo import register_backend

LINEAR, EMBEDDING = {linear}, {embedding}
GRAPHS = []


def _scaled(function, factor):
    def scaled(*args, **kwargs):
        return function(*args, **kwargs) * factor
    return scaled


@register_backend(name="sendnn")
def sendnn(graph, inputs, **options):
    GRAPHS.append(graph)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        factor = dict(linear=LINEAR, embedding=EMBEDDING).get(node.target.__name__, 1.0)
        if factor != 1.0:
            node.target = _scaled(node.target, factor)
    graph.recompile()
    return graph.forward
'''


def write_package(folder: Path, *, linear: float = 1.0, embedding: float = 1.0) -> Path:
    """Write the package; returns the folder, which must be added to `sys.path`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Bytecode of a package with another fault would be used if size and second are equal.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "torch_sendnn.py").write_text(PACKAGE.format(linear=linear, embedding=embedding))
    return folder


@contextmanager
def installed(folder: Path, *, linear: float = 1.0, embedding: float = 1.0) -> Iterator[None]:
    """Make the package importable in this process, and remove it afterwards."""
    import torch
    from torch._dynamo.backends import registry

    torch._dynamo.reset()
    place = str(write_package(folder, linear=linear, embedding=embedding))
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)
        sys.modules.pop("torch_sendnn", None)
        registry._BACKENDS.pop("sendnn", None)
        registry._COMPILER_FNS.pop("sendnn", None)
        torch._dynamo.reset()
