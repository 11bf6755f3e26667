"""Digits depend on the values alone: not on where they lie, who reads them, or in what format."""

import ml_dtypes
import numpy as np
import pytest
from written_runs import Here, written

import driftline
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES

RNG = np.random.default_rng(5)


def lying_at(values, offset):
    """The same bytes, so far behind a cache line's beginning."""
    room = np.empty(values.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + values.nbytes] = values.view(np.uint8)
    return room[start : start + values.nbytes]


@pytest.mark.parametrize("path", kernel.available())
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int32"])
def test_where_the_bytes_lie_changes_no_digit(path, name):
    kind = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    ours = (RNG.standard_normal(40_003) * 3).astype(kind)
    theirs = (ours.astype(np.float64) * 1.001).astype(kind)
    dtype = DTYPES[name]
    found = {
        repr(
            kernel.pair_moments(
                *(lying_at(ours, at).view(dtype.storage), dtype),
                *(lying_at(theirs, other).view(dtype.storage), dtype),
                count=ours.size,
                atol=0.0,
                rtol=0.0,
                path=path,
            )
        )
        for at, other in ((0, 0), (8, 0), (16, 48), (56, 24))
    }
    assert len(found) == 1


def npy(place, tensors):
    for name, values in tensors.items():
        (place / "files").mkdir(parents=True, exist_ok=True)
        np.save(place / "files" / f"{name}.npy", values)
    return place / "files"


def npz(place, tensors):
    place.mkdir(exist_ok=True)
    np.savez(place / "all.npz", **tensors)
    return place / "all.npz"


def safetensors(place, tensors):
    from safetensors.numpy import save_file

    place.mkdir(exist_ok=True)
    save_file({"odd": np.zeros(3, np.uint8), **tensors}, place / "all.safetensors")
    return place / "all.safetensors"


def torch_file(place, tensors):
    import torch

    place.mkdir(exist_ok=True)
    torch.save({n: torch.from_numpy(v) for n, v in tensors.items()}, place / "all.pt")
    return place / "all.pt"


@pytest.mark.parametrize("write", [npy, npz, safetensors, torch_file])
def test_files_of_other_programs_are_shared_out_with_all_their_digits(tmp_path, write):
    rng = np.random.default_rng(1)
    ours = {f"t{n}": rng.standard_normal(17_000 + 777 * n).astype(np.float32) for n in range(40)}
    theirs = {name: values * np.float32(1.0001) for name, values in ours.items()}
    ref, cand = write(tmp_path / "ref", ours), write(tmp_path / "cand", theirs)
    one = written(driftline.compare(ref, cand), tmp_path / "one")
    many = driftline.compare(ref, cand, executor=Here(5, elsewhere=True))
    assert written(many, tmp_path / "many") == one
    parts = [driftline.compare_shard(ref, cand, f"{number}/3") for number in (1, 2, 3)]
    assert written(driftline.merge(parts), tmp_path / "merged") == one


def test_processes_agree_on_files_of_other_programs(tmp_path):
    rng = np.random.default_rng(2)
    ours = {f"t{n}": rng.standard_normal((130, 131 + n)).astype(np.float32) for n in range(70)}
    theirs = {name: values * np.float32(1.0001) for name, values in ours.items()}
    ref, cand = npy(tmp_path / "ref", ours), npy(tmp_path / "cand", theirs)
    one = written(driftline.compare(ref, cand, metrics=["kl"]), tmp_path / "one")
    many = driftline.compare(ref, cand, metrics=["kl"], jobs=2)
    assert written(many, tmp_path / "many") == one
