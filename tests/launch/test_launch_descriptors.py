"""A launched program closes descriptors, forks and opens files: its files stay as it wrote them.

Every program here runs under `driftline dump`, takes away the descriptors that Driftline has open,
opens files of its own and goes on. Its files must hold what it wrote and nothing else, and the run
must be complete or say that it is not.
"""

from __future__ import annotations

import time

import pytest

from driftline.runs.verify import verify

PROGRAM = """
import os, pathlib, signal, time
from model import run

signal.alarm(100)  # whoever waits for this program has given up

def wait_until_written():
    index = pathlib.Path("out/rank0/index.jsonl")
    while not index.exists() or index.read_text().count("\\n") < 16:
        time.sleep(0.05)

def own_files(number):
    for index in range(number):
        file = os.open(f"mine{{index}}.bin", os.O_RDWR | os.O_CREAT, 0o644)
        assert os.write(file, b"0123456789") == 10

run(1)
wait_until_written()
{act}
run(2)
"""


ALL_STEPS = ("-er", "0,9")


def check_user_files(workshop, number):
    contents = {path.name: path.read_bytes() for path in workshop.glob("mine*.bin")}
    assert contents == {f"mine{index}.bin": b"0123456789" for index in range(number)}


def check_complete(run, calls):
    assert run.sealed and not run.losses and not list(verify(run))
    sites = [record.key.site for record in run.records if record.key.port == "output"]
    assert sum(site.endswith("last") for site in sites) == calls


@pytest.mark.parametrize("last", [256, 20_000])
def test_a_program_that_closes_every_descriptor_keeps_its_own_files(dump, workshop, last):
    act = f"os.closerange(3, {last}); own_files(40)"
    (workshop / "closes.py").write_text(PROGRAM.format(act=act))
    dumped = dump(*ALL_STEPS, run=["closes.py"])
    assert dumped.code == 0, dumped.err
    check_user_files(workshop, 40)
    check_complete(dumped.run, 3)


def test_a_descriptor_put_over_ours_gets_nothing(dump, workshop):
    act = """
mine = os.open("mine0.bin", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
os.write(mine, b"0123456789")
numbers = os.listdir("/proc/self/fd")
taken = [int(n) for n in numbers if "/out/rank" in os.path.realpath(f"/proc/self/fd/{n}")]
assert len(taken) >= 2
for number in taken:
    os.dup2(mine, number)
"""
    (workshop / "puts.py").write_text(PROGRAM.format(act=act))
    dumped = dump(*ALL_STEPS, run=["puts.py"])
    assert dumped.code == 0, dumped.err
    check_user_files(workshop, 1)
    check_complete(dumped.run, 3)


def test_a_file_that_was_replaced_ends_the_writing_and_the_launcher_says_it(dump, workshop):
    act = """
os.closerange(3, 20_000)
os.replace("model.py", "out/rank0/tensors-00000.safetensors")
own_files(40)
"""
    (workshop / "replaces.py").write_text(PROGRAM.format(act=act))
    text = (workshop / "model.py").read_bytes()
    dumped = dump(*ALL_STEPS, run=["replaces.py"])
    reason = (
        "the program closed a descriptor of Driftline, and tensors-00000.safetensors is another"
    )
    assert reason in dumped.err
    check_user_files(workshop, 40)
    assert (workshop / "out/rank0/tensors-00000.safetensors").read_bytes() == text
    assert any(reason in loss.reason for loss in dumped.run.losses)


def test_a_daemon_is_captured_and_its_files_are_its_own(dump, workshop):
    act = """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
run(1)
os.closerange(0, 20_000)
own_files(40)
"""
    # Registered before the capture begins, a handler runs after the capture's own.
    late = 'import atexit, os\natexit.register(os.rename, "daemon.py", "daemon.ended")\n'
    (workshop / "daemon.py").write_text(late + PROGRAM.format(act=act))
    dumped = dump(*ALL_STEPS, run=["daemon.py"])
    assert dumped.code == 0, dumped.err
    until = time.monotonic() + 60
    while not (workshop / "daemon.ended").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    check_user_files(workshop, 40)
    assert dumped.folders == ["rank0", "rank0.p1"]
    assert dumped.run.sealed and not dumped.run.losses and not list(verify(dumped.run))
