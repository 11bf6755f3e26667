"""kill -9, forks, exits, exceptions: what was written stays whole, and the run says what is not."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftline.runs.reader import open_run
from driftline.runs.verify import verify

PREAMBLE = """
import os, signal, sys, time
import numpy as np
from driftline.runs.records import TensorKey
from driftline.runs.reader import open_run
from driftline.runs.records import Record
from driftline.runs.writer import RunWriter

def put(writer, number, data):
    data[:8].view(np.int64)[0] = number
    writer.put(Record(TensorKey.of(f"site.{number}", "output"), 0, "uint8", data.shape), data)
"""

ENDLESS = (
    PREAMBLE
    + """
path, seed, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rng = np.random.default_rng(seed)
pool = rng.integers(0, 256, 12_000_000, np.uint8)
writer = RunWriter(path, shard_bytes=40_000_000)
writer.first_header = 8192
log = sys.stdout.fileno()
signal.alarm(100)
for number in range(10**9):
    sizes = [8, 100, 5000, 300_000, 2_000_000, 11_000_000]
    size = int(rng.choice(sizes, p=[.3, .3, .2, .14, .04, .02]))
    put(writer, number, pool[:size])
    os.write(log, b"%d %d %f\\n" % (number, size, time.monotonic()))
    if pause:
        time.sleep(pause)
"""
)


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(code: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, timeout=120
    )


def kill_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / f"run{seed}"
    pause = (0.0, 0.01, 0.0)[seed % 3]
    moment = chance.uniform(0.0, 3.5 if pause else 0.8)
    log = tmp_path / f"log{seed}"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(path), str(seed), str(pause)], stdout=file
        )
        try:
            while not log.stat().st_size:
                assert child.poll() is None
                time.sleep(0.002)
            time.sleep(moment)
        finally:
            killed = time.monotonic()
            child.send_signal(signal.SIGKILL)
            child.wait()
    lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    written = {int(number): (int(size), float(when)) for number, size, when in lines}
    run = open_run(path)
    found = set[int]()
    for tensor in run.tensors():
        number = int(tensor.key.site.removeprefix("site."))
        assert int(tensor.raw()[:8].view("<i8")[0]) == number
        found.add(number)
    assert not list(verify(run))
    # On a busy machine the moment may come before the writing thread's first turn.
    sentence = "was not closed" if found else "was killed before its first tensor was written"
    assert any(sentence in loss.reason for loss in run.losses)
    assert not any(loss.key for loss in run.losses), "every listed tensor has its bytes"
    lost = [written[number] for number in written if number not in found]
    assert sum(size for size, _ in lost) <= 64_000_000
    assert all(killed - when < 2.0 for _, when in lost)
    # Order is kept: what is missing is the end, never the middle.
    assert found == set(range(len(found)))


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_dump_opens_and_loses_at_most_its_last_moments(seed: int, tmp_path: Path) -> None:
    kill_at_a_random_moment(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_killed_dumps_all_open(seed: int, tmp_path: Path) -> None:
    kill_at_a_random_moment(tmp_path, seed)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()


def test_a_lone_tensor_is_safe_after_two_seconds(tmp_path: Path) -> None:
    code = PREAMBLE + (
        "writer = RunWriter(sys.argv[1])\n"
        "put(writer, 7, np.zeros(100, np.uint8))\n"
        "print('put', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = start(code, str(tmp_path / "run"))
    try:
        assert child.stdout is not None and child.stdout.readline() == b"put\n"
        time.sleep(1.9)
    finally:
        child.kill()
        child.communicate()
    run = open_run(tmp_path / "run")
    assert [t.key.site for t in run.tensors()] == ["site.7"] and not list(verify(run))


@pytest.mark.parametrize(
    ("ending", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('theirs')", 1)]
)
def test_every_ordinary_ending_seals_the_run(ending: str, status: int, tmp_path: Path) -> None:
    code = PREAMBLE + f"put(RunWriter(sys.argv[1]), 1, np.zeros(100, np.uint8))\n{ending}\n"
    done = finish(code, str(tmp_path / "run"))
    assert done.returncode == status, done.stderr
    run = open_run(tmp_path / "run")
    assert run.sealed and len(run) == 1 and not run.losses


def test_a_forked_child_writes_its_own_part_and_leaves_the_parents_alone(tmp_path: Path) -> None:
    code = PREAMBLE + (
        "writer = RunWriter(sys.argv[1])\n"
        "for n in range(50): put(writer, n, np.zeros(100_000, np.uint8))\n"
        "child = os.fork()\n"
        "for n in range(50, 100): put(writer, n, np.zeros(100_000, np.uint8))\n"
        "if not child: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    done = finish(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.sealed and not run.losses and not list(verify(run))
    by_process = {0: list(range(100)), 1: list(range(50, 100))}
    for process, numbers in by_process.items():
        found = [int(t.raw()[:8].view("<i8")[0]) for t in run.tensors() if t.key.process == process]
        assert found == numbers


def test_multiprocessing_children_seal_their_parts(tmp_path: Path) -> None:
    code = PREAMBLE + (
        "import multiprocessing\n"
        "writer = RunWriter(sys.argv[1])\n"
        "def work(n): put(writer, n, np.zeros(1000, np.uint8))\n"
        "put(writer, 0, np.zeros(1000, np.uint8))\n"
        "context = multiprocessing.get_context('fork')\n"
        "children = [context.Process(target=work, args=(n,)) for n in (1, 2)]\n"
        "for c in children: c.start()\n"
        "for c in children: c.join()\n"
    )
    done = finish(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.sealed and not run.losses
    assert sorted(t.key.site for t in run.tensors()) == ["site.0", "site.1", "site.2"]
    assert {t.key.process for t in run.tensors()} == {0, 1, 2}


def test_many_processes_may_start_one_run_at_once(tmp_path: Path) -> None:
    code = PREAMBLE + (
        "writer = RunWriter(sys.argv[1])\nput(writer, os.getpid(), np.zeros(10, np.uint8))\n"
    )
    children = [start(code, str(tmp_path / "run")) for _ in range(4)]
    for child in children:
        assert child.communicate()[1] == b""
    run = open_run(tmp_path / "run")
    assert sorted(t.key.process for t in run.tensors()) == [0, 1, 2, 3]
    assert {t.key.site for t in run.tensors()} == {f"site.{c.pid}" for c in children}
    assert not list((tmp_path / "run").glob(".*"))


def test_several_threads_may_put_at_once(tmp_path: Path) -> None:
    code = PREAMBLE + (
        "import threading\n"
        "writer = RunWriter(sys.argv[1])\n"
        "def work(k):\n"
        "    for n in range(k * 200, k * 200 + 200): put(writer, n, np.zeros(50_000, np.uint8))\n"
        "threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
    )
    done = finish(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert len(run) == 800 and not list(verify(run)) and not run.losses
    for tensor in run.tensors():
        assert f"site.{int(tensor.raw()[:8].view('<i8')[0])}" == tensor.key.site
