"""Runs of thousands of sites: time grows with their number, not with its square."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

import driftline
from driftline.errors import BadInput
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

Shape = tuple[int, ...]
S = (1, 4, 8)


def run_of(sites: Iterable[tuple[str, str, int, Shape]]) -> Run:
    sink = MemorySink()
    for site, class_name, visit, shape in sites:
        for port in ("input", "output"):
            key = TensorKey.of(site, port, "0")._replace(visit=visit)
            record = Record(key, 0, "float32", shape, class_name=class_name, kept="describe")
            sink.put(record, None)
    return sink.run()


def seconds(reference: Run, candidate: Run) -> float:
    started = time.process_time()
    try:
        driftline.align(reference, candidate)
    except BadInput as trouble:  # all tied
        assert "share no tensor" in str(trouble)
    return time.process_time() - started


def visits(name: str, count: int) -> Run:
    return run_of(
        each
        for at in range(count)
        for each in ((f"{name}.f", "Linear", at, S), (name, "Cell", at, S))
    )


def shapes(name: str, count: int, class_name: str, features: bool) -> Run:
    return run_of(
        (f"{name}{at}", class_name, 0, (1, at + 1) if features else (1, at + 1, 8))
        for at in range(count)
    )


def test_a_cell_that_is_called_thousands_of_times_takes_seconds_at_most() -> None:
    assert seconds(visits("cell", 6000), visits("zelle", 6000)) < 5


@pytest.mark.parametrize(
    ("class_name", "features"), [("Linear", False), ("Foo", True), ("Foo", False)]
)
def test_thousands_of_shapes_take_seconds_at_most(class_name: str, features: bool) -> None:
    ours = shapes("a", 3000, class_name, features)
    assert seconds(ours, shapes("b", 2999, class_name, features)) < 6
