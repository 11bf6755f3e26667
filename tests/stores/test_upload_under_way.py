"""A run whose upload is under way, and the bounds of what is fetched and sent beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sent_runs import write_run

from driftline.formats.registry import open_run
from driftline.runs.layout import INDEX
from driftline.runs.records import Record, TensorKey
from driftline.runs.stores import block_cache, upload
from driftline.runs.stores.store import Store
from driftline.runs.stores.upload import CLAIM
from driftline.runs.writer import RunWriter


@pytest.fixture
def unsealed(tmp_path: Path) -> Path:
    """A run as a program leaves it that has not ended."""
    writer = RunWriter(tmp_path / "run", seal_at_exit=False)
    for step in range(3):
        key = TensorKey.of("layer", "output", step=step)
        writer.put(Record(key, step, "float32", (4,)), np.arange(4, dtype=np.float32).view("u1"))
    writer.flush()
    return tmp_path / "run"


@pytest.mark.parametrize("claimed", [True, False])
def test_an_unsealed_run_still_grows_as_long_as_somebody_sends_it(
    unsealed: Path, memory: str, claimed: bool
) -> None:
    store = Store(memory)
    for path in (path for path in unsealed.rglob("*") if path.is_file()):
        store.put(path.relative_to(unsealed).as_posix(), path.read_bytes())
    if claimed:
        store.put(CLAIM, b"{}")
    run = open_run(memory)
    assert run.growing is claimed
    assert len(list(run.records)) == 3


class _Counted:
    """A store of one file, and what was read of it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads: list[tuple[int, int]] = []

    def read(self, name: str, start: int, stop: int) -> bytes:
        self.reads.append((start, stop))
        return self.content[start:stop]


def test_a_long_piece_is_fetched_as_it_is_and_displaces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_cache, "LARGE", 300)
    store = _Counted(bytes(range(250)) * 4)
    blocks = block_cache.Blocks(store, block=100, kept=200)  # type: ignore[arg-type]
    blocks.fetch("x", 0, 200, 1000)
    for _ in range(2):
        buffer, offset = blocks.fetch("x", 410, 710, 1000)
        assert bytes(buffer[offset : offset + 300]) == store.content[410:710]
    blocks.fetch("x", 0, 200, 1000)
    # The long piece twice, to the byte; the first two blocks are kept all the time.
    assert store.reads == [(0, 200), (410, 710), (410, 710)]


def test_an_index_is_sent_early_unless_it_is_long(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    (part,) = (path.parent.name for path in folder.rglob(INDEX))
    monkeypatch.setattr(upload, "_LARGEST_EARLY_INDEX", 10)
    sending = upload.Sending(folder, memory)
    sending._send_complete()
    assert sending.store.size(f"{part}/{INDEX}") is None
    monkeypatch.setattr(upload, "_LARGEST_EARLY_INDEX", 1 << 20)
    sending._send_complete()
    assert sending.store.size(f"{part}/{INDEX}") == (folder / part / INDEX).stat().st_size
    sending.abandon()
