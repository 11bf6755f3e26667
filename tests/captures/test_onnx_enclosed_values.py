"""Nodes of an exported file that say nothing of themselves, and last states that nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from benchmarks.engines.cases import counted
from benchmarks.engines.networks import Tagger, gated, tagger
from benchmarks.engines.onnx_quantised import Scheme, export, onnx_run, quantise, torch_run
from onnx import numpy_helper
from test_onnx_quantised import quiet
from torch import Tensor, nn

import driftline
from driftline.comparison.table.table import Table

DROPS_NOTES = Scheme(True, "QDQ", per_channel=True, prepared=True)
DROPS_NAMES = Scheme(False, "QDQ", prepared=True)


def compared(made: tuple[nn.Module, Tensor], path: Path) -> Table:
    reference = torch_run(*made)
    with quiet():
        return driftline.compare(reference, onnx_run(path, reference))


def share(table: Table) -> float:
    pairs, inside, tensors = counted(table)
    return (pairs + inside) / tensors


def int8(made: tuple[nn.Module, Tensor], scheme: Scheme, folder: Path) -> Path:
    model, given = made
    plain = export(model, given, folder / "float.onnx", dynamo=scheme.dynamo)
    return quantise(plain, given, scheme, folder / "int8.onnx")


@pytest.mark.parametrize("scheme", [DROPS_NOTES, DROPS_NAMES], ids=lambda scheme: scheme.words)
def test_values_between_paired_ones_pair_where_nodes_have_lost_their_modules(
    scheme: Scheme, tmp_path: Path
) -> None:
    table = compared(gated(), int8(gated(), scheme, tmp_path))
    assert table.verdict == "pass", table.finding
    assert share(table) == 1
    own = {(row.key.site, row.key.visit) for row in table.rows if row.compared}
    # One activation that is called twice, a gate, and sums and pools that have no weights.
    assert {("blocks.1.act", 0), ("blocks.1.act", 1), ("blocks.2.excitation.gate", 0)} <= own
    assert {("blocks.2", 0), ("pool", 0), ("stem", 0)} <= own


def test_a_wrong_gate_is_named_in_a_file_that_has_lost_its_modules(tmp_path: Path) -> None:
    path = int8(gated(), DROPS_NOTES, tmp_path)
    model = onnx.load(str(path))
    gates = [node for node in model.graph.node if node.output[0] == "hardsigmoid_1"]
    next(a for a in gates[0].attribute if a.name == "alpha").f *= 1.5
    path.write_bytes(model.SerializeToString())
    table = compared(gated(), path)
    assert table.verdict == "fail"
    assert table.first_site == "blocks.1.excitation.gate", table.finding


class Doubled(nn.Module):
    """Behind a rectifier, code of the model doubles its value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.relu(self.conv(x)) * 2), 1))


def test_a_rectifier_that_a_quantiser_dropped_is_not_paired_with_the_next_value(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    made = Doubled().eval(), torch.randn(2, 3, 16, 16)
    table = compared(made, int8(made, DROPS_NOTES, tmp_path))
    assert table.verdict == "pass", table.finding
    assert share(table) == 1
    rows = {(row.key.site, row.key.port): row for row in table.rows if row.compared}
    assert rows["relu", "output"].metrics["relative_l2"] < 0.1
    assert rows["pool", "input"].metrics["relative_l2"] < 0.1


def test_last_states_of_all_layers_and_directions_are_stacked_for_the_comparison(
    tmp_path: Path,
) -> None:
    made = tagger()
    table = compared(made, export(*made, tmp_path / "float.onnx", dynamo=False))
    assert table.verdict == "pass", table.finding
    assert share(table) == 1
    states = [row for row in table.rows if row.key.slot in ("1.0", "1.1") and row.compared]
    assert len(states) == 2
    assert all(row.metrics["relative_l2"] < 1e-5 for row in states)


def test_a_state_that_no_node_gives_is_inside_the_recurrent_node(tmp_path: Path) -> None:
    made = tagger()
    table = compared(made, export(*made, tmp_path / "float.onnx", dynamo=True))
    assert table.verdict == "pass", table.finding
    hidden = [row for row in table.rows if row.key.slot in ("1.0", "1.1")]
    assert len(hidden) == 2
    assert all("inside a fusion: LSTM" in row.reason for row in hidden)
    assert share(table) == 1


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_with_a_wrong_weight_is_named(layer: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    made = Tagger(layer).eval(), torch.randint(0, 50, (2, 11))
    path = export(*made, tmp_path / "float.onnx", dynamo=False)
    model = onnx.load(str(path))
    node = [n for n in model.graph.node if n.op_type in ("LSTM", "GRU")][-1]
    weight = next(t for t in model.graph.initializer if t.name == node.input[1])
    values = numpy_helper.to_array(weight) * np.float32(1.2)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    path.write_bytes(model.SerializeToString())
    table = compared(made, path)
    assert table.verdict == "fail"
    assert table.first_site == "rnn", table.finding
