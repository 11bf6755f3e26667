"""What is measured before the indexes are read: the same numbers, and nothing is believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftline.alignment.names import pair_by_name
from driftline.cli.foresight import foresee
from driftline.comparison import ahead, blocks, foreseen, small
from driftline.comparison.engine import measure
from driftline.formats.opening import open_run
from driftline.numerics import kernel
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.writer import RunWriter
from driftline.tolerance.defaults import elementwise

pytestmark = pytest.mark.skipif(
    not kernel.takes_addresses() or foreseen._library() is None,
    reason="the C kernel was not built here",
)
SHAPES = {"weight": (60, 100), "large": (70, 1000), "tied": (60, 100), "small": (7,)}


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two runs of two ranks; `tied` has the bytes of `weight`."""
    monkeypatch.setattr(foreseen, "LARGE", 5000)
    for module in (blocks, foreseen):
        monkeypatch.setattr(module, "BLOCK", 10_000)
    monkeypatch.setattr(small, "SMALL_BYTES", 1000)
    for side, error in (("a", 0.0), ("b", 1e-2)):
        rng = np.random.default_rng(0)
        for rank in range(2):
            writer = RunWriter(tmp_path / side, rank=rank)
            made = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
            made["tied"] = made["weight"]
            for order, (name, values) in enumerate(made.items(), rank):
                key = TensorKey.of(name, "output", rank=rank)
                flat = (values * np.float32(1 + error)).reshape(-1)
                writer.put(Record(key, order, "float32", values.shape), flat.view(np.uint8))
            writer.close()
    return str(tmp_path / "a"), str(tmp_path / "b")


def rows_of(sides: tuple[str, str]) -> list[str]:
    runs = [open_run(side) for side in sides]
    ahead.begin(*runs, elementwise)
    plan = pair_by_name(runs[0].records, runs[1].records)
    return list(map(repr, measure(plan, *runs, elementwise=elementwise).rows))


