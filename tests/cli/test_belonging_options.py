"""`compare --placement`, `--mask` and `--step-map`, as they are typed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

IDS = np.array([[1, 2, 3, 0], [4, 5, 0, 0]])
X = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)


def write(path: Path, *ranks: dict[Any, np.ndarray[Any, Any]]) -> Path:
    for rank, tensors in enumerate(ranks):
        writer = RunWriter(path, rank=rank, world_size=len(ranks), seal_at_exit=False)
        for name, values in tensors.items():
            record_into(writer, name, values)
        writer.close()
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole", {"model/input/input_ids": IDS, "model.up": X})


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    parts = [{"model/input/input_ids": IDS, "model.up": half} for half in (X[..., :3], X[..., 3:])]
    return write(tmp_path / "halves", *parts)


def test_shards_are_compared_with_the_whole(
    driftline: Callable[..., Any], whole: Path, halves: Path, tmp_path: Path
) -> None:
    said = driftline(
        *("compare", whole, halves, "--placement", "*.up=shard(-1)", "-o", tmp_path / "t")
    )
    assert said.code == 0
    assert "PASS: 3 tensors compared, none differs" in said.out
    assert "1 joined" in said.out
    assert "1 tensor was not compared as stored (1 concat)" in said.out
    assert "--format csv says each" in said.out
    table = json.loads((tmp_path / "t" / "table.json").read_text())
    row = next(row for row in table["rows"] if row["site"] == "model.up")
    assert row["candidate_recipe"] == "concat(axis 2) of 2 ranks"
    assert table["notes"]
    with (tmp_path / "t" / "rows.csv").open() as stream:
        flat = {(line["site"], line["candidate_rank"]): line for line in csv.DictReader(stream)}
    assert flat["model.up", ""]["candidate_recipe"] == "concat(axis 2) of 2 ranks"
    assert flat["model", "1"]["by"] == "name"
    columns = pq.read_table(tmp_path / "t" / "rows.parquet").to_pydict()
    assert sorted(columns["candidate_rank"], key=str) == [1, None, None]
    assert columns["confidence"] == [1.0, 1.0, 1.0]


def test_the_plan_shows_what_is_gathered(
    driftline: Callable[..., Any], whole: Path, halves: Path
) -> None:
    said = driftline("compare", whole, halves, "--placement", "*.up=shard(-1)", "--dry-run")
    assert said.code == 0
    assert "candidate first: concat(axis 2) of 2 ranks" in said.out
    assert "2 ranks of" in said.out


def test_without_a_placement_the_report_says_what_shapes_say(
    driftline: Callable[..., Any], whole: Path, halves: Path
) -> None:
    said = driftline("compare", whole, halves)
    assert "over ranks (by shape)" in " ".join(said.out.split()), "lines break where paths end"


def test_pads_do_not_count_with_a_mask(
    driftline: Callable[..., Any], whole: Path, tmp_path: Path
) -> None:
    spoilt = X.copy()
    spoilt[1, 3] += 9
    candidate = write(tmp_path / "c", {"model/input/input_ids": IDS, "model.up": spoilt})
    np.save(tmp_path / "mask.npy", IDS != 0)
    assert driftline("compare", whole, candidate).code == 1
    said = driftline("compare", whole, candidate, "--mask", tmp_path / "mask.npy")
    assert said.code == 0
    assert "masks leave pads out of 2 tensors" in said.out


def test_a_step_map_moves_the_candidate_and_is_shown(
    driftline: Callable[..., Any], tmp_path: Path
) -> None:
    def steps(*numbers: int) -> dict[Any, np.ndarray[Any, Any]]:
        return {TensorKey.of("up", "output", step=n): X + n for n in numbers}

    reference = write(tmp_path / "r", steps(0, 1))
    moved = {key._replace(step=key.step + 1): v for key, v in steps(0, 1).items()}
    candidate = write(tmp_path / "c", moved)
    said = driftline("compare", reference, candidate, "--step-map", "0=1", "--step-map", "1=2")
    assert said.code == 0
    assert "up ~ step 1" in said.out
    assert "steps as you say" in said.out
    only = driftline("compare", reference, candidate, "--step-map", "0=1,1=2", "--step", "1")
    assert only.code == 0
    assert "PASS: 1 tensor compared" in only.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--placement", "up"), "'up' is no placement"),
        (("--placement", "up=shard()"), "does not say along which axis"),
        (("--step-map", "1"), "'1' is no pair of steps"),
        (("--step-map", "0=9"), "has no step 9"),
        (("--mask", "captured"), "no attention_mask"),
        (("--mask", "gone.npy"), "gone.npy"),
    ],
)
def test_what_means_nothing_is_refused(
    driftline: Callable[..., Any], whole: Path, halves: Path, words: tuple[str, ...], said: str
) -> None:
    other = halves if "--placement" in words else whole
    answer = driftline("compare", whole, other, *words)
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err
