"""ONNX Runtime's own quantiser: QDQ and QOperator graphs against the float model in torch."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import driftline
from benchmarks.engines.cases import Case, Measured, measured, seconds
from benchmarks.engines.networks import NETWORKS
from driftline.captures.onnxruntime import model_file
from driftline.captures.onnxruntime.graph import Graph
from driftline.captures.onnxruntime.quantised import float_view
from driftline.captures.onnxruntime.scopes import Names
from driftline.comparison.table.table import Table
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run


class Scheme(NamedTuple):
    """How a model is exported and quantised.

    Attributes:
        dynamo: torch's newer exporter; else the older one.
        form: QDQ, QOperator, or dynamic.
        per_channel: A scale for every channel of a weight.
        prepared: `quant_pre_process` goes first.
        signed: Activations are int8, not uint8.
    """

    dynamo: bool
    form: str
    per_channel: bool = False
    prepared: bool = False
    signed: bool = False

    @property
    def words(self) -> str:
        parts = [
            "dynamic" if self.form == "dynamic" else f"static {self.form}",
            "per channel" if self.per_channel else "per tensor",
            "dynamo" if self.dynamo else "TorchScript export",
            *(["pre-processed"] if self.prepared else []),
            *(["int8 activations"] if self.signed else []),
        ]
        return ", ".join(parts)


SCHEMES = (
    Scheme(True, "QDQ"),
    Scheme(True, "QDQ", per_channel=True, prepared=True),
    Scheme(False, "QDQ", per_channel=True, signed=True),
    Scheme(True, "QOperator"),
    Scheme(False, "QOperator", prepared=True),
    Scheme(False, "QOperator", per_channel=True),
    Scheme(True, "dynamic"),
    Scheme(False, "dynamic", per_channel=True),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters and quantisers print."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def export(model: nn.Module, given: Tensor, path: Path, *, dynamo: bool) -> Path:
    more: dict[str, Any] = {"external_data": False, "verbose": False} if dynamo else {}
    with quiet():
        torch.onnx.export(model, (given,), str(path), dynamo=dynamo, **more)
    return path


def quantise(source: Path, given: Tensor, scheme: Scheme, path: Path) -> Path:
    """A float model in int8, calibrated on batches like the one it will be given, and not on it."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = onnx.load(str(source)).graph.input[0].name

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(7)
            self.left = [{name: _like(given, generator).numpy()} for _ in range(8)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    with quiet():
        if scheme.prepared:
            quant_pre_process(str(source), str(path.with_suffix(".pre.onnx")))
            source = path.with_suffix(".pre.onnx")
        elif scheme.dynamo:
            # The quantiser refuses a file whose transposed weights kept their old shape.
            model = onnx.load(str(source))
            del model.graph.value_info[:]
            source = path.with_suffix(".plain.onnx")
            onnx.save(model, str(source))
        if scheme.form == "dynamic":
            quantize_dynamic(str(source), str(path), per_channel=scheme.per_channel)
        else:
            quantize_static(
                str(source),
                str(path),
                Reader(),
                quant_format=QuantFormat[scheme.form],
                per_channel=scheme.per_channel,
                weight_type=QuantType.QInt8,
                activation_type=QuantType.QInt8 if scheme.signed else QuantType.QUInt8,
            )
    return path


def _like(given: Tensor, generator: torch.Generator) -> Tensor:
    """Another batch of the same kind."""
    if given.is_floating_point():
        return torch.randn(given.shape, generator=generator)
    return torch.randint(0, int(given.max()) + 1, given.shape, generator=generator)


def with_scale_doubled(source: Path, path: Path, number: int) -> tuple[Path, str]:
    """The same model with the scale of one weight doubled, and the name of that weight."""
    model = onnx.load(str(source))
    scales = [t for t in model.graph.initializer if is_weight_scale(t.name, model)]
    chosen = scales[number % len(scales)]
    chosen.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(chosen) * np.float32(2), chosen.name)
    )
    path.write_bytes(model.SerializeToString())
    return path, chosen.name.removesuffix("_scale")


