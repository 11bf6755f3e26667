"""Damaged inputs of every reader: a run, a table, a plan, ... or a sentence, and nothing else.

The short set runs with every change; the long one, and `make fuzz`, for as long as somebody likes.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.mutation import stream
from fuzz.readers import CORPUS, READERS, Reader

EACH = pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])


def fuzz(reader: Reader, folder: Path, count: int, seed: int) -> int:
    """Reads so many damaged inputs; how many were accepted."""
    path = reader.prepare(folder / "dump")
    accepted, slowest = 0, 0.0
    for content in itertools.islice(stream(reader.corpus(), seed), count):
        before = time.thread_time()
        try:
            accepted += reader.survives(folder / "dump", path, content)
        except Exception as trouble:
            (folder / "finding").write_bytes(content)
            raise AssertionError(f"{reader.name}: {folder / 'finding'}") from trouble
        slowest = max(slowest, time.thread_time() - before)
    assert slowest < 3.0
    return accepted


@EACH
def test_damaged_inputs_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    # The corpus comes first, so something must be accepted: a reader that refuses all proves less.
    assert fuzz(reader, tmp_path, 120, 1) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH
def test_twenty_thousand_damaged_inputs(reader: Reader, tmp_path: Path) -> None:
    fuzz(reader, tmp_path, 20_000, 2)


def test_every_reader_has_a_corpus_and_every_corpus_a_reader() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {reader.name for reader in READERS}
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 400_000


def test_the_command_says_how_many_inputs_it_tried_and_keeps_what_broke(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fuzz", "--random", "--inputs", "30", "mapping-json"]
    environment = {"PYTHONPATH": f"{CORPUS.parents[1]}:{':'.join(filter(None, sys.path))}"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "mapping-json                  30 inputs" in done.stdout
