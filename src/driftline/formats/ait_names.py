"""Names in the tree of an `ait llm` torch dump → keys: folders are modules, files are tensors.

    root.layers.0.mlp/output_1_0.pth      layers.0.mlp, output, slot 1.0
    cuda1_4242                            rank 1

The writer of the same names is `dialects/ait_tree.py`, which adds what the seed loses: arguments by
name (`input_mask`), later calls (`.visit2`), unusual phases and moments.
"""

from __future__ import annotations

import re
from typing import Any, cast

from driftline.runs.key import PORTS, TensorKey, usual_moment, usual_phase

ROOT = "root"
RUN_ROOT = "(root)"
"""What a run calls the model itself."""
_DEVICE = re.compile(r"[A-Za-z]+(\d*)_-?\d+(?:\.\d+)?|\d+_[A-Za-z]+(\d*)")
_POSITIONS = re.compile(r"\d+(?:_\d+)*")
_LONGEST_FIRST = tuple(sorted(PORTS, key=len, reverse=True))


def rank_of(folder: str) -> int:
    """The index of the device that a process folder names; 0 when it names none.

    >>> rank_of("npu3_4242"), rank_of("cpu_4242.1"), rank_of("4242_npu2")
    (3, 0, 2)
    """
    found = _DEVICE.fullmatch(folder)
    index = (found[1] or found[2]) if found else ""
    return int(index) if index else 0


def site_of(folder: str) -> str:
    """The site of a module's folder.

    >>> site_of("root"), site_of("root.model.norm")
    ('(root)', 'model.norm')
    """
    if folder == ROOT:
        return RUN_ROOT
    return folder.removeprefix(f"{ROOT}.")


def key_of(stem: str, site: str, step: int, rank: int, process: int) -> TensorKey | None:
    """The key of a file, from its name without the suffix; None if it is no tensor's name.

    >>> str(key_of("output", "norm", 0, 0, 0)), str(key_of("output_1_0", "norm", 2, 0, 0))
    ('rank0/step0/norm/output/0', 'rank0/step2/norm/output/1.0')
    >>> str(key_of("input_attention_mask.visit1", "norm", 0, 0, 0))
    'rank0/step0/norm#1/input/attention_mask'
    """
    words = stem.split(".")
    visit, phase, moment = 0, "", ""
    while len(words) > 1:
        word = words[-1]
        if word.startswith("visit") and word[5:].isdigit():
            visit = int(word[5:])
        elif word in ("forward", "backward", "recompute"):
            phase = word
        elif word in ("before", "after"):
            moment = word
        else:
            break
        words.pop()
    name = ".".join(words)
    for port in _LONGEST_FIRST:
        if name == port or name.startswith(f"{port}_"):
            slot = name[len(port) + 1 :]
            if _POSITIONS.fullmatch(slot):
                slot = slot.replace("_", ".")
            return TensorKey(
                site,
                port,
                slot or "0",
                step,
                visit,
                rank,
                process,
                cast("Any", phase or usual_phase(port)),
                cast("Any", moment or usual_moment(port)),
            )
    return None
