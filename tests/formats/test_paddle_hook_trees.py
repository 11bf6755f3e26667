"""Trees of the Paddle saving hook: both name patterns, every level, repeated calls, strangers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from driftline import compare, open_run, register_saving_hook
from driftline.dialects.paddle_hook.hook import wait_until_saved


def _tensor(root: Path, rank: int, index: int, name: str, step: int, value: float) -> None:
    place = root / "tensors" / f"rank_{rank}"
    place.mkdir(parents=True, exist_ok=True)
    file = f"tensor_idx_{index}_layer_class_Linear_layer_name_{name}_micro_step_{step}.npy"
    np.save(place / file, np.full((2, 3), value, np.float32))


def _grad(root: Path, rank: int, index: int, name: str, step: int, value: float) -> None:
    place = root / "grads" / f"rank_{rank}"
    place.mkdir(parents=True, exist_ok=True)
    file = f"grad_idx_{index}_of_param_name_{name}_micro_step_{step}.npy"
    np.save(place / file, np.full((2, 3), value, np.float32))


def _tree(root: Path) -> Path:
    for rank in (0, 1):
        for index, (name, step) in enumerate(
            [("linear_0", 0), ("linear_10", 0), ("linear_2", 0), ("linear_0", 1)]
        ):
            _tensor(root, rank, index, name, step, index + 10.0 * rank)
        _grad(root, rank, 0, "linear_2.w_0", 0, 5.0)
        _grad(root, rank, 1, "linear_2.b_0", 0, 6.0)
    return root


def test_names_become_sites_classes_steps_and_ranks(tmp_path: Path) -> None:
    run = open_run(_tree(tmp_path))
    assert run.manifest["format"] == "paddle saving hook"
    assert len(run) == 12
    assert run.get("linear_0", step=1, rank=1).numpy()[0, 0] == 13.0
    assert run.get("linear_2").record.class_name == "Linear"
    assert run.get("linear_2", "param_grad", "b_0").numpy()[0, 0] == 6.0


def test_the_index_is_the_order_whatever_the_names_sort_like(tmp_path: Path) -> None:
    run = open_run(_tree(tmp_path))
    outputs = [r.key.site for r in run.records if r.key.port == "output" and r.key.rank == 0]
    assert outputs == ["linear_0", "linear_10", "linear_2", "linear_0"]


def test_it_opens_at_the_kind_and_at_the_rank_too(tmp_path: Path) -> None:
    _tree(tmp_path)
    assert len(open_run(tmp_path / "tensors")) == 8
    rank = open_run(tmp_path / "grads" / "rank_1")
    assert {str(record.key) for record in rank.records} == {
        "rank1/step0/linear_2/param_grad/w_0",
        "rank1/step0/linear_2/param_grad/b_0",
    }


def test_a_layer_called_twice_in_a_micro_step_has_two_visits(tmp_path: Path) -> None:
    _tensor(tmp_path, 0, 0, "tied", 0, 1.0)
    _tensor(tmp_path, 0, 1, "tied", 0, 2.0)
    run = open_run(tmp_path)
    assert run.get("tied", visit=1).numpy()[0, 0] == 2.0


def test_the_gradients_of_the_seed_s_own_pattern_are_gradients(tmp_path: Path) -> None:
    place = tmp_path / "grads" / "rank_0"
    place.mkdir(parents=True)
    name = "tensor_idx_3_layer_class_LayerNorm_layer_name_norm_1_micro_step_2.npy"
    np.save(place / name, np.ones(4, np.float32))
    (record,) = open_run(tmp_path).records
    assert str(record.key) == "rank0/step2/norm_1/param_grad/0"
    assert record.class_name == "LayerNorm"


def test_the_checker_s_results_are_passed_over_and_strangers_are_noted(tmp_path: Path) -> None:
    _tree(tmp_path)
    (tmp_path / "tensors" / "compare_rst").mkdir()
    (tmp_path / "tensors" / "compare_rst" / "rank_0_rst.csv").write_text("tensor_name\n")
    np.save(tmp_path / "tensors" / "rank_0" / "mine.npy", np.ones(3))
    run = open_run(tmp_path)
    assert len(run) == 12
    assert ["mine.npy" in event["message"] for event in run.events()] == [True]


def test_what_our_own_hook_saves_reads_back_and_a_planted_error_is_found(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.ones(2, 3)
    for name in ("a", "b"):
        hooked = register_saving_hook(model, tmp_path / name, ["Linear"])
        hooked(x).sum().backward()
        wait_until_saved()
        with torch.no_grad():
            model[2].bias += 0.5
    ours = open_run(tmp_path / "a")
    assert {record.key.site for record in ours.records} == {"0", "2"}
    table = compare(ours, tmp_path / "b")
    failed = [row.key.site for row in table.rows if row.status == "fail"]
    assert failed == ["2"]


def _numbered(root: Path, first: int, *, error_at: int | None = None) -> Path:
    """A program whose first saved layer has this number, since it built others before."""
    values = np.random.default_rng(4)
    for step in range(2):
        for at in range(4):
            place = root / "tensors" / "rank_0"
            place.mkdir(parents=True, exist_ok=True)
            for half, kind in enumerate(("LayerNorm", "Linear")):
                array = values.standard_normal((3, 4)).astype(np.float32)
                if error_at == at and kind == "Linear" and step:
                    array += 0.5
                name = f"{kind.lower()}_{first + at}"
                file = f"tensor_idx_{step * 8 + at * 2 + half}_layer_class_{kind}_layer_name_{name}"
                np.save(place / f"{file}_micro_step_{step}.npy", array)
    return root


@pytest.mark.parametrize("first", [0, 1, 9])
def test_layers_numbered_differently_pair_by_class_and_order(tmp_path: Path, first: int) -> None:
    ours = _numbered(tmp_path / "a", 0)
    table = compare(ours, _numbered(tmp_path / "b", first, error_at=2))
    failed = [(row.key.site, row.key.step) for row in table.rows if row.status == "fail"]
    assert failed == [("linear_2", 1)]
    assert sum(row.status == "pass" for row in table.rows) == 15


def test_trees_of_torch_and_paddle_programs_pair_by_class_order_and_parameter(
    tmp_path: Path,
) -> None:
    dice = np.random.default_rng(0)
    out = dice.standard_normal((3, 4)).astype(np.float32)
    weight = dice.standard_normal((4, 4)).astype(np.float32)
    bias = dice.standard_normal(4).astype(np.float32)
    for name, layer, slots, turned in (
        ("torch", "block.fc", ("weight", "bias"), weight.T),
        ("paddle", "linear_3", ("w_0", "b_0"), weight),
    ):
        for kind in ("tensors", "grads"):
            (tmp_path / name / kind / "rank_0").mkdir(parents=True)
        file = f"tensor_idx_0_layer_class_Linear_layer_name_{layer}_micro_step_0.npy"
        np.save(tmp_path / name / "tensors/rank_0" / file, out)
        values = [(slots[0], turned), (slots[1], bias)]
        for index, (slot, value) in enumerate(values if name == "torch" else reversed(values)):
            file = f"grad_idx_{index}_of_param_name_{layer}.{slot}_micro_step_0.npy"
            np.save(tmp_path / name / "grads/rank_0" / file, value)
    run = open_run(tmp_path / "paddle")
    assert {(r.key.slot, r.alias, r.class_name) for r in run.records} == {
        ("0", "", "Linear"),
        ("w_0", "weight", "Linear"),
        ("b_0", "bias", "Linear"),
    }
    table = compare(tmp_path / "torch", tmp_path / "paddle")
    assert [row.status for row in table.rows] == ["pass"] * 3
