# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""ONNX models as data: nodes with their attributes, and initializers with their values.

The counterpart of `torch/model_facts.py`. What is described is the model as it was exported, not
what the optimiser made of it. Nodes go by the sites of the run; an initializer goes by the name the
exporter gave it, which is that of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from driftline.captures.model_facts import FactOptions, redacted, scalar
from driftline.captures.onnxruntime import model_file
from driftline.captures.onnxruntime.model_file import Weights
from driftline.captures.onnxruntime.quantised import plain_token
from driftline.captures.onnxruntime.recorder import TracedGraph
from driftline.captures.recorder import Refusal, Snapshot
from driftline.captures.weight_facts import MOST_BYTES, Weight, WeightReader
from driftline.numerics.dtypes import DTYPES
from driftline.runs.sidecars.model_facts import MODEL, WEIGHTS, line_of
from driftline.runs.sinks import Sheets, Sink

_MOST_NODES = 200_000


def write_model_facts(sink: Sink, file: Path, traced: TracedGraph, options: FactOptions) -> None:
    """Describe an exported model in a run.

    Args:
        sink: Takes the lines, if it takes side files at all.
        file: The model.
        traced: Says which site a node has.
        options: What is described.
    """
    if not options.model or not isinstance(sink, Sheets):
        return
    model = model_file.load_graph(file)
    lines = [line_of("model", framework="onnxruntime", site="(root)"), *_nodes(model, traced)]
    initializers = list(_initializers(model))
    sink.sheet(MODEL, "".join([*lines, *(line for line, _, _ in initializers)]))
    if not options.weights:
        return
    values = Weights(file)
    texts: list[str] = []
    reader = WeightReader(lambda name, text: texts.append(text))
    sizes = [size for _, _, size in initializers]
    full = sum(sizes) <= MOST_BYTES
    for _, (site, name, path), size in initializers:
        weight = Weight(site, name, _Reading(values, path), size)
        texts.append(reader.line(weight, full=full))
    if texts:
        sink.sheet(WEIGHTS, "".join(texts))


def _nodes(model: Any, traced: TracedGraph) -> Iterator[str]:
    # Nodes that compute: what only rounds to integers and back is no part of a model, and one that
    # computes with integers is the operator that it stands for.
    by_name: dict[str, Any] = {}
    by_value: dict[str, Any] = {}
    for written in model.graph.node:
        for name in (written.name, plain_token(written.name)) if written.name else ():
            by_name.setdefault(name, written)
        by_value |= dict.fromkeys(written.output, written)
    seen: dict[str, int] = {}
    for node in traced.exported.nodes[:_MOST_NODES]:
        outputs = [name for name in node.outputs if name]
        site = traced.site(outputs[0]) if outputs else node.name
        # Several nodes of one module share its site; each has a line of its own.
        count = seen[site] = seen.get(site, 0) + 1
        place = site if count == 1 else f"{site}#{count - 1}"
        written = by_name.get(node.name) or by_value.get(next(iter(outputs), ""))
        attributes = {
            attribute.name: redacted(attribute.name, value)
            for attribute in (written.attribute if written is not None else ())
            if (value := _value(attribute)) is not None
        }
        is_own = written is not None and written.op_type == node.op
        domain = f"{node.domain}." if is_own and node.domain not in ("", "ai.onnx") else ""
        kind = f"onnx.{domain}{node.op}"
        yield line_of("module", site=place, **{"class": kind}, attributes=attributes)


def _value(attribute: Any) -> Any:
    """A scalar attribute, or a short list of them; None for tensors and graphs."""
    kinds = {1: attribute.f, 2: attribute.i, 3: attribute.s}
    lists = {6: attribute.floats, 7: attribute.ints, 8: attribute.strings}
    value: Any = kinds.get(attribute.type)
    if value is None:
        value = list(lists.get(attribute.type, ())) or None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    plain = None if value is None else scalar(value)
    return plain if isinstance(plain, int | float | str | list) else None


def _initializers(model: Any) -> Iterator[tuple[str, tuple[str, str, str], int]]:
    """The line of each, its site, name and name in the file, and its size."""
    for tensor in model.graph.initializer:
        dtype = model_file.TYPES.get(tensor.data_type, "")
        path, _, name = tensor.name.rpartition(".")
        site = path or "(root)"
        shape = tuple(tensor.dims)
        about: dict[str, Any] = {"dtype": dtype, "shape": list(shape), "device": "cpu"}
        if not dtype:
            about["unreadable"] = "not readable: elements that are no numbers"
        line = line_of("tensor", site=site, name=name, **about)
        size = DTYPES[dtype].byte_count(math.prod(shape)) if dtype else 0
        yield line, (site, name, tensor.name), size


class _Reading:
    """Reads one initializer."""

    __slots__ = ("_name", "_values")

    def __init__(self, values: Weights, name: str) -> None:
        self._values = values
        self._name = name

    def __call__(self) -> Snapshot | Refusal:
        tensor = self._values.read(self._name)
        if tensor is None:
            return Refusal("its values are not in the file")
        data: Any = tensor.data
        return Snapshot(
            tensor.dtype,
            tensor.shape,
            data.ctypes.data,
            data.nbytes,
            "cpu",
            None,
            math.prod(tensor.shape),
            "",
            data,
        )
