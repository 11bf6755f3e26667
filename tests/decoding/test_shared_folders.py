"""Several workers write into one folder of results: none takes another's files for its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from driftline.decoding.files import workdir
from driftline.decoding.files.token_table import SCORES, Rows, rows_of, write_part
from driftline.errors import AlreadyThere


def rows(seed: int) -> Rows:
    scores = {name: np.zeros(3) for name in SCORES}
    scores |= {"top1_agree": np.ones(3, np.bool_), "rank_of_reference": np.ones(3, np.int64)}
    return rows_of(seed, 0, "", np.arange(3), scores, 3)


class Interrupted(list[Rows]):
    """Rows between which another worker writes its own table into the same folder."""

    def __init__(self, other: Path) -> None:
        super().__init__([rows(0), rows(0)])
        self.other = other

    def __iter__(self) -> Iterator[Rows]:
        yield self[0]
        write_part(self.other, [rows(1)], {})
        yield self[1]


def test_two_tables_that_are_written_at_the_same_time_stay_apart(tmp_path: Path) -> None:
    """What was seen once between workers of `metrics`: `….tokens.parquet: No such file`."""
    mine, other = tmp_path / "a.tokens.parquet", tmp_path / "b.tokens.parquet"
    write_part(mine, Interrupted(other), {})
    assert pq.read_table(mine)["seed"].to_pylist() == [0] * 6
    assert pq.read_table(other)["seed"].to_pylist() == [1] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, other.name]


def test_a_table_that_cannot_be_finished_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(list[Rows]):
        def __iter__(self) -> Iterator[Rows]:
            yield rows(0)
            raise KeyError("a fault while rows are made")

    with pytest.raises(KeyError):
        write_part(tmp_path / "a.tokens.parquet", Broken(), {})
    assert list(tmp_path.iterdir()) == []


def _probe(folder: str, times: int, answers: Any) -> None:
    try:
        for _ in range(times):
            workdir.require_writable(Path(folder), "--output_dir")
        answers.put("")
    except Exception as trouble:
        answers.put(str(trouble))


def test_workers_that_begin_together_all_find_the_folder_writable(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [
        context.Process(target=_probe, args=(str(tmp_path / "out"), 300, answers)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert found == [""] * 4
    assert list((tmp_path / "out").iterdir()) == []


def _take_turns(folder: str, times: int, answers: Any) -> None:
    """Enter the same work folder again and again; nobody else may be inside."""
    place, entered = Path(folder), 0
    try:
        while entered < times:
            try:
                with workdir.resumable_work_folder(place, "metrics", "same", "--output_dir") as own:
                    (own / "inside").mkdir()  # fails if another process is inside
                    (own / "inside").rmdir()
                    entered += 1
            except AlreadyThere:
                continue
        answers.put("")
    except Exception as trouble:
        answers.put(f"{type(trouble).__name__}: {trouble}")


def test_a_work_folder_that_is_deleted_while_another_process_opens_it_is_made_again(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [
        context.Process(target=_take_turns, args=(str(tmp_path), 200, answers)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert found == [""] * 3
    assert list(tmp_path.iterdir()) == []
