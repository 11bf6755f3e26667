"""Every built-in format goes through the suite that third parties subclass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from driftline.formats.tensors import npy, npz, safetensors, torch_file
from driftline.testing.conformance import Arrays, FormatConformance


class TestNpy(FormatConformance):
    format = npy
    suffix = ".npy"
    one_tensor = True

    def write(self, path: Path, arrays: Arrays) -> None:
        (array,) = arrays.values()
        np.save(path, array)


class TestNpz(FormatConformance):
    format = npz
    suffix = ".npz"

    def write(self, path: Path, arrays: Arrays) -> None:
        np.savez(path, **arrays)


class TestCompressedNpz(FormatConformance):
    format = npz
    suffix = ".npz"

    def write(self, path: Path, arrays: Arrays) -> None:
        np.savez_compressed(path, **arrays)


class TestSafetensors(FormatConformance):
    format = safetensors
    suffix = ".safetensors"

    def write(self, path: Path, arrays: Arrays) -> None:
        save_file(arrays, path)


class TestTorchZip(FormatConformance):
    format = torch_file
    suffix = ".pt"

    def write(self, path: Path, arrays: Arrays) -> None:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)


class TestTorchLegacy(FormatConformance):
    format = torch_file
    suffix = ".pth"

    def write(self, path: Path, arrays: Arrays) -> None:
        torch.save(
            {name: torch.from_numpy(array) for name, array in arrays.items()},
            path,
            _use_new_zipfile_serialization=False,
        )


LONG = 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite", [TestNpy, TestNpz, TestCompressedNpz, TestSafetensors, TestTorchZip]
)
def test_thousands_of_damaged_files_end_in_sentences(
    suite: type[FormatConformance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "damages", LONG)
    suite().test_damaged_bytes_never_end_in_anything_but_a_sentence(tmp_path)
