"""What a run says of itself survives `--step`, `--rank` and `convert`: asked of the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline import capture, open_run
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

Say = Callable[..., Any]

STAGES = [{"stage": 0, "of": 2, "site": "(root).first"}]
MESH = {"names": ["dp", "tp"], "shape": [1, 2], "ranks": [0, 1]}
GROUPS = [[0, 1]]


def _linear(path: Path, framework: str, *, steps: int = 2, first_step: int = 0) -> Path:
    """A square layer: torch stores its weight as [out, in], Paddle as [in, out]."""
    generator = np.random.default_rng(3)
    weight = generator.standard_normal((4, 4)).astype(np.float32)
    stored = np.ascontiguousarray(weight.T) if framework == "paddle" else weight
    writer = RunWriter(path, command=["python", "train.py"])
    writer.describe(framework=framework)
    for step in range(first_step, first_step + steps):
        taken = generator.standard_normal((2, 4)).astype(np.float32)
        for port, slot, values in (
            ("param", "weight", stored),
            ("input", "0", taken),
            ("output", "0", taken @ weight.T),
        ):
            key = TensorKey.of("proj", port, slot, step=step)
            record_into(writer, key, np.ascontiguousarray(values), class_name="Linear")
    writer.close()
    return path


def _hook_tree(root: Path, numbers: tuple[int, ...]) -> Path:
    """A tree of the Paddle saving hook, whose layers are numbered as the program built them."""
    place = root / "tensors" / "rank_0"
    place.mkdir(parents=True)
    for index, number in enumerate(numbers):
        name = f"tensor_idx_{index}_layer_class_Linear_layer_name_linear_{number}_micro_step_0.npy"
        values = np.random.default_rng(index).standard_normal((2, 3)).astype(np.float32)
        np.save(place / name, values)
    return root


def _job(path: Path) -> Path:
    """Two ranks of a job that say how they lie on a mesh and which stage of a pipeline they run."""
    for rank in (0, 1):
        writer = RunWriter(path, rank=rank, world_size=2, command=["torchrun", "train.py"])
        writer.describe(
            framework="torch",
            meshes=[MESH],
            groups=GROUPS,
            stages=[{**STAGES[0], "stage": rank}],
        )
        values = np.full((2, 3), float(rank), np.float32)
        record_into(writer, TensorKey.of(f"layer.{rank}", "output", rank=rank), values)
        writer.close()
    return path


@pytest.mark.parametrize("narrowed", [(), ("--step", "0"), ("--rank", "0")])
def test_a_square_weight_is_turned_whatever_part_of_the_runs_is_compared(
    driftline: Say, tmp_path: Path, narrowed: tuple[str, ...]
) -> None:
    runs = _linear(tmp_path / "t", "torch"), _linear(tmp_path / "p", "paddle")
    said = driftline("compare", *runs, *narrowed)
    assert said.code == 0, said.out


def test_a_comparison_of_one_step_says_which_frameworks_it_is_about(
    driftline: Say, tmp_path: Path
) -> None:
    runs = _linear(tmp_path / "t", "torch"), _linear(tmp_path / "p", "paddle")
    table = json.loads(driftline("compare", *runs, "--step", "0", "--format", "json").out)
    about = [table[side]["about"]["framework"] for side in ("reference", "candidate")]
    assert about == ["torch", "paddle"]


@pytest.mark.parametrize("to", ["run", "npy", "safetensors"])
def test_a_converted_tree_of_the_saving_hook_is_still_one_of_paddle(
    driftline: Say, tmp_path: Path, to: str
) -> None:
    trees = [_hook_tree(tmp_path / "a", (0, 1, 2)), _hook_tree(tmp_path / "b", (1, 2, 3))]
    before = driftline("compare", *trees, "--dry-run").out
    assert "by structure" in before
    converted: list[Path] = []
    for tree in trees:
        converted.append(tmp_path / f"{tree.name}-{to}")
        assert driftline("convert", tree, "-o", converted[-1], "--to", to).code == 0
    after = driftline("compare", *converted, "--dry-run").out
    # Numbered names pair by structure: `linear_1` of one program is `linear_2` of the other.
    assert after == before
    facts = open_run(converted[0]).facts
    assert (facts.framework, facts.numbered_names) == ("paddle", True)
    assert facts.step_unit == "micro-batch"


@pytest.mark.parametrize("to", ["run", "npy"])
def test_a_converted_job_keeps_its_meshes_groups_stages_and_world(
    driftline: Say, tmp_path: Path, to: str
) -> None:
    job = _job(tmp_path / "job")
    assert driftline("convert", job, "-o", tmp_path / "out", "--to", to).code == 0
    before, after = open_run(job).facts, open_run(tmp_path / "out").facts
    assert before.stages == {0: [(0, "(root).first")], 1: [(1, "(root).first")]}
    assert after.processes == before.processes
    assert after.world == 2
    shown = [driftline("show", place).out for place in (job, tmp_path / "out")]
    wanted = ("mesh ", "stages ")
    lines = [[line for line in out.splitlines() if line.startswith(wanted)] for out in shown]
    assert len(lines[0]) == 2
    assert lines[1] == lines[0]


@pytest.mark.parametrize("to", ["run", "npy"])
def test_a_converted_file_of_tensors_still_has_no_order(
    driftline: Say, tmp_path: Path, to: str
) -> None:
    np.savez(tmp_path / "file.npz", a=np.zeros(3, np.float32), b=np.ones(3, np.float32))
    converted = tmp_path / "out"
    assert driftline("convert", tmp_path / "file.npz", "-o", converted, "--to", to).code == 0
    assert open_run(converted).facts.order == "none"
    table = json.loads(
        driftline("compare", tmp_path / "file.npz", converted, "--format", "json").out
    )
    assert table["reference"]["ordered"] is table["candidate"]["ordered"] is False


def test_a_dump_converted_twice_still_says_what_wrote_it_first(
    driftline: Say, tmp_path: Path
) -> None:
    tree = _hook_tree(tmp_path / "a", (0, 1))
    assert driftline("convert", tree, "-o", tmp_path / "once").code == 0
    assert driftline("convert", tmp_path / "once", "-o", tmp_path / "twice").code == 0
    facts = open_run(tmp_path / "twice").facts
    assert facts.formats[-1] == "paddle saving hook"
    assert facts.framework == "paddle"


class _Gate(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


def test_rows_of_a_compiled_graph_keep_their_lines_when_steps_are_mapped(
    driftline: Say, tmp_path: Path
) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        torch._dynamo.reset()
        with capture(model := _Gate(), run, graph="fx"):
            compiled = torch.compile(model, backend="eager")
            for _ in range(2):  # each call is a step
                compiled(torch.ones(2, 4))
    table = json.loads(driftline("compare", *runs, "--step-map", "0=1", "--format", "json").out)
    lines = {row["site"]: row["line"] for row in table["rows"] if row["status"] == "pass"}
    (mul,) = [line for site, line in lines.items() if site.endswith("/mul")]
    assert mul.startswith(f"{__file__}:")
    lone = {row["line"] for row in table["rows"] if row["status"] == "missing"}
    assert mul in lone
