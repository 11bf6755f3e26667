"""Time to open a dump of 100 000 small files, compared with a plain walk over the files.

There are three trees: an ATB dump with two files for each of 50 000 operations in a few executions,
a GE dump of 10 000 operators and 10 steps with the text of its graph, and an FX dump of 5 000 nodes
and 10 steps with two files each. Opening a dump reads the header of each file. The plain walk
visits the same folders and reads the first bytes of each file in Python, without using them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from driftline import open_run
from driftline.formats.ascend.ge.graph_text import GraphNode

# The writers of other tools' dumps are part of the tests, not of the installed package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.atb import bin_bytes
from support.ge import GeDump

FILES = 100_000
LAYERS = 100
CHILDREN = 50
EXECUTIONS = 10
ROUNDS = 3


def make_tree(folder: Path) -> int:
    content = bin_bytes(np.arange(64, dtype=np.float16).reshape(8, 8))
    files = 0
    base = folder / "msit_dump_20240701_120000" / "tensors" / "0_4242"
    for execution in range(EXECUTIONS):
        for layer in range(LAYERS):
            for child in range(CHILDREN):
                place = f"{base}/{execution}/{layer}_Decoder_layer/{child}_LinearOperation"
                for moment, name in (("before", "intensor0"), ("after", "outtensor0")):
                    Path(place, moment).mkdir(parents=True)
                    file = os.open(f"{place}/{moment}/{name}.bin", os.O_WRONLY | os.O_CREAT)
                    os.write(file, content)
                    os.close(file)
                    files += 1
    return files


def make_ge(folder: Path) -> int:
    values = np.arange(64, dtype=np.float16).reshape(8, 8)
    dump = GeDump(folder)
    for step in range(EXECUTIONS):
        for at in range(FILES // EXECUTIONS):
            dump.operator("Relu", f"Relu_{at}", [values], [values], step=step)
    names = [f"Relu_{at}" for at in range(FILES // EXECUTIONS)]
    dump.graph_text(
        GraphNode(name, "Relu", ((before, 0),), (f"relu_{at}-aten.relu.OUTPUT.0",))
        for at, (before, name) in enumerate(zip(["x", *names], names, strict=False))
    )
    return FILES


def make_fx(folder: Path) -> int:
    place = folder / "seed.npy"
    np.save(place, np.arange(64, dtype=np.float16).reshape(8, 8))
    content = place.read_bytes()
    place.unlink()
    for step in range(EXECUTIONS):
        below = folder / "gm_20240130064200000001_dump" / str(step + 1)
        below.mkdir(parents=True)
        for at in range(FILES // EXECUTIONS // 2):
            for port in ("INPUT", "OUTPUT"):
                name = f"relu_{at}-aten.relu.{port}.0.20240130064201000001.npy"
                (below / name).write_bytes(content)
    return FILES


def plain_walk(folder: Path) -> int:
    files = 0
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    file = os.open(entry.path, os.O_RDONLY)
                    os.pread(file, 512, 0)
                    os.close(file)
                    files += 1
    return files


def run() -> list[dict[str, Any]]:
    return [
        figure("an ATB dump", make_tree, 1),
        figure("a GE dump", make_ge, 2),
        figure("an FX dump", make_fx, 1),
    ]


def figure(what: str, make: Callable[[Path], int], tensors: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="driftline-foreign-"))
    try:
        files = make(folder)
        assert files == FILES
        walks, opens, busy = [], [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            assert plain_walk(folder) >= files
            walks.append(time.perf_counter() - start)
            start, used = time.perf_counter(), time.process_time()
            assert len(open_run(folder)) == tensors * files
            opens.append(time.perf_counter() - start)
            busy.append(time.process_time() - used)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "what": f"open {what} of {files} files",
        "value": min(opens),
        "goal": 10.0,
        "better": "lower",
        "unit": "s",
        "note": f"{min(busy):.2f} s of processor time; a plain walk takes {min(walks):.2f} s",
    }
