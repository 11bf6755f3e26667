"""Conformance suites for file formats: what every format must do, as classes to subclass.

    class TestMine(FormatConformance):
        format = my_format_module

        def write(self, path, arrays):
            ...

`FormatConformance` is for single files, `TreeConformance` for dumps of many files. pytest collects
the subclass; nothing here imports pytest, so a format needs it for its tests only.
"""

from __future__ import annotations

import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from driftline.errors import DriftlineError
from driftline.formats.dump_run import LONE, FileRun
from driftline.formats.registry import Format, TreeFormat, open_run
from driftline.numerics.dtypes import DTYPES
from driftline.runs.run import Run

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


class FormatConformance(ABC):
    """Subclass it, say which format and how to write one, and pytest runs the rest.

    Attributes:
        format: The format under test.
        suffix: Of the files that `write` makes.
        one_tensor: The format holds a single tensor without a name.
        damages: Number of damaged copies to try.
    """

    format: ClassVar[Format]
    suffix: ClassVar[str] = ".dat"
    one_tensor: ClassVar[bool] = False
    damages: ClassVar[int] = 150

    @abstractmethod
    def write(self, path: Path, arrays: Arrays) -> None:
        """Write a file of the format with the program that is usually used for it."""

    def samples(self) -> Arrays:
        """The arrays to write and read back; fewer for a format that cannot hold them all."""
        # A fixed seed: a failing conformance test must fail again.
        generator = np.random.default_rng(7)
        return {
            "model.layers.0": generator.standard_normal((3, 5)).astype(np.float32),
            "half": generator.standard_normal(7).astype(np.float16),
            "double": generator.standard_normal((2, 2, 2)),
            "whole": np.array([-(2**62), 0, 2**62], np.int64),
            "flags": np.array([True, False]),
            "scalar": np.array(1.5, np.float32),
            "empty": np.zeros((0, 4), np.float32),
            "odd": np.array([np.nan, np.inf, -np.inf, -0.0], np.float32),
        }

    def _files(self, folder: Path) -> list[tuple[Path, Arrays]]:
        samples = self.samples()
        parts = [{n: a} for n, a in samples.items()] if self.one_tensor else [samples]
        files: list[tuple[Path, Arrays]] = []
        # A format of single tensors gets one file per sample.
        for number, part in enumerate(parts):
            path = folder / f"file{number}{self.suffix}"
            self.write(path, part)
            files.append((path, part))
        return files

    def open(self, path: Path) -> FileRun:
        return FileRun(path, self.format.NAME, self.format.members(path))

    def test_it_recognises_its_own_files_and_leaves_others(self, tmp_path: Path) -> None:
        for path, _ in self._files(tmp_path):
            assert self.format.sniff(path)
        # A format that claims foreign files would shadow others in `open_run`.
        for name, content in (("empty", b""), ("text", b"hello\n" * 40), ("zeros", bytes(4096))):
            stranger = tmp_path / name
            stranger.write_bytes(content)
            assert not self.format.sniff(stranger), name

    def test_every_tensor_comes_back_bit_for_bit(self, tmp_path: Path) -> None:
        for path, arrays in self._files(tmp_path):
            run = self.open(path)
            assert len(run) == len(arrays)
            for name, array in arrays.items():
                handle = run.get(LONE if len(arrays) == 1 else name)
                assert handle.shape == array.shape, name
                assert handle.dtype == array.dtype.name, name
                assert handle.numpy().tobytes() == array.tobytes(), name

    def test_values_are_flat_read_only_and_of_the_storage_type(self, tmp_path: Path) -> None:
        for path, _ in self._files(tmp_path):
            for handle in self.open(path).tensors():
                raw = handle.raw()
                assert raw.ndim == 1
                # Values may be views of a mapped file; writing would change it.
                assert not raw.flags.writeable
                assert raw.dtype == np.dtype(DTYPES[handle.dtype].storage)

    def test_the_file_is_not_touched(self, tmp_path: Path) -> None:
        for path, _ in self._files(tmp_path):
            before = path.read_bytes()
            for handle in self.open(path).tensors():
                handle.float64()
            assert path.read_bytes() == before

    def test_a_file_cut_anywhere_is_refused_in_a_sentence(self, tmp_path: Path) -> None:
        for path, _ in self._files(tmp_path):
            content = path.read_bytes()
            # Around the first eight bytes, where most formats have their magic and
            # length.
            cuts = {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}
            for cut in sorted(c for c in cuts if c < len(content)):
                self._survives(tmp_path / f"cut{self.suffix}", content[:cut])

    def test_damaged_bytes_never_end_in_anything_but_a_sentence(self, tmp_path: Path) -> None:
        dice = random.Random(11)
        for path, _ in self._files(tmp_path):
            content = path.read_bytes()
            for _ in range(self.damages // (8 if self.one_tensor else 1)):
                hurt = bytearray(content)
                for _ in range(dice.randint(1, 8)):
                    # Headers are at the ends; most of the damage should meet them.
                    reach = min(len(hurt), dice.choice((64, 512, len(hurt))))
                    offset = dice.randrange(reach)
                    hurt[offset if dice.random() < 0.7 else -1 - offset] = dice.randrange(256)
                self._survives(tmp_path / f"hurt{self.suffix}", bytes(hurt))

    def _survives(self, path: Path, content: bytes) -> None:
        """Reading it either works or raises one of our own errors."""
        path.unlink(missing_ok=True)  # a new file: an older one may still be mapped
        path.write_bytes(content)
        try:
            for handle in self.open(path).tensors():
                if not handle.lost:
                    handle.raw()
        except DriftlineError as refused:
            assert str(refused) and "\n" not in str(refused)


# Dumps of many files.


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
        # Fewer files would let the damage tests pass without testing anything.
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
        # Formats of other packages may have to be named by the user.
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
        count = len(self.format.open(folder))
        victim = self.tensor_files(folder)[1]
        content = victim.read_bytes()
        damages: dict[str, Callable[[], object]] = {
            "empty": lambda: victim.write_bytes(b""),
            "cut": lambda: victim.write_bytes(content[: len(content) // 2]),
            "noise": lambda: victim.write_bytes(bytes(range(1, 256)) * 3),
            "folder": victim.mkdir,
            # Opening a pipe would wait for ever.
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
                assert len(run) == count and lost == 1, name
            _remove(victim)

    def test_links_do_not_lead_out_of_the_dump(self, tmp_path: Path) -> None:
        folder = self._dump(tmp_path)
        victim = self.tensor_files(folder)[1]
        outside = tmp_path / "secret"
        shutil.move(victim, outside)
        # Absolute, relative and circular links.
        for target in (outside, Path(os.path.relpath(outside, victim.parent)), victim):
            _remove(victim)
            victim.symlink_to(target)  # the last one leads to itself
            run = self.format.open(folder)
            _read(run)
            assert run.losses, target
        _remove(victim)
        # A reader that follows folder links would never end.
        (folder / "around").symlink_to(folder, target_is_directory=True)
        (victim.parent / "up").symlink_to(tmp_path, target_is_directory=True)
        assert len(self.format.open(folder)) > 0

    def test_a_link_to_a_file_of_the_dump_is_read(self, tmp_path: Path) -> None:
        folder = self._dump(tmp_path)
        first, second = self.tensor_files(folder)[:2]
        count = len(self.format.open(folder))
        _remove(second)
        second.symlink_to(os.path.relpath(first, second.parent))
        run = self.format.open(folder)
        assert not run.losses
        if self.one_file_each:
            assert len(run) == count
        _read(run)


def _read(run: Run) -> int:
    """Read everything; a lost value must have a reason. Returns the number of lost values."""
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
