"""Small files are read ahead in C; what comes of it is what reading them one by one gives."""

import os
from array import array
from pathlib import Path

import numpy as np
import pytest

from driftline.alignment.rules.names import pair_by_name
from driftline.comparison.measure.scheduler import measure
from driftline.formats import folder as folders
from driftline.formats import read_ahead
from driftline.formats.folder import Folder
from driftline.formats.read_ahead import Ranges, Read
from driftline.formats.registry import open_run

pytestmark = pytest.mark.skipif(not read_ahead.available(), reason="the C library was not built")


def ranges(folder, names, start=0, length=10):
    starts = array("q", [start]) * len(names)
    lengths = array("q", [length]) * len(names)
    return Ranges(str(folder), names, starts, lengths)


def test_a_range_holds_the_bytes_of_its_file_and_what_cannot_be_opened_is_said(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ümläut").write_bytes(bytes(range(100)))
    (tmp_path / "short").write_bytes(b"abcdef")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("short")
    names = ["sub/ümläut", "short", "pipe", "link", "sub", "absent"]
    read = Read()
    read.begin(ranges(tmp_path, names, start=3))
    read.wait()
    assert list(read.sizes) == [100, 6, -1, -1, -1, -1]
    assert list(read.got) == [10, 3, -1, -1, -1, -1]
    assert read.room[:13] == bytes(range(3, 13)) + b"def"


def test_memory_is_used_again_and_a_folder_that_is_gone_reads_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    read = Read()
    for _ in range(3):
        read.begin(ranges(tmp_path, ["a"]))
    read.wait()
    assert read.room == b"0123456789"
    read.begin(ranges(tmp_path / "gone", ["a"]))
    read.wait()
    assert list(read.got) == [-1]


def trees(root, count=40):
    rng = np.random.default_rng(0)
    for side in "ab":
        for at in range(count):
            path = root / side / f"layer.{at % 7}" / f"op{at}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, rng.standard_normal((3, 10 * at + 1)).astype(np.float32))
    (root / "a" / "empty.npy").write_bytes(b"")
    (root / "b" / "empty.npy").write_bytes(b"")
    (root / "a" / "linked.npy").symlink_to("layer.1/op1.npy")
    (root / "b" / "linked.npy").symlink_to("/etc/hostname")
    os.mkfifo(root / "a" / "pipe.npy")
    np.save(root / "b" / "pipe.npy", np.ones(3))
    whole = (root / "a" / "layer.3" / "op3.npy").read_bytes()
    (root / "a" / "layer.3" / "op3.npy").write_bytes(whole[:-1])


def described(root):
    return [list(map(repr, open_run(root / side).records)) for side in "ab"]


def rows(root):
    ours, theirs = open_run(root / "a"), open_run(root / "b")
    plan = pair_by_name(ours.records, theirs.records)
    return list(map(repr, measure(plan, ours, theirs).rows))


@pytest.mark.parametrize("beginning", [64, 512, 4096])
def test_a_tree_read_ahead_is_the_tree_read_file_by_file(tmp_path, monkeypatch, beginning):
    trees(tmp_path)
    with monkeypatch.context() as without:
        without.setattr(read_ahead, "available", lambda: False)
        records, measured = described(tmp_path), rows(tmp_path)
    monkeypatch.setattr(folders, "_FILES_AHEAD", 8)
    monkeypatch.setattr(folders, "_FIRST_BYTES", beginning)
    monkeypatch.setattr("driftline.comparison.measure.scheduler._AHEAD", 8)
    for kept in (1 << 20, 3000, 0):
        monkeypatch.setattr(folders, "KEPT_BYTES", kept)
        assert described(tmp_path) == records
        assert rows(tmp_path) == measured


def test_bytes_at_hand_belong_to_the_name_they_were_read_for(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_FILES_AHEAD", 2)
    for name in "abcdef":
        (tmp_path / name).write_bytes(name.encode() * 20)
    folder = Folder(tmp_path)
    for name in folder.ahead(list("abcdef")):
        assert folder.start("f", 30) == (b"f" * 20, 20)
        assert folder.start(name, 30) == (name.encode() * 20, 20)
        assert folder.start(name, 5)[0].startswith(name.encode() * 5)


def test_whoever_stops_in_the_middle_leaves_no_descriptor_open(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_FILES_AHEAD", 2)
    for name in "abcdef":
        (tmp_path / name).write_bytes(b"x")
    names = Folder(tmp_path).ahead(list("abcdef"))
    assert next(names) == "a"
    names.close()
    # Only ours: other threads of a test process open and close files, too.
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [link for link in links if link.resolve().is_relative_to(tmp_path)]
