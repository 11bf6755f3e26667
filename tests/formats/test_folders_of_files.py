"""Folders of tensor files that no tool's layout explains, and the quick readers behind them."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from driftline import compare, open_run
from driftline.errors import BadFile, BadRun, DriftlineError
from driftline.formats.folder import Folder
from driftline.formats.tensor_files import describe
from driftline.formats.tensors import npy, torch_zip
from support.atb import bin_bytes


def test_a_site_is_a_file_s_path(tmp_path: Path) -> None:
    (tmp_path / "layers" / "0").mkdir(parents=True)
    np.save(tmp_path / "layers" / "0" / "mlp.npy", np.arange(4, dtype=np.float32))
    np.savez(tmp_path / "weights.npz", a=np.ones(2), b=np.zeros(3))
    torch.save(torch.ones(2, 2, dtype=torch.bfloat16), tmp_path / "layers" / "norm.pt")
    run = open_run(tmp_path)
    assert run.manifest["format"] == "files"
    assert set(run.sites()) == {"layers/0/mlp", "weights/a", "weights/b", "layers/norm"}
    assert run.get("layers/norm").dtype == "bfloat16"
    assert not run.ordered


def test_two_files_of_one_stem_keep_their_suffix(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    torch.save(torch.zeros(3), tmp_path / "x.pt")
    assert set(open_run(tmp_path).sites()) == {"x.npy", "x.pt"}


def test_a_planted_difference_is_named_and_every_other_file_passes(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for at in range(40):
        for side in ("a", "b"):
            (tmp_path / side / f"layer{at % 4}").mkdir(parents=True, exist_ok=True)
        values = rng.standard_normal(50).astype(np.float32)
        np.save(tmp_path / "a" / f"layer{at % 4}" / f"op{at}.npy", values)
        if at == 17:
            values[3] += 1
        np.save(tmp_path / "b" / f"layer{at % 4}" / f"op{at}.npy", values)
    table = compare(tmp_path / "a", tmp_path / "b")
    assert [row.key.site for row in table.rows if row.status == "fail"] == ["layer1/op17"]
    assert sum(row.status == "pass" for row in table.rows) == 39


def test_unreadable_files_are_rows_with_reasons(tmp_path: Path) -> None:
    folder, outside = tmp_path / "dump", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    np.save(folder / "fine.npy", np.ones(3))
    np.save(outside / "secret.npy", np.ones(3))
    (folder / "cut.npy").write_bytes((folder / "fine.npy").read_bytes()[:-4])
    (folder / "text.npy").write_text("hello")
    (folder / "alias.npy").symlink_to("fine.npy")
    (folder / "out.npy").symlink_to(outside / "secret.npy")
    (folder / "broken.npy").symlink_to("nowhere.npy")
    (folder / "sub").symlink_to(outside)
    run = open_run(folder)
    lost = {record.key.site: record.lost for record in run.records if record.lost}
    assert set(lost) == {"cut", "text", "out", "broken"}
    assert "leads out" in lost["out"]
    assert run.get("alias").numpy().tolist() == [1, 1, 1]
    assert [event["message"] for event in run.events()] == ["sub: a link to a folder, not followed"]
    table = compare(run, run)
    assert {row.status for row in table.rows} == {"pass", "incomparable"}


def test_a_file_that_shrinks_after_it_was_opened_is_a_row_with_a_reason(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "x.npy", np.ones(20_000))
        np.save(tmp_path / side / "y.npy", np.ones(200_000))
    ours = open_run(tmp_path / "a")
    for name in ("x", "y"):
        whole = (tmp_path / "a" / f"{name}.npy").read_bytes()
        (tmp_path / "a" / f"{name}.npy").write_bytes(whole[:200])
    table = compare(ours, tmp_path / "b")
    assert {row.status for row in table.rows} == {"incomparable"}


def test_an_empty_folder_is_still_no_run(tmp_path: Path) -> None:
    with pytest.raises(BadRun, match="an empty folder"):
        open_run(tmp_path)


def test_thousands_of_files_leave_nothing_open(tmp_path: Path) -> None:
    for at in range(1500):
        np.save(tmp_path / f"{at}.npy", np.full(3, at))
    before = len(list(Path("/proc/self/fd").iterdir()))
    run = open_run(tmp_path)
    assert sum(int(t.numpy()[0]) for t in run.tensors()) == sum(range(1500))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


@given(
    hnp.arrays(
        st.sampled_from(["<f4", ">f4", "<f8", "<f2", "|i1", "<i8", "|b1", "<c8", ">i2"]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    st.booleans(),
)
def test_the_quick_header_says_what_numpy_s_own_reader_says(array: Any, fortran: bool) -> None:
    stream = io.BytesIO()
    np.save(stream, np.asfortranarray(array) if fortran else array)
    content = stream.getvalue()
    quick = npy.usual_header(content[:256])
    slow = npy.read_header(io.BytesIO(content), "x")
    assert quick is not None
    assert vars(quick) == vars(slow)


torch.manual_seed(0)
SAVED: list[Any] = [
    torch.randn(3, 4),
    torch.randn(2, 3).bfloat16(),
    torch.randn(4).to(torch.float8_e5m2),
    torch.ones(3, dtype=torch.uint16),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.nn.Parameter(torch.randn(2, 2)),
    torch.arange(100)[20:30],
    {"tokens": torch.arange(5), "deep": [torch.ones(1), (torch.zeros(2), 3, None, "text", 1.5)]},
    torch.nn.Linear(3, 4).state_dict(),
    torch.randn(6, dtype=torch.complex64),
    {"shared": (lambda t: [t, t[1:]])(torch.arange(4.0))},
    torch.randn(70_000),
]


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: type(saved).__name__)
def test_torch_files_are_described_without_torch_as_with_it(tmp_path: Path, saved: Any) -> None:
    from driftline.formats.tensors import torch_file

    torch.save(saved, tmp_path / "x.pt")
    size = (tmp_path / "x.pt").stat().st_size
    content = (tmp_path / "x.pt").read_bytes()
    quick = torch_zip.read_tensors(size, lambda length, at: content[at : at + length])
    assert quick is not None
    through_torch = torch_file.members(tmp_path / "x.pt")
    mine = describe(Folder(tmp_path), "x.pt")
    assert [(m.name, m.dtype, m.shape) for m in mine] == [
        (m.name, m.dtype, m.shape) for m in through_torch
    ]
    for ours, theirs in zip(mine, through_torch, strict=True):
        assert ours.fetch().tobytes() == theirs.fetch().tobytes()


@pytest.mark.parametrize(
    "saved",
    [
        torch.randn(3, 4).t(),
        torch.randn(1, 3).expand(4, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "expanded", "conjugate", "sparse"],
)
def test_what_is_not_plain_is_asked_of_torch(tmp_path: Path, saved: Any) -> None:
    torch.save(saved, tmp_path / "x.pt")
    (member,) = describe(Folder(tmp_path), "x.pt")
    if saved.is_sparse:
        assert "not dense" in member.trouble
        return
    expected = saved.resolve_conj().contiguous().numpy()
    assert member.shape == tuple(saved.shape)
    assert member.fetch().tobytes() == expected.tobytes()


def test_a_compressed_or_foreign_zip_is_left_to_torch(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    content = (tmp_path / "packed.pt").read_bytes()
    found = torch_zip.read_tensors(len(content), lambda length, at: content[at : at + length])
    assert found is None


def _hurt(dice: random.Random, whole: bytes) -> bytes:
    hurt = bytearray(whole)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(hurt))
        hurt[at] = dice.choice((0, 255, dice.randrange(256)))
    if dice.random() < 0.2:
        del hurt[dice.randrange(len(hurt)) :]
    return bytes(hurt)


def _fuzz(count: int) -> None:
    dice = random.Random(5)
    wholes: list[bytes] = []
    for saved in SAVED[:10]:
        stream = io.BytesIO()
        torch.save(saved, stream)
        wholes.append(stream.getvalue())
    for _ in range(count):
        content = _hurt(dice, dice.choice(wholes))
        size = len(content)
        asked: list[int] = []

        def read(length: int, at: int, content: bytes = content, asked: Any = asked) -> bytes:
            asked.append(length)
            return content[at : at + length]

        found = torch_zip.read_tensors(size, read)
        assert max(asked, default=0) <= max(size, 1 << 20)
        for stored in found or ():
            assert stored.start + stored.length <= size


def test_damaged_torch_files_never_end_in_anything_but_none() -> None:
    _fuzz(3000)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_torch_files_never_end_in_anything_but_none() -> None:
    _fuzz(100_000)


@given(st.binary(max_size=400))
def test_any_bytes_are_no_torch_file(content: bytes) -> None:
    found = torch_zip.read_tensors(len(content), lambda length, at: content[at : at + length])
    assert found is None


def _fuzz_in_a_folder(folder: Path, count: int) -> None:
    """Damaged files of a dump: a member with a reason, or values; nothing else, nothing huge."""
    dice = random.Random(8)
    arrays = [np.ones((3, 4), np.float32), np.zeros(5, np.int64), np.float16(2.0)]
    wholes: list[tuple[str, bytes]] = []
    for array in arrays:
        stream = io.BytesIO()
        np.save(stream, array)
        wholes.append(("x.npy", stream.getvalue()))
    for saved in (SAVED[0], SAVED[8]):
        stream = io.BytesIO()
        torch.save(saved, stream)
        wholes.append(("x.pt", stream.getvalue()))
    (folder / "x").mkdir()
    tree = Folder(folder / "x")
    for _ in range(count):
        name, whole = dice.choice(wholes)
        (folder / "x" / name).write_bytes(_hurt(dice, whole))
        for member in describe(tree, name):
            if member.trouble:
                assert "\n" not in member.trouble
                continue
            with contextlib.suppress(BadFile):
                assert member.fetch().nbytes <= 1 << 20


def test_damaged_files_of_a_dump_are_members_with_reasons(tmp_path: Path) -> None:
    _fuzz_in_a_folder(tmp_path, 1000)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_files_of_a_dump_are_members_with_reasons(
    tmp_path: Path,
) -> None:
    _fuzz_in_a_folder(tmp_path, 100_000)


def test_a_folder_of_endless_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftline.formats.plain_folder.MOST_FILES", 5)
    for at in range(7):
        np.save(tmp_path / f"{at}.npy", np.ones(2))
    with pytest.raises(BadFile, match="more than 5 files"):
        open_run(tmp_path)


def _doubling(depth: int) -> list[Any]:
    """Lists that hold the next one twice: small in a file, endless in a walk."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def test_lists_that_hold_each_other_twice_are_no_endless_walk(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2), "trap": _doubling(30)}, tmp_path / "trap.pt")
    (member,) = describe(Folder(tmp_path), "trap.pt")
    assert "nested containers" in member.trouble
    with pytest.raises(BadFile, match="nested containers"):
        open_run(tmp_path / "trap.pt")


