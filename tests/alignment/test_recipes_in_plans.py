"""A plan with recipes, saved and given back, measures the same; an edited one what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.alignment.plan_file import write_plan
from driftline.alignment.recipe_steps import Step, step_from_text
from driftline.errors import BadFile, BadInput
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def sharded(path: Path, x: np.ndarray[Any, Any]) -> Run:
    for rank, part in enumerate((x[:, :2], x[:, 2:])):
        writer = RunWriter(path, rank=rank, world_size=2, seal_at_exit=False)
        record_into(writer, "shard", part)
        record_into(writer, "same", x)
        writer.close()
    return driftline.open_run(path)


def cases(path: Path) -> dict[str, tuple[Run, Run, dict[str, Any]]]:
    w, x = noise(4, 6), noise(2, 5)
    codes = RNG.integers(-127, 128, (4, 6)).astype(np.int8)
    np.save(path / "m.npy", np.array([[1, 1, 0, 1, 1]]))
    ids = np.arange(10).reshape(2, 5)
    hidden = noise(2, 5, 3)
    return {
        "transposed": (run_of({"a.weight": w}), run_of({"a.weight": w.T.copy()}), {}),
        "scaled": (
            run_of({"a.weight": codes.astype(np.float32) * 0.5}),
            run_of({"a.weight": codes, "a.weight_scale": np.float32([0.5])}),
            {},
        ),
        "unscaled": (
            run_of({"a.weight": codes.astype(np.float32), "b": x}),
            run_of({"a.weight": codes, "b": x}),
            {},
        ),
        "sharded": (
            run_of({"shard": x, "same": x}),
            sharded(path / "run", x),
            {"placements": ["shard=shard(1)"]},
        ),
        "masked": (
            run_of({"m/input/input_ids": ids, "a": hidden}),
            run_of({"m/input/input_ids": ids, "a": hidden}),
            {"masks": [path / "m.npy"]},
        ),
    }


@pytest.mark.parametrize("name", ["transposed", "scaled", "unscaled", "sharded", "masked"])
def test_a_saved_plan_measures_the_same(name: str, tmp_path: Path) -> None:
    reference, candidate, options = cases(tmp_path)[name]
    plan = driftline.align(reference, candidate, **options)
    write_plan(plan, tmp_path / "plan.toml")
    at_once = driftline.compare(reference, candidate, **options)
    from_file = driftline.compare(reference, candidate, plan=tmp_path / "plan.toml")
    assert [row._replace(by="") for row in from_file.rows] == [
        row._replace(by="") for row in at_once.rows
    ]
    assert from_file.notes == at_once.notes


def test_a_transpose_written_by_hand_is_carried_out(tmp_path: Path) -> None:
    x = noise(3, 3)
    reference, candidate = run_of({"a": x}), run_of({"b": x.T.copy()})
    (tmp_path / "plan.toml").write_text(
        """
        plan = 1
        [[pair]]
        reference = "rank0/step0/a/output/0"
        candidate = "rank0/step0/b/output/0"
        [pair.candidate_recipe]
        sources = ["rank0/step0/b/output/0"]
        steps = ["transpose(1,0)"]
        shape = [3, 3]
        """
    )
    row = driftline.compare(reference, candidate, plan=tmp_path / "plan.toml").rows[0]
    assert row.metrics["different"] == 0
    assert (row.by, row.candidate_site) == ("plan", "b")


def test_a_step_that_does_not_fit_is_refused_before_anything_is_compared(tmp_path: Path) -> None:
    run = run_of({"a": noise(3, 4), "b": noise(2)})
    (tmp_path / "plan.toml").write_text(
        """
        plan = 1
        [[pair]]
        reference = "rank0/step0/a/output/0"
        candidate = "rank0/step0/a/output/0"
        [pair.candidate_recipe]
        sources = ["rank0/step0/a/output/0"]
        steps = ["trim(axis 0, 0:9)"]
        shape = [3, 4]
        """
    )
    with pytest.raises(BadFile, match=r"trim\(axis 0, 0:9\) does not fit 3x4"):
        driftline.compare(run, run, plan=tmp_path / "plan.toml")


def test_a_step_that_means_nothing_is_refused_with_its_line(tmp_path: Path) -> None:
    run = run_of({"a": noise(3, 4)})
    (tmp_path / "plan.toml").write_text(
        """plan = 1
[[pair]]
reference = "rank0/step0/a/output/0"
candidate = "rank0/step0/a/output/0"
candidate_recipe = { sources = ["rank0/step0/a/output/0"], steps = ["turn"], shape = [3, 4] }
"""
    )
    with pytest.raises(BadFile, match="line 5: 'turn' is no step"):
        driftline.compare(run, run, plan=tmp_path / "plan.toml")


STEPS = {
    "concat(axis 1)": Step("concat", 1),
    "split(axis 2, 4:8)": Step("split", 2, 4, 8),
    "select(axis 1, 0:3,6)": Step("select", 1, numbers=(0, 1, 2, 6)),
    "transpose(1, 0)": Step("transpose", numbers=(1, 0)),
    "reshape()": Step("reshape"),
    "times(-0.5)": Step("times", factor=-0.5),
    "dequantise(axis 1, times 0.25, minus 3.0)": Step("dequantise", 1, factor=0.25, zero=3.0),
    "dequantise(axis 0)": Step("dequantise"),
}


@pytest.mark.parametrize("text", STEPS)
def test_steps_are_written_as_they_are_read(text: str) -> None:
    assert step_from_text(text) == STEPS[text]
    assert step_from_text(STEPS[text].text()) == STEPS[text]


@pytest.mark.parametrize(
    "text",
    ["times(nan)", "times(inf)", "times()", "dequantise(axis 0, times)", "dequantise(times 1 2)"],
)
def test_a_factor_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="numbers cannot be read"):
        step_from_text(text)
