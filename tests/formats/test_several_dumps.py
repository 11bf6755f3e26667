"""Folders that hold more than one dump, and files that are called something else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline import open_run
from driftline.errors import BadFile, BadRun
from support.atb import bin_bytes
from support.atb_twins import atb_twin, torch_twin, toy_decoder
from support.ge import GeDump, write_fx

X = np.arange(6, dtype=np.float32).reshape(2, 3)
PROMPT = np.array([1, 2, 3])


def _ge(folder: Path) -> None:
    GeDump(folder).operator("Op", "a", [], [X])


def _fx(folder: Path) -> None:
    place = folder / "data_dump" / "1" / "gm_20240130064200000001_dump"
    write_fx(place, "add", "aten.add.Tensor", [X], [X], stamp=20240130064201000001)


def _torch(folder: Path) -> None:
    torch_twin(folder.parent, toy_decoder(layers=1), PROMPT, root=f"ait_dump_{folder.name}")


def _atb(folder: Path) -> None:
    stamp = f"2024070{ord(folder.name[0]) % 9}_120000"
    atb_twin(folder.parent, toy_decoder(layers=1), PROMPT, stamp=stamp)


@pytest.mark.parametrize("write", [_ge, _fx, _torch, _atb])
def test_two_dumps_in_one_folder_are_refused_with_their_names_and_never_mixed(
    tmp_path: Path, write: Any
) -> None:
    write(tmp_path / "first")
    alone = len(open_run(tmp_path))
    write(tmp_path / "second")
    with pytest.raises(BadRun, match="holds 2 dumps: ") as caught:
        open_run(tmp_path)
    assert len(open_run(caught.value.hint.removeprefix("give one of them: "))) == alone


def test_ranks_and_sessions_of_one_ge_dump_are_one(tmp_path: Path) -> None:
    for rank in (0, 1):
        GeDump(tmp_path / "dump", world=(2, rank)).operator("Op", "a", [], [X])
    assert {record.key.rank for record in open_run(tmp_path).records} == {0, 1}


def test_a_torch_dump_beside_an_atb_dump_is_said(tmp_path: Path) -> None:
    atb_twin(tmp_path, toy_decoder(layers=1), PROMPT)
    torch_twin(tmp_path, toy_decoder(layers=1), PROMPT)
    run = open_run(tmp_path)
    assert run.manifest["format"] == "atb"
    messages = [event["message"] for event in run.events()]
    assert any("ait_dump/torch_tensors is a torch dump next to" in text for text in messages)


def test_a_file_is_what_its_first_bytes_say(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    np.savez(tmp_path / "b.npz", x=X)
    torch.save(torch.from_numpy(X), tmp_path / "c.pt")
    (tmp_path / "d.bin").write_bytes(bin_bytes(X))
    for source in ("a.npy", "b.npz", "c.pt", "d.bin"):
        for suffix in (".npy", ".npz", ".pt", ".bin", ".safetensors", ""):
            if (source, suffix) == ("c.pt", ".safetensors"):
                continue  # torch.load goes by that name itself
            other = tmp_path / f"renamed{suffix}"
            shutil.copy(tmp_path / source, other)
            (tensor,) = open_run(other).tensors()
            assert np.array_equal(tensor.numpy(), X), (source, suffix)


def test_a_npy_file_that_is_none_and_a_broken_link_are_told_plainly(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"something else")
    with pytest.raises(BadFile, match="does not begin as an npy file does"):
        open_run(tmp_path / "x.npy")
    (tmp_path / "e.npy").touch()
    with pytest.raises(BadFile, match="is empty"):
        open_run(tmp_path / "e.npy")
    (tmp_path / "link.npy").symlink_to("nowhere.npy")
    with pytest.raises(BadRun, match="is a link that leads nowhere"):
        open_run(tmp_path / "link.npy")