def test_what_was_foreseen_is_what_the_engine_would_have_measured(
    sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = rows_of(sides)
    foreseen.begin(*sides, elementwise)
    assert len(foreseen._begun[0]) == 2 * (7 + 1)  # of each rank, what two names share just once
    asked: list[int] = []
    usually = kernel.pair_moments_at

    def noted(*places: object, count: int, **words: object) -> object:
        asked.append(count)
        return usually(*places, count=count, **words)  # pyright: ignore

    monkeypatch.setattr(kernel, "pair_moments_at", noted)
    assert rows_of(sides) == usual
    assert asked == [7, 7]  # only the small ones were left for the kernel
    assert not foreseen._begun


def test_it_is_for_just_these_runs_and_this_tolerance(sides: tuple[str, str]) -> None:
    for of in (
        (sides[0], sides[0], elementwise),
        (sides[1], sides[0], elementwise),
        (*sides, lambda *_: (1e-3, 1e-3)),
    ):
        foreseen.begin(*sides, elementwise)
        assert foreseen.taken(*of) is None
        assert foreseen.taken(*sides, elementwise) is None  # gone
    foreseen.begin(*sides, elementwise)
    foreseen.forget()
    assert foreseen.taken(*sides, elementwise) is None


def test_ranks_that_lie_alike_are_not_taken_for_each_other(sides: tuple[str, str]) -> None:
    foreseen.begin(*sides, elementwise)
    (known,) = foreseen._begun
    ours, theirs = (
        [record for record in open_run(side).records if record.key.site == "weight"]
        for side in sides
    )
    assert ours[0].blob == theirs[1].blob  # in files of their own
    assert known.turn(ours[0], theirs[0], 0, 6000) is not None
    assert known.turn(ours[1], theirs[1], 0, 6000) is not None
    assert known.turn(ours[0], theirs[1], 0, 6000) is None
    foreseen.forget()


def move(index: Path) -> None:
    """`weight` is now the beginning of `large`, and smaller."""
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    weight, large = (
        next(line for line in lines if line["site"] == site) for site in ("weight", "large")
    )
    weight |= {"shape": [50, 100], "offset": large["offset"], "length": 20_000}
    index.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def test_records_that_lie_elsewhere_are_measured_anew(sides: tuple[str, str]) -> None:
    foreseen.begin(*sides, elementwise)
    for side in sides:
        move(Path(side) / "rank0" / INDEX)
    (known,) = foreseen._begun
    rows = rows_of(sides)
    foreseen.forget()
    assert rows == rows_of(sides)
    weight = next(r for r in open_run(sides[0]).records if r.key.site == "weight")
    assert weight.shape == (50, 100)
    assert known.turn(weight, weight, 0, 5000) is None


def linked(file: Path) -> None:
    real = file.rename(file.with_name("elsewhere"))
    file.symlink_to(real)


def awaited(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def shortened(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


INDEX, SHARD = "index.jsonl", "tensors-00000.safetensors"


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *((name, harm) for name in (INDEX, SHARD) for harm in (linked, awaited, Path.unlink)),
        *((SHARD, harm) for harm in (shortened, emptied)),
    ],
)
def test_what_is_out_of_the_ordinary_is_not_foreseen(
    sides: tuple[str, str], name: str, harm: Callable[[Path], object]
) -> None:
    harm(Path(sides[1]) / "rank0" / name)
    foreseen.begin(*sides, elementwise)
    assert not foreseen._begun


def test_a_folder_that_is_a_link_is_not_foreseen(sides: tuple[str, str], tmp_path: Path) -> None:
    linked(tmp_path / "b" / "rank1")
    foreseen.begin(*sides, elementwise)
    assert not foreseen._begun


def test_runs_of_many_files_are_not_foreseen(
    sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreseen, "MAPPED", 4)  # one of each rank and run
    foreseen.begin(*sides, elementwise)
    assert foreseen._begun
    monkeypatch.setattr(foreseen, "MAPPED", 3)
    foreseen.begin(*sides, elementwise)
    assert not foreseen._begun


@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                '{{"order":0,"site":"a","dtype":"{}","shape":[{}],"kept":"full","shard":"{}",'
                '"offset":{},"length":{}}}'.format,
                st.sampled_from(["float32", "bfloat16", "float17", "int8"]),
                st.sampled_from(["", "1", "20000", "-1,20000", "1e9", "99999999999,9", "x", ","]),
                st.sampled_from(
                    ["tensors-00000.safetensors", "../x", "", "/etc/passwd", "\\u00e9"]
                ),
                st.one_of(st.integers(-9, 10**30), st.sampled_from(["x", "", "1.5"])),
                st.one_of(
                    st.integers(-9, 10**30), st.sampled_from([80_000, 40_000, "", "9" * 5000])
                ),
            ).map(str.encode),
        ),
        max_size=4,
    )
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_index_of_a_stranger_is_never_trusted(tmp_path: Path, lines: list[bytes]) -> None:
    for side in ("a", "b"):
        folder = tmp_path / side / "rank0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.jsonl").write_bytes(b"\n".join(lines))
        (folder / "tensors-00000.safetensors").write_bytes(bytes(100_000))
    foreseen.begin(str(tmp_path / "a"), str(tmp_path / "b"), elementwise)
    for known in foreseen._begun:
        for (_, (_, offset, length), _), *_ in known.blocks:
            assert 0 <= offset <= offset + length <= 100_000
    foreseen.forget()


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (["A", "B"], True),
        (["A", "B/", "--csv", "x.csv", "--format=json"], True),
        (["A", "B", "--rtol", "0.1"], False),
        (["A", "B", "--threads", "1"], False),
        (["A", "B", "--python"], False),
        (["--csv", "x.csv", "A", "B"], False),
        (["A"], False),
        (["A", "nowhere"], False),
    ],
)
def test_a_command_line_that_asks_for_something_else_begins_nothing(
    sides: tuple[str, str], words: list[str], begun: bool
) -> None:
    foreseen.begin(*sides, elementwise)  # of a command before
    given = [{"A": sides[0], "B": sides[1], "B/": f"{sides[1]}/"}.get(word, word) for word in words]
    foresee(given)
    assert bool(foreseen._begun) is begun
    assert bool(foreseen.taken(*sides, elementwise)) is begun
