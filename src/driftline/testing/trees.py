"""What every format of many files must do, as a suite to subclass.

    class TestMine(TreeConformance):
        format = my_format_module

        def write(self, folder):
            ...                         # a dump with three tensor files at least

        def tensor_files(self, folder):
            return sorted(folder.rglob("*.bin"))

pytest collects the subclass; nothing here imports pytest.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from driftline.errors import DriftlineError
from driftline.formats.contract import TreeFormat
from driftline.formats.opening import open_run
from driftline.numerics.dtypes import DTYPES
from driftline.runs.run import Run


class TreeConformance(ABC):
    """Subclass it, say which format and how to write a dump, and pytest runs the rest.

    Attributes:
        format: The format under test.
        found: `driftline.open_run` finds the format by itself, as it finds the built-in ones.
        one_file_each: Every tensor file holds one tensor, so that a damaged one costs one.
    """

    format: ClassVar[TreeFormat]
    found: ClassVar[bool] = True
    one_file_each: ClassVar[bool] = True

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write a dump of at least three tensor files into an empty folder."""

    @abstractmethod
    def tensor_files(self, folder: Path) -> list[Path]:
        """The files of such a dump that hold tensors."""

    def _dump(self, tmp_path: Path) -> Path:
        folder = tmp_path / "dump"
        folder.mkdir()
        self.write(folder)
        assert len(self.tensor_files(folder)) >= 3
        return folder

    def test_it_recognises_its_own_dumps_and_leaves_others(self, tmp_path: Path) -> None:
        assert self.format.sniff(self._dump(tmp_path))
        empty, texts = tmp_path / "empty", tmp_path / "texts"
        empty.mkdir()
        (texts / "deep" / "er").mkdir(parents=True)
        (texts / "deep" / "er" / "notes.txt").write_text("hello\n")
        assert not self.format.sniff(empty)
        assert not self.format.sniff(texts)
        if self.found:
            assert type(open_run(tmp_path / "dump")) is type(self.format.open(tmp_path / "dump"))

    def test_keys_are_unique_and_in_order(self, tmp_path: Path) -> None:
        run = self.format.open(self._dump(tmp_path))
        assert len(run) >= 3
        assert len({record.key for record in run.records}) == len(run)
        placed = [(r.key.rank, r.key.process, r.order) for r in run.records]
        assert placed == sorted(placed)
        assert not run.losses

    def test_values_are_flat_read_only_and_of_the_storage_type(self, tmp_path: Path) -> None:
        for handle in self.format.open(self._dump(tmp_path)).tensors():
            if not handle.has_values:
                continue
            raw = handle.raw()
            dtype = DTYPES[handle.dtype]
            assert raw.ndim == 1 and not raw.flags.writeable
            assert raw.dtype == np.dtype(dtype.storage)
            assert raw.nbytes == dtype.byte_count(int(np.prod(handle.shape)))
            assert handle.float64().shape == handle.shape

    def test_the_dump_is_not_touched(self, tmp_path: Path) -> None:
        folder = self._dump(tmp_path)
        before = _contents(folder)
        run = self.format.open(folder)
        _read(run)
        run.topology()
        assert _contents(folder) == before

    def test_a_damaged_file_is_a_loss_with_a_reason(self, tmp_path: Path) -> None:
        folder = self._dump(tmp_path)
        whole = len(self.format.open(folder))
        victim = self.tensor_files(folder)[1]
        content = victim.read_bytes()
        damages: dict[str, Callable[[], object]] = {
            "empty": lambda: victim.write_bytes(b""),
            "cut": lambda: victim.write_bytes(content[: len(content) // 2]),
            "noise": lambda: victim.write_bytes(bytes(range(1, 256)) * 3),
            "folder": victim.mkdir,
            "pipe": lambda: os.mkfifo(victim),
        }
        for name, damage in damages.items():
            _remove(victim)
            damage()
            run = self.format.open(folder)
            lost = _read(run)
            assert run.losses, name
            assert all(loss.reason and "\n" not in loss.reason for loss in run.losses), name
            if self.one_file_each:
                assert len(run) == whole and lost == 1, name
            _remove(victim)

    def test_links_do_not_lead_out_of_the_dump(self, tmp_path: Path) -> None:
        folder = self._dump(tmp_path)
        victim = self.tensor_files(folder)[1]
        outside = tmp_path / "secret"
        shutil.move(victim, outside)
        for target in (outside, Path(os.path.relpath(outside, victim.parent)), victim):
            _remove(victim)
            victim.symlink_to(target)  # the last one leads to itself
            run = self.format.open(folder)
            _read(run)
            assert run.losses, target
        _remove(victim)
        (folder / "around").symlink_to(folder, target_is_directory=True)
        (victim.parent / "up").symlink_to(tmp_path, target_is_directory=True)
        assert len(self.format.open(folder)) > 0

    def test_a_link_to_a_file_of_the_dump_is_read(self, tmp_path: Path) -> None:
        folder = self._dump(tmp_path)
        first, second = self.tensor_files(folder)[:2]
        whole = len(self.format.open(folder))
        _remove(second)
        second.symlink_to(os.path.relpath(first, second.parent))
        run = self.format.open(folder)
        assert not run.losses
        if self.one_file_each:
            assert len(run) == whole
        _read(run)


def _read(run: Run) -> int:
    """Read everything; a value that cannot be had says why. How many could not."""
    lost = 0
    for handle in run.tensors():
        if handle.lost:
            lost += 1
            try:
                handle.raw()
            except DriftlineError as refused:
                assert str(refused) and "\n" not in str(refused)
            else:
                raise AssertionError(f"{handle.key} is lost and has values")
        elif handle.has_values:
            handle.raw()
    return lost


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