def is_weight_scale(name: str, model: onnx.ModelProto) -> bool:
    """Whether a scale belongs to the codes of a weight of two axes or more."""
    codes = name.removesuffix("_scale") + "_quantized"
    return name.endswith("_scale") and any(
        tensor.name == codes and len(tensor.dims) > 1 for tensor in model.graph.initializer
    )


def torch_run(model: nn.Module, given: Tensor) -> Run:
    sink = MemorySink(name="torch")
    with torch.no_grad(), driftline.capture(model, sink):
        model(given)
    return sink.run()


def onnx_run(path: Path, inputs: Any, **how: Any) -> Run:
    sink = MemorySink(name=path.stem)
    driftline.capture_onnx(path, inputs, sink, **how)
    return sink.run()


def places_of(path: Path, weight: str) -> tuple[str, ...]:
    """Modules that a fault in a weight may be named at: the weight's, and its node's."""
    view = float_view(Graph(model_file.load_graph(path)))
    names = Names(view.graph)
    modules = [
        names.scopes[number].module
        for number, node in enumerate(view.graph.nodes)
        if weight in node.inputs
    ]
    return tuple(filter(None, (*modules, weight.rpartition(".")[0])))


def measure(network: str, scheme: Scheme, folder: Path) -> Measured:
    import onnxruntime

    model, given = NETWORKS[network]()
    plain = export(model, given, folder / "float.onnx", dynamo=scheme.dynamo)
    path = quantise(plain, given, scheme, folder / "int8.onnx")
    reference = torch_run(model, given)
    inputs = reference

    def plain_session() -> None:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        session.run(None, {session.get_inputs()[0].name: given.numpy()})

    cost = seconds(lambda: onnx_run(path, inputs)) / seconds(plain_session)
    clean = driftline.compare(reference, onnx_run(path, inputs))
    broken, weight = with_scale_doubled(path, folder / "broken.onnx", 5)
    faulty = driftline.compare(reference, onnx_run(broken, inputs))
    return measured(clean, faulty, f"scale of {weight} doubled", places_of(broken, weight), cost)


def rectifiers_of(path: Path, weight: str) -> tuple[str, ...]:
    """Modules of the rectifiers behind a weight's node: integers without a sign do their work, and
    the node's value in the quantised file is the rectifier's.
    """
    graph = Graph(model_file.load_graph(path))
    names = Names(graph)
    made = {name for node in graph.nodes if weight in node.inputs for name in node.outputs}
    return tuple(
        names.scopes[number].module
        for number, node in enumerate(graph.nodes)
        if node.op in ("Relu", "Clip") and not made.isdisjoint(node.inputs)
    )


def measure_files(network: str, folder: Path) -> Measured:
    """Two files as the command line takes them: `driftline compare float.onnx int8.onnx`."""
    import onnxruntime

    model, given = NETWORKS[network]()
    plain = export(model, given, folder / "float.onnx", dynamo=True)
    path = quantise(plain, given, FILES, folder / "int8.onnx")

    def plain_session() -> None:
        for file in (plain, path):
            session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
            session.run(None, {session.get_inputs()[0].name: given.numpy()})

    def table(file: Path) -> Table:
        reference = driftline.run_onnx(plain)
        return driftline.compare(reference, driftline.run_onnx(file, reference))

    def both() -> None:
        driftline.run_onnx(path, driftline.run_onnx(plain))

    cost = seconds(both) / seconds(plain_session)
    broken, weight = with_scale_doubled(path, folder / "broken.onnx", 5)
    faulty = table(broken)
    places = (*places_of(broken, weight), *rectifiers_of(plain, weight))
    return measured(table(path), faulty, f"scale of {weight} doubled", places, cost)


FILES = Scheme(True, "QDQ", per_channel=True)
CASES = tuple(
    Case(f"ONNX Runtime, {scheme.words}", network, partial(measure, network, scheme))
    for network in NETWORKS
    for scheme in SCHEMES
) + tuple(
    Case(
        "ONNX Runtime, two files: float against static QDQ, per channel",
        network,
        partial(measure_files, network),
    )
    for network in NETWORKS
)
