"""Runs and tables of very many tensors: the same records and rows, in little memory."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driftline as api
from driftline.comparison.measure import scheduler
from driftline.comparison.table import files as storage
from driftline.comparison.table.row_spool import RowSpool
from driftline.errors import Unreachable
from driftline.runs import index as kept_lines
from driftline.runs import index as kept_records
from driftline.runs.files import local_files
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter


def write(path: Path, *, ranks: int = 3, per_rank: int = 60, shift: float = 0.0) -> Path:
    for rank in range(ranks):
        writer = RunWriter(path, rank=rank, world_size=ranks)
        for at in range(per_rank):
            values = np.full(4, at + rank + shift, np.float32)
            key = TensorKey.of(f"layer.{at}", "output", rank=rank)
            writer.put(Record(key, 0, "float32", (2, 2), "", "Linear"), values.view(np.uint8))
        writer.close()
    return path


@pytest.fixture
def long_ones_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for a million lines is tried with a hundred."""
    monkeypatch.setattr(kept_lines.MemoryBudget.__init__, "__defaults__", (70,))
    monkeypatch.setattr(kept_records, "_KEPT_RECORDS", 50)


def test_a_long_index_gives_the_same_records(tmp_path, monkeypatch):
    run = write(tmp_path / "run")
    plain = list(open_run(run).records)
    monkeypatch.setattr(kept_lines.MemoryBudget.__init__, "__defaults__", (70,))
    monkeypatch.setattr(kept_records, "_KEPT_RECORDS", 50)
    long = open_run(run)
    assert list(long.records) == plain and list(long.records) == plain
    assert len(long) == len(plain) == 180
    again = open_run(run).records
    assert [again[at] for at in range(-180, 180)] == plain + plain
    assert list(again[5:170:7]) == plain[5:170:7]
    with pytest.raises(IndexError):
        again[180]
    assert open_run(run).sites() == [f"layer.{at}" for at in range(60)]
    assert np.array_equal(long.get("layer.59", rank=2).numpy(), np.full((2, 2), 61, np.float32))


@pytest.mark.usefixtures("long_ones_are_short")
def test_lines_out_of_order_and_lost_ones_are_told_of_a_long_index_too(tmp_path):
    run = write(tmp_path / "run", ranks=1, per_rank=120)
    index = run / "rank0" / "index.jsonl"
    lines = index.read_text().splitlines()
    lines[3] = lines[3].replace('"offset":', '"offset":9')
    index.write_text("\n".join(["", *reversed(lines[:100]), *lines[100:], "{cut"]))
    opened = open_run(run)
    assert [record.order for record in opened.records] == list(range(120))
    assert [r.order for r in opened.records if r.lost] == [3]
    assert [r.order for r in opened.records if opened.lost(r)] == [3]
    assert any("layer.3/" in str(loss) for loss in opened.losses)
    assert any("cut in half" in str(loss) for loss in opened.losses)


@pytest.mark.usefixtures("long_ones_are_short")
def test_comparisons_of_long_runs_are_those_of_short_ones(tmp_path, monkeypatch):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand", shift=1e-2)
    monkeypatch.setattr(scheduler, "MANY", 10)
    monkeypatch.setattr(scheduler, "_MAPPED", 8)
    long = api.compare(*pair)
    assert isinstance(long.rows, RowSpool)
    monkeypatch.undo()
    short = api.compare(*pair)
    assert [row.as_json() for row in long.rows] == [row.as_json() for row in short.rows]
    assert str(long) == str(short)


def test_a_long_table_is_read_row_by_row_and_is_the_same(tmp_path, monkeypatch):
    pair = write(tmp_path / "ref"), write(tmp_path / "cand", shift=1e-2)
    table = api.compare(*pair)
    place = table.write(tmp_path / "table")
    text = (place / "table.json").read_text()
    stored = json.loads(text)
    # What judging again needs is in the file only.
    assert stored.pop("structure")
    assert stored == table.as_json()
    short = api.open_table(place)
    monkeypatch.setattr(storage, "_LONG", 100)
    long = api.open_table(place)
    assert long.as_json() == short.as_json() == table.as_json()
    assert long.first == table.first
    for strange in (
        json.dumps(json.loads(text), indent=1),
        json.dumps({"rows": json.loads(text)["rows"], **json.loads(text)}),
        text.replace('"rows": [', '"rows": [ '),
    ):
        (place / "table.json").write_text(strange)
        assert api.open_table(place).as_json() == table.as_json()
    for broken in (text[:-200], text.replace('"status": "fail"', '"status": 3', 1), text + "x"):
        (place / "table.json").write_text(broken)
        with pytest.raises(api.errors.BadFile):
            api.open_table(place)


MEMORY = """
import sys
from pathlib import Path
import driftline
table = driftline.compare(sys.argv[1], sys.argv[2])
facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(len(table.rows), int(facts["RssAnon"].split()[0]) * 1024)
"""


@pytest.mark.slow
def test_a_tensor_more_takes_no_more_memory(tmp_path):
    held: dict[int, int] = {}
    for ranks in (20, 60):
        pair = [
            write(tmp_path / f"{side}{ranks}", ranks=ranks, per_rank=2000, shift=at * 1e-3)
            for at, side in enumerate("rc")
        ]
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, *map(str, pair)],
            capture_output=True,
            text=True,
            check=True,
            timeout=110,
        )
        rows, memory = map(int, done.stdout.split())
        held[rows] = memory
    (few, less), (many, more) = sorted(held.items())
    assert (many, few) == (120_000, 40_000)
    assert (more - less) / (many - few) < 150


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from driftline.cli.main import console
sys.argv[1:] = ["compare", *sys.argv[2:]]
sys.exit(console())
"""


def limited(files: int, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(files), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_a_run_has_more_ranks_than_a_process_may_open_files(tmp_path):
    pair = [write(tmp_path / side, ranks=300, per_rank=1) for side in "rc"]
    done = limited(40, *pair)  # mapped files keep no descriptor
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 of 300 tensors compared" in done.stdout


def test_files_that_cannot_be_opened_are_no_finding(tmp_path):
    pair = [write(tmp_path / side, ranks=2, per_rank=1) for side in "rc"]
    # One beside the three standard ones: enough to import modules and to read an index, too few to
    # look at a shard meanwhile.
    done = limited(4, *pair)
    assert done.returncode == 2
    assert "no more files can be opened: Too many open files" in done.stderr
    assert "ulimit -n" in done.stderr and "Traceback" not in done.stderr


def test_a_shard_that_cannot_be_looked_at_for_want_of_files_is_not_lost(tmp_path, monkeypatch):
    run = open_run(write(tmp_path / "run", ranks=1))
    open_inside = local_files.open_inside

    def refuse_shards(root: Path, path: Path) -> int:
        if path.suffix == ".safetensors":
            raise OSError(errno.EMFILE, "Too many open files")
        return open_inside(root, path)

    monkeypatch.setattr(local_files, "open_inside", refuse_shards)
    with pytest.raises(Unreachable, match="no more files can be opened"):
        len(run.records)


NO_MORE = """
import resource, sys
from driftline.cli.main import console
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
sys.argv[1:] = ["compare", "one", "other"]
sys.exit(console())
"""


def test_a_command_that_can_open_nothing_at_all_says_so_too():
    words = [sys.executable, "-c", NO_MORE]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 2
    assert "Too many open files" in done.stderr and "Traceback" not in done.stderr
