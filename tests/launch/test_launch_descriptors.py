"""A launched program closes descriptors, forks and opens files: its files stay as it wrote them.

Every program here runs under `driftline dump`, takes away the descriptors that Driftline has open,
opens files of its own and goes on. Its files must hold what it wrote and nothing else, and the run
must be complete or say that it is not.
"""

from __future__ import annotations

import pytest

PROGRAM = """
import os
from model import run

run(1)
{act}
run(2)
"""

CLOSED = """
os.closerange(3, {last})
mine = [os.open(f"mine{{n}}.bin", os.O_RDWR | os.O_CREAT, 0o644) for n in range(40)]
for file in mine:
    assert os.write(file, b"0123456789") == 10
"""

TAKEN = """
mine = os.open("mine0.bin", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
assert os.write(mine, b"0123456789") == 10
for name in os.listdir("/proc/self/fd"):
    try:
        place = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        continue
    if "/out/rank" in place:
        os.dup2(mine, int(name))
        print("taken", flush=True)
"""

STEPS = (1, 2)
"""How often the model runs before and after: every call of `run` builds a model anew."""


def check_user_files(workshop, count):
    files = sorted(workshop.glob("mine*.bin"))
    assert len(files) == count
    assert {file.name: file.read_bytes() for file in files} == {
        file.name: b"0123456789" for file in files
    }


def plain_run(quick, workshop):
    """The number of tensors of the same program when it leaves descriptors alone."""
    (workshop / "plain.py").write_text(PROGRAM.format(act=""))
    dumped = quick("-o", "plain", run=["plain.py"])
    assert dumped.code == 0, dumped.err
    from driftline.runs.reader import open_run

    return len(open_run(workshop / "plain"))


@pytest.mark.parametrize("last", [256, 20_000])
def test_a_program_that_closes_every_descriptor_keeps_its_own_files(dump, workshop, last):
    (workshop / "closes.py").write_text(PROGRAM.format(act=CLOSED.format(last=last)))
    dumped = dump(run=["closes.py"])
    assert dumped.code == 0, dumped.err
    check_user_files(workshop, 40)
