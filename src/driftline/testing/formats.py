"""What every file format must do, as a suite to subclass.

    class TestMine(FormatConformance):
        format = my_format_module

        def write(self, path, arrays):
            ...

pytest collects the subclass; nothing here imports pytest, so a format needs it for tests only.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from driftline.errors import DriftlineError
from driftline.formats.contract import Format
from driftline.formats.file_run import LONE, FileRun
from driftline.numerics.dtypes import DTYPES

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


class FormatConformance(ABC):
    """Subclass it, say which format and how to write one, and pytest runs the rest.

    Attributes:
        format: The format under test.
        suffix: Of the files that `write` makes.
        one_tensor: The format holds a single tensor without a name.
        damages: How many damaged copies to try.
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
            whole = path.read_bytes()
            cuts = {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1}
            for cut in sorted(c for c in cuts if c < len(whole)):
                self._survives(tmp_path / f"cut{self.suffix}", whole[:cut])

    def test_damaged_bytes_never_end_in_anything_but_a_sentence(self, tmp_path: Path) -> None:
        dice = random.Random(11)
        for path, _ in self._files(tmp_path):
            whole = path.read_bytes()
            for _ in range(self.damages // (8 if self.one_tensor else 1)):
                hurt = bytearray(whole)
                for _ in range(dice.randint(1, 8)):
                    # Headers lie at the ends; most of the damage should meet them.
                    reach = min(len(hurt), dice.choice((64, 512, len(hurt))))
                    at = dice.randrange(reach)
                    hurt[at if dice.random() < 0.7 else -1 - at] = dice.randrange(256)
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
