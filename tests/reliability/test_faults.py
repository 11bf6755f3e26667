"""Faults injected from outside: full disks, no descriptors, little memory.

The real reason is named, the program goes on, and its exit status is its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
torch.manual_seed(0); torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
{before}
for _ in range(3):
    y = model(torch.ones(64, 256))
print("the program went on", flush=True)
sys.exit(7)
"""
NO_FILES = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
except OSError:
    pass
"""


def write_program(folder: Path, before: str = "") -> Path:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(before=before))
    return path


def dump(program: Path, output: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "driftline", "dump", "-o", output, "--step", "*"]
    words += ["--exec", f"{sys.executable} {program}"]
    return subprocess.run(
        [*prefix, *words], capture_output=True, text=True, check=False, timeout=110
    )


SMALL_DISK = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
NAMESPACES = shutil.which("unshare") is not None and (
    subprocess.run(
        ["unshare", "-rm", "true"], capture_output=True, check=False, timeout=110
    ).returncode
    == 0
)


@pytest.mark.skipif(not NAMESPACES, reason="no disk can be mounted without root here")
@pytest.mark.parametrize(
    "size",
    [
        "8k",
        *(pytest.param(size, marks=pytest.mark.slow) for size in ("4k", "16k", "300k", "1200k")),
    ],
)
def test_a_full_disk_is_called_one(size: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # What is on the disk is gone with the namespace, so it is shown inside of it.
    prefix = ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", size, str(disk)]
    shown = f"{sys.executable} -m driftline show {disk / 'run'}"
    script = tmp_path / "both.sh"
    program = write_program(tmp_path)
    script.write_text(
        f"{sys.executable} -m driftline dump -o {disk / 'run'} --step '*' --exec "
        f"'{sys.executable} {program}'; echo status $?; {shown} 2>&1"
    )
    done = subprocess.run(
        [*prefix, "sh", str(script)], capture_output=True, text=True, check=False, timeout=110
    )
    assert "the program went on" in done.stdout and "status 7" in done.stdout, done.stderr
    everything = done.stdout + done.stderr
    assert "Traceback" not in everything
    assert "No space left on device" in everything or "disk was full" in everything
    # Not where the disk was the reason.
    assert not re.search(r"rank0: .*it was killed", everything), everything


def test_no_descriptors_left_is_the_reason_that_is_named(tmp_path: Path) -> None:
    done = dump(write_program(tmp_path, NO_FILES), str(tmp_path / "run"))
    assert done.returncode == 7 and "the program went on" in done.stdout
    assert "too many open files in the program" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "files", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8, 12, 20))]
)
def test_commands_with_few_descriptors_say_so_or_work(files: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert dump(write_program(tmp_path), str(run)).returncode == 7
    for words in (["show", run], ["compare", run, run], ["report", run, run, "-o", "x.html"]):
        limited = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"]
        command = [sys.executable, "-m", "driftline", *map(str, words)]
        done = subprocess.run(
            [*limited, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode:
            assert "oo many open files" in done.stderr, (words, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [200, 300, 400, 600])
def test_commands_with_little_memory_say_so_or_work(megabytes: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert dump(write_program(tmp_path), str(run)).returncode == 7
    for words in (["show", run], ["compare", run, run], ["report", run, run, "-o", "x.html"]):
        limited = ["sh", "-c", f'ulimit -v {megabytes << 10} && exec "$@"', "sh"]
        command = [sys.executable, "-m", "driftline", *map(str, words)]
        done = subprocess.run(
            [*limited, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        assert done.returncode >= 0, (words, done.returncode)
        assert not done.returncode or "memory" in done.stderr.lower(), (words, done.stderr[-800:])


CLEARED = """
import subprocess, sys, torch
model = torch.nn.Linear(4, 4)
model(torch.ones(2, 4))
code = "import time, torch; time.sleep(0.5)"
subprocess.run([sys.executable, "-c", code, "--token", "tok3n"], env={}, check=True)
subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_a_child_with_a_cleared_environment_is_counted(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CLEARED)
    done = dump(program, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "1 Python process had an environment of its own and was not seen" in done.stderr
    assert "hand DRIFTLINE_LAUNCH and PYTHONPATH on" in done.stderr
    assert "tok3n" not in done.stderr
