"""Damaged GE files, graph texts and FX dumps: a sentence or a tensor, never anything else."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from driftline.errors import DriftlineError
from driftline.formats.ascend.ge import operator_file
from driftline.formats.ascend.ge.graph_text import GraphNode, parse_graph
from driftline.formats.ascend.protobuf import NotText
from driftline.formats.registry import open_run
from support.ge import (
    GeDump,
    GeValue,
    ge_bytes,
    ge_tiles,
    ge_value,
    graph_text,
    write_fx,
)

MATRIX = np.arange(12 * 20, dtype=np.float16).reshape(12, 20)
SEEDS = [
    ge_bytes("Add_2", [MATRIX, MATRIX], [MATRIX]),
    ge_bytes("NZ", [ge_tiles(MATRIX)], [ge_value(MATRIX, padding=32)]),
    ge_bytes("Old", [MATRIX], [MATRIX], version="1.0", bare=True),
    ge_bytes("Bits", [GeValue(b"\x05" * 4, 29, (30,))], [GeValue(b"\x21" * 3, 28, (2, 3))]),
    ge_bytes("Image", [GeValue(bytes(320), 2, (1, 2, 1, 5, 16), 3, (1, 20, 1, 5))], []),
    ge_bytes("Scalar", [np.float32(1)], [np.int64(7)], buffers=[b"xxxx"]),
]
EXTREMES = [b"\xff" * 9 + b"\x01", b"\x80" * 12, b"\0", b"\x7f", b"\xff\xff\xff\xff\x0f", b"\x0a"]
TEXT = graph_text(
    [
        GraphNode("x", "Data"),
        GraphNode('odd "{name}"', "Add", (("x", 0), ("x", 1)), ("add-aten.add.OUTPUT.0", "")),
    ]
)
PIECES = [*"{}<>[]:;,\"'\\#\n", "op {", 's: "', "\\x", "\\777", "[a.b]", "\0", "input: [", "é"]


def damaged(dice: random.Random) -> bytes:
    data = bytearray(dice.choice(SEEDS))
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(min(len(data), dice.choice((9, 120, 10_000)))) if data else 0
        kind = dice.randrange(6)
        if kind == 0 and data:
            data[at] = dice.randrange(256)
        elif kind == 1:
            data[at:at] = dice.choice(EXTREMES)
        elif kind == 2:
            del data[at : at + dice.randint(1, 20)]
        elif kind == 3:
            data[at:at] = data[at : at + dice.randint(1, 60)]
        elif kind == 4 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 5 and len(data) > 8:  # keep the length right, so that the message is reached
            data[:8] = dice.choice((len(data) - 8, dice.randrange(200))).to_bytes(8, "little")
    return bytes(data)


def read_all(path: Path, size: int) -> None:
    try:
        run = operator_file.open(path)
        for handle in run.tensors():
            if not handle.lost:
                assert handle.raw().nbytes <= 8 * size + 8
                handle.float64()
    except DriftlineError as refused:
        assert str(refused)
        assert "\n" not in str(refused)
    operator_file.sniff(path)


def fuzz_files(folder: Path, count: int, seed: int) -> None:
    dice = random.Random(seed)
    slowest = 0.0
    for number in range(count):
        content = damaged(dice)
        path = folder / f"f{number % 64}"
        path.write_bytes(content)
        begin = time.thread_time()
        read_all(path, len(content))
        slowest = max(slowest, time.thread_time() - begin)
    assert slowest < 1.0


def fuzz_texts(count: int, seed: int) -> None:
    dice = random.Random(seed)
    slowest = 0.0
    for _ in range(count):
        text = TEXT
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(text) + 1)
            kind = dice.randrange(4)
            if kind == 0:
                text = text[:at] + dice.choice(PIECES) + text[at:]
            elif kind == 1:
                text = text[:at] + text[at + dice.randint(1, 30) :]
            elif kind == 2:
                text = text[:at] + text[at : at + dice.randint(1, 80)] * 2 + text[at:]
            else:
                text = text[:at] + chr(dice.randrange(1, 300)) + text[at + 1 :]
        begin = time.thread_time()
        try:
            for node in parse_graph(text):
                assert isinstance(node.name, str)
        except NotText as refused:
            assert str(refused)
        slowest = max(slowest, time.thread_time() - begin)
    assert slowest < 1.0


def test_damaged_ge_files_are_read_or_refused(tmp_path: Path) -> None:
    fuzz_files(tmp_path, 4000, 1)


def test_damaged_graph_texts_are_read_or_refused() -> None:
    fuzz_texts(2000, 2)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_ge_files(tmp_path: Path) -> None:
    fuzz_files(tmp_path, 100_000, 3)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_graph_texts() -> None:
    fuzz_texts(100_000, 4)


def test_damaged_dumps_open_whole(tmp_path: Path) -> None:
    """Whatever one file is, the folder is a run: its tensors, or the reasons."""
    dice = random.Random(5)
    for trial in range(40):
        dump = GeDump(tmp_path / f"ge{trial}")
        for number in range(6):
            path = dump.operator("Op", f"op_{number}", [MATRIX], [MATRIX])
            if number:
                path.write_bytes(damaged(dice))
        place = tmp_path / f"fx{trial}" / "gm_20240130064200000001_dump" / "1"
        write_fx(place, "op", "aten.op", [MATRIX, "word"], [MATRIX])
        for path in sorted(place.iterdir())[1:]:
            data = bytearray(path.read_bytes())
            data[dice.randrange(len(data))] = dice.randrange(256)
            path.write_bytes(bytes(data))
        for folder in (dump.folder, place.parent.parent):
            for handle in open_run(folder).tensors():
                if not handle.lost:
                    handle.raw()


PARTS = [
    *("0", "1", "00", "7", "20240130064151", "20240130064152", "graph_1_0", "graph_1_0_1", "g"),
    *("worldsize2_global_rank0", "worldsize2_global_rank1", "data_dump", "gm_1_dump", "gm_2_dump"),
    *("ä b", "dynamo_x", "a.b", "expect", "Op.op.1.6.1706596911887829"),
]
NAMES = [
    *("Op.op.1.6.1706596911887829", "Op.op.2.6.1706596911887830", "Op.a.b.1.6.1706596911887829"),
    *("Op.a_b.1.6.1706596911887829", "Op.op.1706596911887829", "OpDebug.x.1.6.1706596911887829"),
    *("1234", "mapping.csv", "notes.txt", "Op..1.6.1706596911887829", ".1.2.1706596911887829"),
    *("dynamo_original_graph_1_20240130064150123456.txt", "dynamo_optimized_graph_2.txt"),
    *("a-t.INPUT.0.20240130064201000001.npy", "a-t.INPUT.0.0.20240130064201000001.npy"),
    *("a-t.OUTPUT.0.20240130064201000001.npy", "a-t.INPUT.00.20240130064201000001.npy"),
    *("-.INPUT.0.20240130064201000001.npy", "a-t.OUTPUT.0.20240130064201000002.npy"),
]


def test_folders_of_any_shape_are_a_run_or_a_sentence(tmp_path: Path) -> None:
    dice = random.Random(6)
    contents = [SEEDS[0], ge_bytes("a/b", [], [MATRIX]), TEXT.encode(), b"", b"1234,Op.z.1.6.17"]
    opened = 0
    for trial in range(250):
        root = tmp_path / str(trial)
        root.mkdir()
        for _ in range(dice.randint(1, 12)):
            place = root.joinpath(*(dice.choice(PARTS) for _ in range(dice.randint(0, 6))))
            path = place / dice.choice(NAMES)
            try:
                place.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".npy":
                    np.save(path, dice.choice([MATRIX, np.float32(1), np.array("word")]))
                else:
                    path.write_bytes(dice.choice(contents))
            except OSError:  # a file of that name is in the way
                continue
        try:
            run = open_run(root)
        except DriftlineError as refused:
            assert "twice" not in str(refused)
            continue
        opened += 1
        for handle in run.tensors():
            if not handle.lost:
                handle.raw()
        list(run.events())
    assert opened > 150


def test_deep_strings_and_long_texts_take_linear_time() -> None:
    for text in ('"' * 200_000, "'a' " * 100_000, "a:[" * 50_000, "\\" * 100_000, "#" * 200_000):
        begin = time.thread_time()
        with pytest.raises(NotText):
            parse_graph("op { name: " + text)
        assert time.thread_time() - begin < 2.0
