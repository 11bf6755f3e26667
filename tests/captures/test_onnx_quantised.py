"""Quantised ONNX models against floats: noise of every layer, integers for what they stand for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_zoo as zoo
import pytest
import torch
from onnx_runs import Exported, clean, run_of

import driftline
from driftline.runs.memory import MemorySink


def test_a_quantised_model_s_layers_have_their_noise_in_decibels(
    cnn: Exported, tmp_path: Path
) -> None:
    quantised = quantise(cnn, tmp_path)
    plain = run_of(cnn.path, cnn.run, optimize="none")
    candidate = run_of(quantised, cnn.run, optimize="none")
    table = driftline.compare(plain, candidate, limits={"sqnr": 10.0})
    assert table.verdict == "pass"
    layers = {
        row.key.site: row.metrics["sqnr"]
        for row in table.rows
        if row.key.port == "output" and "/" not in row.key.site and row.status == "pass"
    }
    modules = {
        n for n, m in cnn.model.named_modules() if n.endswith(("relu", "fc", "pool", "down"))
    }
    assert modules <= set(layers)
    assert all(15 < layers[site] < 60 for site in modules)
    for site in modules:  # 20 log10 of what relative_l2 says
        row = next(row for row in table.rows if row.key.site == site and row.key.port == "output")
        assert row.metrics["sqnr"] == pytest.approx(-20 * np.log10(row.metrics["relative_l2"]))
    worst = min(row.metrics["sqnr"] for row in table.rows if row.status == "pass")
    strict = driftline.compare(plain, candidate, limits={"sqnr": worst + 0.01})
    failing = [row for row in strict.rows if row.status == "fail"]
    assert failing
    assert {row.metrics["sqnr"] for row in failing} == {worst}
    shown = strict.worst(3)
    assert shown[0].metrics["sqnr"] == pytest.approx(worst)


@pytest.mark.parametrize("level", ["extended", "all"])
def test_integers_are_taken_for_the_values_they_stand_for(
    cnn: Exported, level: Any, tmp_path: Path
) -> None:
    quantised = quantise(cnn, tmp_path)
    plain = run_of(cnn.path, cnn.run, optimize=level)
    simulated = run_of(quantised, cnn.run, optimize="none")
    candidate = run_of(quantised, cnn.run, optimize=level)
    assert any(record.class_name.startswith("QLinear") for record in candidate.records)
    table = driftline.compare(plain, candidate, limits={"sqnr": 15.0})
    clean(table)
    noise = {
        (row.key.site, row.key.visit): row.metrics["sqnr"]
        for row in table.rows
        if row.key.port == "output" and row.status == "pass"
    }
    wanted = {("relu", 0), ("pool", 0), ("stages.0.relu", 0), ("stages.0.relu", 1), ("fc", 0)}
    assert wanted <= set(noise)
    # The same noise as in floats that were rounded, but for how sums are rounded.
    told = driftline.compare(plain, simulated, metrics=["sqnr"])
    for row in told.rows:
        place = (row.key.site, row.key.visit)
        if place in wanted and row.key.port == "output":
            assert noise[place] == pytest.approx(row.metrics["sqnr"], abs=1.5)


def test_layers_of_a_dynamically_quantised_model_have_their_noise_too(
    tmp_path: Path,
) -> None:
    from onnxruntime.quantization import quantize_dynamic

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    ).eval()
    given = torch.randint(0, 32, (2, 6))
    path = zoo.export(model, given, tmp_path / "m.onnx")
    with quiet():
        quantize_dynamic(str(path), str(tmp_path / "dynamic.onnx"))
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(model, sink):
        model(given)
    for level, layers in (("none", {"1", "2", "3"}), ("all", {"2", "3"})):
        plain = run_of(path, sink.run(), optimize=level)
        candidate = run_of(tmp_path / "dynamic.onnx", sink.run(), optimize=level)
        for reference in (sink.run(), plain):
            table = driftline.compare(reference, candidate, limits={"sqnr": 20.0})
            assert table.verdict == "pass", table.finding
            noise = {
                row.key.site: row.metrics["sqnr"]
                for row in table.rows
                if row.key.port == "output" and row.status == "pass"
            }
            assert layers <= set(noise)
        assert 25 < noise["0/embedding"] < 60  # by what its integers mean


def test_what_a_node_takes_is_compared_with_the_integers_that_it_takes(
    cnn: Exported, tmp_path: Path
) -> None:
    from onnxruntime.quantization import QuantType

    types = {"per_channel": True, "weight_type": QuantType.QInt8}
    quantised = quantise(cnn, tmp_path, **types, activation_type=QuantType.QInt8)
    plain = run_of(cnn.path, cnn.run, optimize="all")
    table = driftline.compare(plain, run_of(quantised, cnn.run, optimize="all"))
    clean(table)  # by what rounding to integers explains, from the model's input on
    decoded = [row for row in table.rows if "dequantise" in row.candidate_recipe]
    assert {row.key.port for row in decoded} == {"input", "output"}
    assert {row.candidate_dtype for row in decoded} <= {"int8", "uint8"}
    assert "relu/relu" in {row.key.site for row in decoded if row.key.port == "input"}


def quantise(made: Exported, folder: Path, **how: Any) -> Path:
    """The model in int8, calibrated on what it is run with, one layer much too coarse."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": made.given.numpy()}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    with quiet():
        quantize_static(
            str(made.path), str(folder / "int8.onnx"), Reader(), quant_format=QuantFormat.QDQ, **how
        )
    return folder / "int8.onnx"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the advice that a quantiser logs."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
