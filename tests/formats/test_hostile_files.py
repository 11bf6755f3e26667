"""Files made to hurt: each is refused in one sentence, and nothing in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline.errors import BadFile, BadInput, NotInstalled
from driftline.formats import registry
from driftline.formats.registry import open_run
from driftline.formats.tensors import npz


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["bomb.pt", "bomb.pth", "bomb.bin"])
def test_a_pickle_bomb_is_refused_and_not_executed(tmp_path: Path, name: str, zipped: bool) -> None:
    mark = tmp_path / "it_ran"
    path = tmp_path / name
    torch.save(
        {"weight": torch.ones(2), "bomb": Bomb(mark)}, path, _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(BadFile, match="it was not loaded") as refused:
        open_run(path)
    assert not mark.exists()
    assert refused.value.hint
    assert refused.value.exit_code == 2


def test_a_bare_pickle_under_a_torch_name_is_refused_and_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    path = tmp_path / "bomb.pt"
    path.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(BadFile):
        open_run(path)
    assert not mark.exists()


def test_an_array_of_objects_is_refused_and_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    objects = np.array([Bomb(mark)], dtype=object)
    np.save(tmp_path / "bomb.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "bomb.npz", objects)
    for name in ("bomb.npy", "bomb.npz"):
        with pytest.raises(BadFile, match="Python objects"):
            open_run(tmp_path / name)
    assert not mark.exists()


def test_a_list_that_contains_itself_is_no_endless_walk(tmp_path: Path) -> None:
    loop: list[Any] = [torch.ones(2), torch.zeros(3)]
    loop.append(loop)
    torch.save(loop, tmp_path / "loop.pt")
    assert [t.shape for t in open_run(tmp_path / "loop.pt").tensors()] == [(2,), (3,)]


@pytest.mark.parametrize("claim", [2**60, 2**63, 2**64 - 1, 11])
def test_a_safetensors_header_longer_than_its_file_is_refused(tmp_path: Path, claim: int) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", claim) + b"{}        ")
    with pytest.raises(BadFile, match=f"claims a header of {claim} bytes"):
        open_run(path)


def test_a_safetensors_header_over_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**33))
        stream.truncate(2**33 + 64)  # a hole: takes no space on the disk
    with pytest.raises(BadFile, match="more than 100000000 is refused"):
        open_run(path)


def safetensors_file(path: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": entry(offsets=(0, 2**60), shape=(2**58,))}, "claims bytes 0 to 1152921504606846976"),
        ({"a": entry(offsets=(8, 24))}, "claims bytes 8 to 24 of 16"),
        ({"a": entry(offsets=(-4, 12))}, "claims bytes -4"),
        ({"a": entry(offsets=(16, 0))}, "claims bytes 16 to 0"),
        ({"a": entry(offsets=(0, 8))}, "needs 16 bytes by its shape and claims 8"),
        ({"a": entry(shape=(2, 2)), "b": entry(shape=(3,), offsets=(4, 16))}, "overlaps the one"),
        ({"a": entry(shape=(-1, 4))}, "malformed shape"),
        ({"a": entry(shape=(True, 4))}, "malformed shape"),
        ({"a": entry(shape=4)}, "malformed shape"),
        ({"a": entry(dtype="F99")}, "unknown element type 'F99'"),
        ({"a": entry(dtype=["F32"])}, "unknown element type"),
        ({"a": 3}, "malformed"),
        ({"a": entry(offsets=(0, 8, 16))}, "malformed"),
        ([1, 2], "no JSON object"),
        (b'{"a":', "malformed header"),
        (b"[" * 200_000, "malformed header"),
        (b'{"a":{"dtype":"F32","dtype":"F32"}}', "a name occurs twice"),
        (b'{"\xff":1}', "malformed header"),
    ],
)
def test_a_lying_safetensors_header_is_refused(tmp_path: Path, header: object, says: str) -> None:
    with pytest.raises(BadFile, match=says):
        open_run(safetensors_file(tmp_path / "lie.safetensors", header))


def test_the_padding_of_our_own_shards_is_no_tensor(tmp_path: Path) -> None:
    header = {"__pad0": entry("U8", (8,), (0, 8)), "a": entry("F32", (2,), (8, 16))}
    run = open_run(safetensors_file(tmp_path / "shard.safetensors", header))
    assert run.sites() == ["tensor"]


def test_a_zip_that_claims_to_unpack_to_the_moon_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros(1000))
    raw = bytearray(path.read_bytes())
    central = raw.index(b"PK\x01\x02")
    raw[central + 24 : central + 28] = struct.pack("<I", 2**32 - 2)
    path.write_bytes(raw)
    with pytest.raises(BadFile, match="refused as a bomb"):
        open_run(path)


def test_an_honest_but_extreme_member_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "LARGE", 1 << 16)
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros(1 << 20))
    with pytest.raises(BadFile, match="refused as a bomb") as refused:
        open_run(path)
    assert "numpy.savez" in refused.value.hint


def test_names_inside_an_archive_are_never_paths(tmp_path: Path) -> None:
    path = tmp_path / "slip.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.ones(2))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../outside.npy", buffer.getvalue())
        archive.writestr("/etc/inside.npy", buffer.getvalue())
    run = open_run(path)
    assert run.sites() == ["../../outside", "/etc/inside"]
    assert [t.numpy().tolist() for t in run.tensors()] == [[1, 1], [1, 1]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slip.npz"]


def test_a_huge_claimed_shape_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge.npy"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1048576), }"
    header += b" " * (118 - len(header) - 1) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with pytest.raises(BadFile, match="claims 4611686018427387904 bytes of data and has 0"):
        open_run(path)


def test_numpy_files_of_a_forgotten_type_are_refused_with_the_reason(tmp_path: Path) -> None:
    import ml_dtypes

    np.save(tmp_path / "bf16.npy", np.ones(3, ml_dtypes.bfloat16))
    with pytest.raises(BadFile, match="cannot be compared") as refused:
        open_run(tmp_path / "bf16.npy")
    assert "safetensors" in refused.value.hint


def test_torch_missing_is_a_sentence_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.ones(1), path)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(NotInstalled) as refused:
        open_run(path)
    assert refused.value.hint == "pip install torch"


def test_a_stranger_is_refused_with_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(BadFile, match="no tensor file") as refused:
        open_run(path)
    assert all(suffix in refused.value.hint for suffix in (".npy", ".npz", ".pt", ".safetensors"))


def test_formats_of_other_packages_are_asked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from driftline.formats.dump_run import Member
    from driftline.registry import Address

    class Mine:
        NAME = "mine"

        def sniff(self, path: Path) -> bool:
            return path.suffix == ".mine"

        def members(self, path: Path) -> list[Member]:
            return [Member("x", "float32", (1,), lambda: np.ones(1, np.float32))]

    monkeypatch.setattr(Address, "load", lambda self: Mine() if self.target == "m" else _real(self))
    monkeypatch.setattr(registry, "plugins", lambda group: {"mine": Address("m")})
    (tmp_path / "a.mine").write_text("x")
    assert open_run(tmp_path / "a.mine").get("tensor").numpy().tolist() == [1]


def _real(address: Any) -> Any:
    import importlib

    return importlib.import_module(address.target)


def test_a_few_bytes_that_expand_to_gigabytes_are_not_written_out(tmp_path):
    path = tmp_path / "expanded.pt"
    torch.save({"a": torch.ones(4), "b": torch.ones(1).expand(1 << 40)}, path)
    run = open_run(path)
    assert run.get(site="a").numpy().sum() == 4
    with pytest.raises(BadInput, match="expands 4 bytes to 4398046511104"):
        run.get(site="b").numpy()
