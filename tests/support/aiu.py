"""A stand-in for the AIU: a package `torch_sendnn` whose backend runs graphs, rightly or wrongly.

A factor for linear layers or embeddings is the fault that a layer debugger must find.
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
    """The package, in a folder that belongs on `sys.path`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Bytecode of another fault, as long and of the same second, would be taken for this one's.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "torch_sendnn.py").write_text(PACKAGE.format(linear=linear, embedding=embedding))
    return folder


@contextmanager
def installed(folder: Path, *, linear: float = 1.0, embedding: float = 1.0) -> Iterator[None]:
    """The package can be imported in this process, and is forgotten afterwards."""
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
