"""A disk that takes no more: the program goes on, and the run says what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from driftline.errors import BadInput
from driftline.runs.provenance import create_run
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.verify import verify
from driftline.runs.writer import RunWriter

# A file size limit is a full disk that needs no root: writes stop with an error at that byte.
PROGRAM = """
import resource, sys
import numpy as np
from driftline.runs.records import TensorKey
from driftline.runs.records import Record
from driftline.runs.writer import RunWriter

limit, count = int(sys.argv[2]), int(sys.argv[3])
writer = RunWriter(sys.argv[1])
for number in range(count):
    if number == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    data = np.full(256_000, number % 251, np.uint8)
    data[:8].view(np.int64)[0] = number % 300
    site = f'site.{number},"shard":"tensors-00000.safetensors",'  # must not be taken for a place
    writer.put(Record(TensorKey.of(site, "output"), 0, "uint8", data.shape), data)
print("the program went on")
"""


def run_program(path: Path, limit: int, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(limit), str(count)],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == b"the program went on\n", done.stderr


def test_a_full_disk_stops_the_values_and_nothing_else(tmp_path: Path) -> None:
    run_program(tmp_path / "run", limit=3_000_000, count=100)
    run = open_run(tmp_path / "run")
    tensors = list(run.tensors())
    assert len(tensors) == 100
    kept = [t for t in tensors if not t.lost]
    assert 8 <= len(kept) <= 11 and kept == tensors[: len(kept)]
    for number, tensor in enumerate(kept):
        assert int(tensor.raw()[:8].view("<i8")[0]) == number
    assert not [v for v in verify(run) if not v.reason.endswith("File too large")]
    assert all("could not be written" in t.lost for t in tensors[len(kept) :])
    assert all(t.record.digest for t in tensors), "digests of lost tensors still compare"
    assert [e["kind"] for e in run.events()] == ["disk"]
    assert sum(loss.key is not None for loss in run.losses) == 100 - len(kept)
    assert any("could not be written" in loss.reason for loss in run.losses if loss.key is None)
    with pytest.raises(BadInput, match="could not be written"):
        tensors[-1].numpy()
    from safetensors.numpy import load_file

    shard = load_file(tmp_path / "run" / "rank0" / "tensors-00000.safetensors")
    assert sum(name.startswith("step0/") for name in shard) == len(kept)


def test_a_disk_too_full_for_the_index_is_counted(tmp_path: Path) -> None:
    run_program(tmp_path / "run", limit=20_000, count=600)
    run = open_run(tmp_path / "run")
    assert 0 < len(run) < 600
    facts = json.loads((tmp_path / "run" / "rank0" / "process.json").read_text())
    assert facts["sealed"] and facts["tensors"] == 600 and facts["failure"]
    missing = 600 - len(run)
    assert any(
        f"{missing} of 600 tensors are not in its index" in loss.reason for loss in run.losses
    )


def test_a_folder_that_cannot_be_made_does_not_stop_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = RunWriter(tmp_path / "file" / "run")
    data = np.zeros(10, np.uint8)
    for _ in range(3):
        writer.put(Record(TensorKey.of("a", "output"), 0, "uint8", (10,)), data)
    writer.event("x", "y")
    writer.close()
    assert "cannot write to" in writer.failure and writer.tensors_written == 0
    with pytest.raises(BadInput, match="cannot write a run to"):
        create_run(tmp_path / "file" / "run")
