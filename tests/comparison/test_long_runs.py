"""Runs of very many tensors: the same table to the byte, out of a file instead of memory."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

import driftline as api
from driftline.alignment import align as alignment
from driftline.alignment import streaming
from driftline.comparison import shards
from driftline.comparison.measure import scheduler
from driftline.comparison.table import files, row_spool
from driftline.comparison.table import part as parts
from driftline.comparison.table.row import Row
from driftline.reporting import writers
from driftline.runs import index as kept_lines
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter

SITES = 12


def write(
    path: Path, *, shift: float = 0.0, ranks: int = 2, steps: int = 2, skip=(), **how
) -> Path:
    """Inputs, outputs, gradients and parameters of a chain of layers; `shift` is put into one."""
    for rank in range(ranks):
        writer = RunWriter(path, rank=rank, world_size=ranks, seal_at_exit=False)
        draw = np.random.default_rng(rank)
        places = [
            (step, site, port, slot)
            for step in range(steps)
            for site in range(SITES)
            for port, slot in (
                ("input", "x"),
                ("output", "0"),
                ("grad_output", "0"),
                ("param_grad", "bias"),
            )
        ]
        if how.get("swapped"):
            places[5], places[20] = places[20], places[5]
        for step, site, port, slot in places:
            values = draw.standard_normal((3, 4)).astype(how.get("dtype", np.float32))
            if site == 7 and port == "output":
                values[1, 2] += shift
            name = f"model.layers.{site}.linear"
            if (rank, step, site, port) in skip:
                continue
            key = TensorKey.of(name, port, slot, step=step, rank=rank)
            shape = (1, 3, 4) if (site, port) == how.get("wrapped") else (3, 4)
            record = Record(key, 0, values.dtype.name, shape, "", "Linear")
            writer.put(record, values.reshape(-1).view(np.uint8))
        writer.close()
    return path


@pytest.fixture
def everything_is_long(monkeypatch: pytest.MonkeyPatch):
    """What holds for a million tensors is tried with a hundred."""

    def switch() -> None:
        monkeypatch.setattr(kept_lines.MemoryBudget.__init__, "__defaults__", (10,))
        monkeypatch.setattr(kept_lines, "_STRETCH", 7)
        monkeypatch.setattr(alignment, "LONG", 10)
        monkeypatch.setattr(streaming, "_FEW", 10)
        monkeypatch.setattr(scheduler, "MANY", 10)
        monkeypatch.setattr(shards, "MANY", 10)
        monkeypatch.setattr(scheduler, "WINDOW", 9)
        monkeypatch.setattr(scheduler.windows, "__defaults__", (9,))
        monkeypatch.setattr(row_spool, "_BLOCK", 4)
        monkeypatch.setattr(files, "_PIECE", 5)

    return switch


def files_of(table: api.Table, place: Path) -> dict[str, bytes]:
    table.write(place)
    shown = {path.name: path.read_bytes() for path in sorted(place.iterdir())}
    for format in ("table", "json", "csv", "markdown", "junit"):
        for everything in (False, True):
            stream = io.StringIO()
            writers.table(table, format, stream, everything=everything)
            shown[f"{format} {everything}"] = stream.getvalue().encode()
    return {**shown, "str": str(table).encode()}


CASES = {
    "equal": ({}, {}, {}, True),
    "one layer is off": ({}, {"shift": 3.0}, {}, True),
    "half against single": ({}, {"dtype": np.float16}, {}, True),
    "some are missing": ({}, {"skip": {(0, 1, 3, "output"), (1, 0, 0, "input")}}, {}, True),
    "some are extra": ({"skip": {(0, 1, 3, "output")}}, {"shift": 1.0}, {}, True),
    "a step is missing": ({}, {"steps": 1}, {}, None),
    "other order": ({}, {"swapped": True, "shift": 3.0}, {}, True),
    "missing on both sides": (
        {"skip": {(0, 0, 1, "input")}},
        {"skip": {(1, 1, 1, "input")}},
        {},
        False,
    ),
    "only some sites": ({}, {"shift": 3.0}, {"sites": ["*.7.*"], "ports": ["output"]}, False),
    "many sites": ({}, {"shift": 3.0}, {"sites": ["*.1*.*", "*.7.*"]}, True),
    "by name only": ({}, {"shift": 3.0}, {"structural": False}, True),
    "other limits": ({}, {"shift": 3.0}, {"limits": {"cosine": 0.5}}, True),
    "another shape": ({}, {"wrapped": (5, "output")}, {}, False),
    "a metric more": ({}, {"shift": 3.0}, {"metrics": ["kl"]}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_long_runs_give_the_files_and_reports_of_short_ones(tmp_path, case, everything_is_long):
    ours, theirs, options, by_name = CASES[case]
    pair = write(tmp_path / "ref", **ours), write(tmp_path / "cand", **theirs)
    plain = api.compare(*pair, **options)
    assert isinstance(plain.rows, tuple)
    short = files_of(plain, tmp_path / "short")
    everything_is_long()
    plan = api.align(*pair, **{k: v for k, v in options.items() if k not in ("limits", "metrics")})
    if by_name is not None:
        assert isinstance(plan.pairs, streaming.StreamedPairs) == by_name
    table = api.compare(*pair, **options)
    long = files_of(table, tmp_path / "long")
    for name, content in short.items():
        assert long[name] == content, name
    assert isinstance(table.rows, row_spool.RowSpool) or len(table.rows) <= 10
    assert list(table.rows) == list(plain.rows)
    assert table.rows[-1] == plain.rows[-1] and list(table.rows[3:40:6]) == list(plain.rows[3:40:6])
    assert table.rows == plain.rows and table.first == plain.first
    with pytest.raises(IndexError):
        table.rows[len(plain.rows)]


@pytest.mark.parametrize("jobs", [2])
def test_processes_share_a_long_plan_out_and_give_the_same(tmp_path, jobs, everything_is_long):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand", shift=3.0)
    short = files_of(api.compare(*pair), tmp_path / "short")
    everything_is_long()
    told: list[tuple[int, int]] = []
    table = api.compare(*pair, jobs=jobs, progress=lambda done, total: told.append((done, total)))
    assert files_of(table, tmp_path / "long") == short
    assert isinstance(table.rows, row_spool.RowSpool)
    assert told[-1] == (len(table.rows), len(table.rows))


def test_progress_of_a_long_plan_goes_from_nothing_to_all(tmp_path, everything_is_long):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand")
    everything_is_long()
    told: list[tuple[int, int]] = []
    api.compare(*pair, progress=lambda done, total: told.append((done, total)))
    counts = [done for done, _ in told]
    assert counts == sorted(counts) and counts[-1] == told[0][1] == 2 * 2 * SITES * 4


def test_an_index_out_of_order_is_paired_in_the_order_of_execution(tmp_path, everything_is_long):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand", shift=3.0)
    index = pair[1] / "rank0" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join([*lines[30:], "no line\n", *lines[:30]]))
    short = files_of(api.compare(*pair), tmp_path / "short")
    everything_is_long()
    table = api.compare(*pair)
    assert files_of(table, tmp_path / "long") == short


def test_a_full_disk_for_the_rows_is_a_sentence(tmp_path, everything_is_long, monkeypatch):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand")
    everything_is_long()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(api.errors.DriftlineError, match="No space left on device") as found:
        api.compare(*pair)
    assert "TMPDIR" in found.value.hint


def test_numbers_of_other_kinds_are_kept_as_numbers():
    key = TensorKey.of("a", "output")
    row = Row(key, "pass", metrics={"a": np.float64(0.1), "b": np.int64(3), "c": True, "d": 2**80})
    (again,) = row_spool.keep([row])
    assert dict(again.metrics) == dict(row.metrics)
    assert [type(value) for value in again.metrics.values()] == [float, int, bool, int]


@pytest.mark.parametrize("case", ["one layer is off", "some are missing", "missing on both sides"])
def test_shards_of_long_runs_merge_to_the_table_of_one_process(tmp_path, case, everything_is_long):
    ours, theirs, options, _ = CASES[case]
    pair = write(tmp_path / "ref", **ours), write(tmp_path / "cand", **theirs)
    short = files_of(api.compare(*pair, **options), tmp_path / "short")
    everything_is_long()
    for number in (3, 1, 2):
        part = api.compare_shard(*pair, f"{number}/3", **options)
        assert isinstance(part.places, range)
        part.write(tmp_path / "parts")
    assert files_of(api.merge(tmp_path / "parts"), tmp_path / "long") == short
    (tmp_path / "parts" / "shard-2-of-3.json").unlink()
    with pytest.raises(api.errors.BadInput, match="shard 2/3 is missing"):
        api.merge(tmp_path / "parts")


def test_a_long_part_is_read_row_by_row_and_is_the_same(tmp_path, monkeypatch):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand", shift=3.0, skip={(0, 1, 3, "output")})
    part = api.compare_shard(*pair, "1/1")
    place = part.write(tmp_path / "parts")
    assert json.loads(place.read_text()) == part.as_json()
    short = files_of(api.merge(place), tmp_path / "short")
    monkeypatch.setattr(parts, "_LONG", 100)
    monkeypatch.setattr(files, "_CHUNK", 333)
    (found,) = parts.open_parts([place])
    assert isinstance(found.rows, row_spool.RowSpool)
    assert files_of(api.merge(found), tmp_path / "long") == short
    text = place.read_text()
    for broken in (
        text[:-200],
        text[: len(text) // 2],
        text.replace('"status": "unj', '"status": 3'),
    ):
        place.write_text(broken)
        with pytest.raises(api.errors.BadFile):
            parts.open_parts([place])
