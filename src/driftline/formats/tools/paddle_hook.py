"""Trees of the Paddle saving hook: `tensors|grads/rank_N/*.npy`, described by their file names.

    tensors/rank_0/tensor_idx_3_layer_class_Linear_layer_name_linear_0_micro_step_1.npy
    grads/rank_0/grad_idx_3_of_param_name_linear_0.w_0_micro_step_1.npy

A layer is a site, its class is the record's, the micro step is the step, and the index gives the
order. Paddle numbers layers per process, so the same layer may have another name elsewhere;
alignment can use class, order and step instead. The checker's `compare_rst` is not read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Literal

from driftline.errors import BadFile
from driftline.formats.dump_run import Leaf, TreeRun
from driftline.formats.folder import Folder
from driftline.formats.tensor_files import describe, leaf
from driftline.runs.records import TensorKey

NAME = "paddle saving hook"
KINDS = ("tensors", "grads")
_RANK = re.compile(r"rank_(\d+)")
_TENSOR = re.compile(
    r"tensor_idx_(\d+)_layer_class_(.+?)_layer_name_(.+)_micro_step_(-?\d+)\.npy", re.DOTALL
)
_GRAD = re.compile(r"grad_idx_(\d+)_of_param_name_(.+)_micro_step_(-?\d+)\.npy", re.DOTALL)
_NUMBERED = re.compile(r"\w+_\d+", re.ASCII)
"""Paddle's own names; names of a torch program are paths."""
_USUAL = {"w_0": "weight", "b_0": "bias"}
"""Names of a layer's first two parameters, by the names that Paddle generates for them."""
_LOOKED_AT = 200

Kind = Literal["tensors", "grads"]


def sniff(path: Path) -> bool:
    """Whether a rank's folder has file names of this kind."""
    return any(_holds_saved_files(folder) for _, folder in _rank_folders(path))


def open(path: Path) -> TreeRun:
    """Open the tree as a run: activations, then gradients, each in the order of their indices."""
    leaves: list[Leaf] = []
    events: list[dict[str, str]] = []
    for kind, place in _rank_folders(path):
        match = _RANK.fullmatch(place.name)
        rank = int(match[1]) if match else 0
        leaves += _read(path, place, kind, rank, events)
    if not leaves:
        raise BadFile(f"{path} is laid out like a tree of the saving hook and holds no tensor")
    # The hook exists for both frameworks, but only Paddle generates such names.
    numbered = all(_NUMBERED.fullmatch(leaf.record.key.site) for leaf in leaves)
    facts = {
        "numbered_names": numbered,
        "framework": "paddle" if numbered else "torch",
        "step_unit": "micro-batch",
    }
    return TreeRun(path, NAME, _with_classes(leaves), events=events, facts=facts)


def _with_classes(leaves: list[Leaf]) -> list[Leaf]:
    """Gradients with the class of their layer, if an activation of the layer has it."""
    records = [leaf.record for leaf in leaves]
    classes = {record.key.site: record.class_name for record in records if record.class_name}
    return [
        leaf._replace(record=leaf.record._replace(class_name=classes[leaf.record.key.site]))
        if not leaf.record.class_name and leaf.record.key.site in classes
        else leaf
        for leaf in leaves
    ]


def _rank_folders(path: Path) -> list[tuple[Kind, Path]]:
    """The folders of ranks below a path of any level."""
    if _RANK.fullmatch(path.name):
        return [("grads" if path.parent.name == "grads" else "tensors", path)]
    kinds: tuple[Kind, ...] = ("tensors", "grads")
    folders: list[tuple[Kind, Path]] = []
    for kind in kinds:
        for name in _ranks_in(path if path.name == kind else path / kind):
            folders.append((kind, (path if path.name == kind else path / kind) / name))
    return folders


def _ranks_in(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and _RANK.fullmatch(entry.name)
            ]
    except OSError:
        return []
    return sorted(names, key=lambda name: int(name[5:]))


def _is_saved(name: str) -> bool:
    return _TENSOR.fullmatch(name) is not None or _GRAD.fullmatch(name) is not None


def _holds_saved_files(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            # A few names are enough to recognise a folder of a hundred thousand.
            for _, entry in zip(range(_LOOKED_AT), entries, strict=False):
                if _is_saved(entry.name):
                    return True
    except OSError:
        pass
    return False


def _read(
    path: Path, place: Path, kind: Kind, rank: int, events: list[dict[str, str]]
) -> list[Leaf]:
    folder = Folder(place)
    saved: list[tuple[int, str, str, str, str, int]] = []
    for name in folder.files(named=_is_saved):
        if match := _TENSOR.fullmatch(name):
            index, class_name, site, step = match.groups()
            saved.append((int(index), name, site, "0", class_name, int(step)))
        elif match := _GRAD.fullmatch(name):
            index, parameter, step = match.groups()
            # `linear_0.w_0`: the layer, and which of its parameters.
            site, _, slot = parameter.rpartition(".")
            saved.append((int(index), name, site or slot, slot if site else "0", "", int(step)))
        else:
            message = f"{place.name}/{name} has another name than the saving hook gives"
            events.append({"kind": "dump", "message": message})
    # Only the index distinguishes calls of the same layer in one micro step.
    calls: Counter[tuple[str, str, int]] = Counter()
    leaves: list[Leaf] = []
    # The index comes first in each tuple, so this is the order of execution.
    saved.sort()
    above = "" if place == path else place.relative_to(path).as_posix() + "/"
    ahead = folder.ahead([name for _, name, *_ in saved])
    for (_, _, site, slot, class_name, step), name in zip(saved, ahead, strict=True):
        visit = calls[site, slot, step]
        calls[site, slot, step] += 1
        port = "output" if kind == "tensors" else "param_grad"
        # Steps of a run begin at 0; the hook may write -1.
        key = TensorKey.of(site, port, slot, step=max(step, 0), visit=visit, rank=rank)
        tensor = leaf(key, above + name, describe(folder, name)[0], class_name=class_name)
        if alias := _USUAL.get(slot, ""):
            tensor = tensor._replace(record=tensor.record._replace(alias=alias))
        leaves.append(tensor)
    return leaves
