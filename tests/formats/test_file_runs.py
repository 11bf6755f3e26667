"""A tensor file is a run: names, shapes and types as its writer meant them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from driftline.errors import BadFile
from driftline.formats.registry import FILES, FOLDERS, open_run

TORCH_TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_one_tensor_is_the_same_in_every_format_that_can_hold_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensor = (torch.arange(12).reshape(3, 4) - 3).to(dtype)
    torch.save(tensor, tmp_path / "a.pt")
    save_file({"b": tensor}, tmp_path / "a.safetensors")
    names = ["a.pt", "a.safetensors"]
    if dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        np.save(tmp_path / "a.npy", tensor.numpy())
        np.savez(tmp_path / "a.npz", c=tensor.numpy())
        names += ["a.npy", "a.npz"]
    for name in names:
        run = open_run(tmp_path / name)
        assert run.sites() == ["tensor"], name
        handle = run.get("tensor")
        assert (handle.dtype, handle.shape) == (str(dtype).removeprefix("torch."), (3, 4))
        wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64)
        assert np.array_equal(handle.float64(), wide.numpy()), name


def test_nested_containers_become_dotted_names(tmp_path: Path) -> None:
    torch.save(
        {
            "state": OrderedDict(weight=torch.ones(2), bias=torch.zeros(2)),
            "caches": [(torch.ones(1), torch.ones(1))],
            "epoch": 3,
            "name": "x",
        },
        tmp_path / "nested.pt",
    )
    assert open_run(tmp_path / "nested.pt").sites() == [
        "state.weight",
        "state.bias",
        "caches.0.0",
        "caches.0.1",
    ]


def test_views_and_conjugates_are_read_as_what_they_mean(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    views = {
        "t": base.t(),
        "expanded": base[:1].expand(4, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    torch.save(views, tmp_path / "views.pt")
    run = open_run(tmp_path / "views.pt")
    for name, view in views.items():
        assert np.array_equal(run.get(name).numpy(), view.resolve_conj().numpy())


def test_a_tensor_without_plain_values_is_listed_as_lost_with_the_reason(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "s": torch.eye(2).to_sparse()}, tmp_path / "s.pt")
    run = open_run(tmp_path / "s.pt")
    assert run.get("a").numpy().tolist() == [1, 1]
    assert "sparse" in run.get("s").lost
    assert [loss.where for loss in run.losses] == ["s"]


def test_foreign_byte_order_and_column_order_are_undone(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(24, dtype=">f4").reshape(2, 3, 4))
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", array)
    for name in ("a.npy", "a.npz"):
        handle = open_run(tmp_path / name).get("tensor")
        assert handle.dtype == "float32"
        assert np.array_equal(handle.numpy(), array)


def test_bytes_that_lie_plainly_are_mapped_not_copied(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", a=values, b=values)
    save_file({"a": torch.from_numpy(values)}, tmp_path / "a.safetensors")
    for name in ("a.npy", "a.npz", "a.safetensors"):
        handle = next(iter(open_run(tmp_path / name).tensors()))
        assert not handle.raw().flags.owndata, name


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_reader_of_the_table_has_what_its_protocol_asks_for(name: str) -> None:
    reader = (FILES | FOLDERS)[name].reader.load()
    assert reader.NAME
    assert callable(reader.sniff)
    assert callable(getattr(reader, "members", None) or reader.open)
    assert name in FILES or callable(reader.open)


def test_a_file_is_recognised_by_its_content_before_its_name(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    save_file({"a": torch.from_numpy(values)}, tmp_path / "a.npy")
    torch.save({"a": torch.from_numpy(values)}, tmp_path / "a.npz")
    with (tmp_path / "a.ckpt").open("wb") as stream:
        np.savez(stream, a=values)
    for name, format_name in (("a.npy", "safetensors"), ("a.npz", "torch"), ("a.ckpt", "npz")):
        run = open_run(tmp_path / name)
        assert run.manifest["format"] == format_name
        assert next(iter(run.tensors())).numpy().tolist() == values.tolist()


def test_a_damaged_file_is_refused_by_the_reader_of_its_name(tmp_path: Path) -> None:
    for name, reason in (
        ("a.npz", "as a zip"),
        ("a.safetensors", "header"),
        ("a.bin", "no tensor"),
    ):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(BadFile, match=reason):
            open_run(tmp_path / name)
