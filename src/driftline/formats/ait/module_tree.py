"""Names and `model_tree.json` of an `ait llm` torch dump: keys, classes and the module tree.

    root.layers.0.mlp/output_1_0.pth      layers.0.mlp, output, slot 1.0
    cuda1_4242                            rank 1

`dialects/ait/dump_tree.py` writes the same names. It adds what ait's own tree lacks: names of
arguments (`input_mask`), later calls (`.visit2`), unusual phases and moments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from driftline.runs.records import PORTS, TensorKey, usual_moment, usual_phase

ROOT = "root"
RUN_ROOT = "(root)"
"""The name of the model itself in a run."""
_DEVICE = re.compile(r"[A-Za-z]+(\d*)_-?\d+(?:\.\d+)?|\d+_[A-Za-z]+(\d*)")
_OPERATOR = re.compile(r"(root(?:\..+)?)_(aten\.\w+)")
_POSITIONS = re.compile(r"\d+(?:_\d+)*")
# `param_grad_w` must not be read as the port `param` with the slot `grad_w`.
_LONGEST_FIRST = tuple(sorted(PORTS, key=len, reverse=True))


def rank_of(folder: str) -> int:
    """The device index in the name of a process folder; 0 if there is none.

    >>> rank_of("npu3_4242"), rank_of("cpu_4242.1"), rank_of("4242_npu2")
    (3, 0, 2)
    """
    match = _DEVICE.fullmatch(folder)
    index = (match[1] or match[2]) if match else ""
    return int(index) if index else 0


def site_of(folder: str) -> str:
    """The site of the folder of a module, or of an operator inside it.

    >>> site_of("root"), site_of("root.model.norm"), site_of("root.model.norm@aten.mul")
    ('(root)', 'model.norm', 'model.norm/aten.mul')
    >>> site_of("root.layers.0_aten.add"), site_of("root._root__aten.mean")  # as 0.1.0 wrote them
    ('layers.0/aten.add', '(root)/aten.mean')
    """
    module, sign, operator = folder.partition("@")
    if not sign and (old := _OPERATOR.fullmatch(folder)) is not None:
        module, operator = old[1], old[2]
        if module == f"{ROOT}._root_":
            module = ROOT
    site = RUN_ROOT if module == ROOT else module.removeprefix(f"{ROOT}.")
    return f"{site}/{operator}" if operator else site


def key_of(stem: str, site: str, step: int, rank: int, process: int) -> TensorKey | None:
    """The key of a file, from its name without the suffix; None if it is not the name of a tensor.

    >>> str(key_of("output", "norm", 0, 0, 0)), str(key_of("output_1_0", "norm", 2, 0, 0))
    ('rank0/step0/norm/output/0', 'rank0/step2/norm/output/1.0')
    >>> str(key_of("input_attention_mask.visit1", "norm", 0, 0, 0))
    'rank0/step0/norm#1/input/attention_mask'
    """
    words = stem.split(".")
    visit, phase, moment = 0, "", ""
    # Suffixes are read from the end, because the name before them may contain dots.
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
            # Positions inside containers become dots; an argument's name keeps its underscores.
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


# ---- `model_tree.json`


DEEPEST = 200


class Place(NamedTuple):
    """Place of a module: its class, and when a walk through the tree enters and leaves it."""

    class_name: str
    entered: int
    left: int


def places_of(roots: Sequence[Any]) -> dict[str, Place]:
    """Site → place, for every module of the trees."""
    places: dict[str, Place] = {}
    # Counts the steps of the walk; modules are listed in the order of registration.
    clock = 0

    def walk(node: Any, depth: int) -> None:
        nonlocal clock
        # The file is not trusted: other types are skipped, and recursion is limited.
        if not isinstance(node, dict) or depth > DEEPEST:
            return
        module = cast("dict[str, Any]", node)
        clock += 1
        entered = clock
        for child in _children(module):
            walk(child, depth + 1)
        clock += 1
        places[site_of(str(module.get("name", "")))] = Place(
            str(module.get("type", "")), entered, clock
        )

    for root in roots:
        walk(root, 0)
    return places


def topology_of(roots: Sequence[Any]) -> dict[str, Any]:
    """The trees in the form of a run's `topology.json`."""

    def converted(node: dict[str, Any], ids: str | None, above: str, depth: int) -> dict[str, Any]:
        site = site_of(str(node.get("name", "")))
        data: dict[str, Any] = {"site": site, "class": str(node.get("type", "")), "ids": ids}
        prefix = f"{above}." if above and above != "(root)" else ""
        name = site.removeprefix(prefix)
        children: list[dict[str, Any]] = []
        if depth < DEEPEST:
            for index, child in enumerate(_children(node)):
                if isinstance(child, dict):
                    # Only the first tree has ids: ait's scheme has no number for the others.
                    own = None if ids is None else f"{ids}_{index}" if ids else str(index)
                    children.append(converted(cast("dict[str, Any]", child), own, site, depth + 1))
        if children:
            data["children"] = children
        return {"name": name, **data} if depth else data

    trees = [cast("dict[str, Any]", root) for root in roots if isinstance(root, dict)]
    return {
        "schema": 1,
        "roots": [
            converted(root, None if index else "", "", 0) for index, root in enumerate(trees)
        ],
        "order": [],
    }


def _children(node: dict[str, Any]) -> list[Any]:
    children = node.get("children")
    return cast("list[Any]", children) if isinstance(children, list) else []
