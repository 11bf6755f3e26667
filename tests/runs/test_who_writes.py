"""Runs that are being written: read as far as they are complete, replaced by nobody."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import driftline as api
from driftline.cli.main import main
from driftline.errors import AlreadyThere
from driftline.runs.provenance import create_run, hold_path, is_held
from driftline.runs.reader import open_run
from support.programs import running

WRITER = """
import sys, time
import numpy as np
from driftline.runs.records import TensorKey
from driftline.runs.records import Record
from driftline.runs.writer import RunWriter

path, rank, steps, wait = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "wait"
writer = RunWriter(path, rank=rank, world_size=2)
for step in range(steps):
    for layer in range(10):
        values = np.random.default_rng(100 * rank + layer).standard_normal(256).astype(np.float32)
        key = TensorKey.of(f"layer.{layer}", "output", step=step, rank=rank)
        writer.put(Record(key, 0, "float32", (256,)), (values + step).view(np.uint8))
writer.flush()
print("written", flush=True)
if wait:
    sys.stdin.readline()
writer.close()
"""


def write(path: Path, *, rank: int = 0, steps: int = 2) -> Path:
    words = [sys.executable, "-c", WRITER, str(path), str(rank), str(steps), "go"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=110)
    return path


@contextlib.contextmanager
def writing(path: Path, *, rank: int = 0, steps: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that has written some steps, and has not closed its files."""
    words = [sys.executable, "-c", WRITER, str(path), str(rank), str(steps), "wait"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


def test_facts_of_an_opened_run_are_read_again_until_its_process_has_ended(tmp_path) -> None:
    with writing(tmp_path / "run"):
        run = open_run(tmp_path / "run")
        assert [facts["sealed"] for facts in run.processes()] == [False]
    (facts,) = run.processes()
    assert facts["sealed"] is True


def test_a_run_that_is_still_written_is_compared_as_far_as_it_is_complete(tmp_path, capsys):
    ref = write(tmp_path / "ref")
    with writing(tmp_path / "cand") as process:
        code = main(["compare", str(ref), str(tmp_path / "cand"), "-o", str(tmp_path / "table")])
        said = capsys.readouterr()
        table = api.open_table(tmp_path / "table")
        assert "is still being written" in said.out + said.err
        compared = [row for row in table.rows if row.compared]
        missing = [row for row in table.rows if row.status == "missing"]
        assert len(compared) == 10 and {row.key.step for row in compared} == {0}
        assert all(row.status == "pass" for row in compared)
        assert len(missing) == 10
        assert all("not yet" in row.reason for row in missing)
        assert code == 2 and said.out.startswith(
            "INCOMPLETE: the candidate's program is still running"
        )
        assert process.poll() is None
    after = open_run(tmp_path / "cand")
    assert after.sealed and not after.losses


def test_a_writer_that_was_killed_is_told_from_one_that_lives(tmp_path):
    with writing(tmp_path / "run") as process:
        assert "still being written" in str(open_run(tmp_path / "run").losses[0])
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert "it was killed" in str(open_run(tmp_path / "run").losses[0])


def test_a_run_that_is_written_is_not_replaced_and_one_of_a_dead_process_is(tmp_path):
    run = tmp_path / "run"
    with writing(run) as process:
        for force in (False, True):
            with pytest.raises(AlreadyThere) as told:
                create_run(run, force=force)
            assert ("still running" in str(told.value)) == force
        assert len(open_run(run)) == 10
        process.send_signal(signal.SIGKILL)
        process.wait()
        create_run(run, force=True)
    assert not list(run.glob("rank*"))


def test_of_two_dumps_into_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    """Whether it comes later, at the same moment, or by force."""
    monkeypatch.chdir(tmp_path)
    dump = [sys.executable, "-m", "driftline", "dump", "-o", "run"]
    program = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.readline()"]
    with running(
        [*dump, "--", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "up\n"
        assert is_held(tmp_path / "run" / "run.json")
        for words in (dump, [*dump, "--force"]):
            second = subprocess.run(
                [*words, "--", "true"], capture_output=True, text=True, timeout=110
            )
            assert second.returncode == 2, second.stderr
            assert "run' " in second.stderr or "'run'" in second.stderr
        assert "still running" in second.stderr
        first.stdin.close()
        first.wait(timeout=60)


def test_two_that_begin_at_the_same_moment_are_not_both_let_in(tmp_path, monkeypatch):
    from driftline.runs import provenance

    run = tmp_path / "run"
    real = provenance.check_room

    def late(place, *, force):
        found = real(place, force=force)
        monkeypatch.setattr(provenance, "check_room", real)
        create_run(run)  # the other one, between looking and making
        return found

    monkeypatch.setattr(provenance, "check_room", late)
    with pytest.raises(AlreadyThere, match="at the same moment"):
        create_run(run)


def test_processes_of_one_run_never_share_a_folder(tmp_path):
    with writing(tmp_path / "run"), writing(tmp_path / "run"):
        assert sorted(p.name for p in (tmp_path / "run").glob("rank*")) == ["rank0", "rank0.p1"]


def test_a_lock_ends_with_its_process_and_asking_for_it_does_not_take_it(tmp_path):
    file = tmp_path / "file"
    file.touch()
    lock = hold_path(file)
    assert lock is not None and is_held(file)
    assert hold_path(file) is None
    os.close(lock)
    assert is_held(file) is False
    again = hold_path(file)
    assert again is not None
    os.close(again)
    assert is_held(tmp_path / "nothing") is None


def test_a_child_of_the_program_does_not_keep_its_parents_lock(tmp_path):
    """A data worker is forked from a process that writes, and outlives it."""
    program = textwrap.dedent(
        """
        import os, sys, time
        import numpy as np
        from driftline.runs.records import TensorKey
        from driftline.runs.records import Record
        from driftline.runs.writer import RunWriter
        writer = RunWriter(sys.argv[1])
        data = np.zeros(4, np.float32).view(np.uint8)
        writer.put(Record(TensorKey.of("a", "output"), 0, "float32", (4,)), data)
        if not os.fork():
            os.close(1)
            sys.stdin.readline()
            os._exit(0)
        writer.flush()
        os.kill(os.getpid(), 9)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while is_held(tmp_path / "run/rank0/index.jsonl") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_held(tmp_path / "run/rank0/index.jsonl") is False
    process.stdin.close()


def test_clocks_that_differ_between_ranks_change_nothing(tmp_path):
    """Ranks on machines years apart, in their own time zones, one with a broken clock."""

    def shifted(path: Path, times: list[str]) -> Path:
        for rank in range(2):
            write(path, rank=rank, steps=1)
        (path / "run.json").write_text(
            json.dumps({**json.loads((path / "run.json").read_text()), "created": times[0]})
        )
        for rank in range(2):
            file = path / f"rank{rank}" / "process.json"
            about = json.loads(file.read_text())
            about |= {"started": times[rank], "ended": times[-1 - rank]}
            file.write_text(json.dumps(about))
            events = path / f"rank{rank}" / "events.jsonl"
            events.write_text(
                json.dumps({"time": -1e12 * rank, "kind": "step", "message": "m", "order": 3})
            )
            for each in (path / f"rank{rank}").iterdir():
                os.utime(each, (rank * 1e9, rank * 1e9))
        return path

    plain = write(write(tmp_path / "plain", rank=0, steps=1), rank=1, steps=1)
    skewed = shifted(tmp_path / "skewed", ["2031-01-01T00:00:00+14:00", "1970-01-01T00:00:00Z"])
    broken = shifted(tmp_path / "broken", ["no time", ""])
    expected = [row.as_json() for row in api.compare(plain, plain).rows]
    for pair in ((plain, skewed), (skewed, broken), (broken, plain)):
        table = api.compare(*pair)
        assert table.verdict == "pass"
        assert [row.as_json() for row in table.rows] == expected
    assert [r.key for r in open_run(skewed).records] == [r.key for r in open_run(plain).records]