def test_a_few_more_containers_than_allowed_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few enough that a walk without the guard would end, and this test with it."""
    torch.save({"x": torch.ones(2), "tree": _doubling(6)}, tmp_path / "tree.pt")
    monkeypatch.setattr("driftline.formats.tensors.torch_file.MOST_CONTAINERS", 128)
    assert len(open_run(tmp_path / "tree.pt").records) == 1
    monkeypatch.setattr("driftline.formats.tensors.torch_file.MOST_CONTAINERS", 127)
    with pytest.raises(BadFile, match="more than 127 nested containers"):
        open_run(tmp_path / "tree.pt")


def test_what_is_not_readable_is_told_what_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no tensor")
    for what in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DriftlineError) as caught:
            open_run(what)
        for known in ("msit_dump", "torchair", "msprobe", "Paddle", "*.out", ".safetensors"):
            assert known in caught.value.hint


def test_atb_files_without_values_are_what_they_are_in_a_plain_folder_too(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for name, keep in (("whole", "data"), ("figures", "statistics"), ("words", "description")):
        (tmp_path / f"{name}.bin").write_bytes(bin_bytes(x, keep=keep))
    run = open_run(tmp_path)
    kept = {record.key.site: record.kept for record in run.records}
    assert kept == {"whole": "full", "figures": "summary", "words": "describe"}
    assert not list(run.losses)
    (figures,) = (r.summary for r in run.records if r.key.site == "figures")
    assert figures is not None
    assert figures.max == 5.0
