"""Letting go of mapped files: the values can be read again, and an array that lives keeps its."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from driftline.runs.reader import DiskRun, open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.views import narrowed
from driftline.runs.writer import RunWriter


def a_run(path: Path) -> DiskRun:
    writer = RunWriter(path)
    data = np.arange(1000, dtype=np.float32)
    writer.put(Record(TensorKey.of("a", "output"), 0, "float32", (1000,)), data.view(np.uint8))
    writer.close()
    return open_run(path)


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path.resolve()))


def test_a_released_run_has_nothing_mapped_and_reads_again(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    before = run.get("a").numpy().copy()
    assert maps_of(tmp_path / "run") == 1
    narrowed(run, steps=(0,)).release()
    assert maps_of(tmp_path / "run") == 0
    assert np.array_equal(run.get("a").numpy(), before)


def test_an_array_that_lives_keeps_its_values_when_the_run_is_released(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    values = run.get("a").raw()
    run.release()
    assert values[999] == 999.0
    del values
    assert maps_of(tmp_path / "run") == 0
