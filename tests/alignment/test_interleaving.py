"""A fused q, k and v of a class that nobody knows: cut one after the other, or head by head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import driftline
from driftline.runs.run import Run
from driftline.testing.runs import run_of

RNG = np.random.default_rng(0)
HEADS, SIZE = 4, 32
CLASSES = {"norm": "LayerNorm", "out": "Linear"}


def projected(layers: int = 2) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _ in range(layers):
        x = RNG.standard_normal((2, 6, SIZE)).astype(np.float32)
        weights = {part: RNG.standard_normal((SIZE, SIZE)).astype(np.float32) for part in "qkv"}
        found.append({"x": x, **weights})
    return found


def split_run(layers: list[dict[str, Any]], wrong: str = "") -> Run:
    tensors: dict[str, Any] = {}
    for at, layer in enumerate(layers):
        x = layer["x"]
        for part in "qkv":
            site = f"layers.{at}.attn.{part}"
            made = x @ layer[part].T
            tensors[f"{site}/input/0"] = x
            tensors[f"{site}/param/weight"] = layer[part]
            tensors[site] = made * (1.5 if part == wrong else 1)
        tensors[f"layers.{at}.norm"] = x
    classes = {s: "Linear" if "attn" in s else "LayerNorm" for s in _sites(tensors)}
    return run_of(tensors, classes=classes)


def fused_run(layers: list[dict[str, Any]], *, by_head: bool, order: str = "qkv") -> Run:
    tensors: dict[str, Any] = {}
    for at, layer in enumerate(layers):
        weight = np.concatenate([layer[part] for part in order])
        if by_head:
            parts = weight.reshape(3, HEADS, SIZE // HEADS, SIZE)
            weight = parts.transpose(1, 0, 2, 3).reshape(3 * SIZE, SIZE)
        site = f"trunk.{at}.core.one"
        tensors[f"{site}/input/0"] = layer["x"]
        tensors[f"{site}/param/weight"] = weight
        tensors[site] = layer["x"] @ weight.T
        tensors[f"trunk.{at}.scale"] = layer["x"]
    classes = {s: "Linear" if "core" in s else "LayerNorm" for s in _sites(tensors)}
    return run_of(tensors, classes=classes)


def _sites(tensors: dict[str, Any]) -> set[str]:
    return {name.partition("/")[0] for name in tensors}


@pytest.mark.parametrize("by_head", [False, True])
def test_the_cut_that_agrees_with_all_three_is_taken(by_head: bool) -> None:
    layers = projected()
    ours, theirs = split_run(layers), fused_run(layers, by_head=by_head)
    plan = driftline.align(ours, theirs)
    table = driftline.compare(ours, theirs, plan=plan)
    assert table.verdict == "pass", table.finding
    assert sum(row.compared for row in table.rows) == 2 * 3 * 3 + 2
    assert any("head by head (4 heads)" in note for note in plan.notes) == by_head
    assert any("select" in str(pair.candidate_recipe) for pair in plan.pairs) == by_head
    assert driftline.compare(theirs, ours).verdict == "pass"


@pytest.mark.parametrize("by_head", [False, True])
def test_a_fault_in_one_part_is_found_and_changes_no_cut(by_head: bool) -> None:
    layers = projected()
    ours, theirs = split_run(layers, wrong="k"), fused_run(layers, by_head=by_head)
    table = driftline.compare(ours, theirs)
    assert table.verdict == "fail"
    if not by_head:
        assert {row.key.site[-1] for row in table.failing} == {"k"}


@pytest.mark.parametrize("by_head", [False, True])
def test_swapped_parts_are_a_fault_and_no_other_cut(by_head: bool) -> None:
    layers = projected()
    theirs = fused_run(layers, by_head=by_head, order="kqv")
    table = driftline.compare(split_run(layers), theirs)
    assert table.verdict == "fail"


def grouped_run(layers: list[dict[str, Any]], order: str = "qkv") -> Run:
    """Two groups, each with its heads of q and then the one head of k and of v they share."""
    tensors: dict[str, Any] = {}
    for at, layer in enumerate(layers):
        pieces = [np.split(layer[part], 2) for part in order]
        weight = np.concatenate([piece[group] for group in range(2) for piece in pieces])
        site = f"trunk.{at}.core.one"
        tensors[f"{site}/input/0"] = layer["x"]
        tensors[f"{site}/param/weight"] = weight
        tensors[site] = layer["x"] @ weight.T
        tensors[f"trunk.{at}.scale"] = layer["x"]
    classes = {s: "Linear" if "core" in s else "LayerNorm" for s in _sites(tensors)}
    return run_of(tensors, classes=classes)


def test_heads_that_share_keys_lie_group_by_group() -> None:
    layers = projected()
    for layer in layers:
        layer["k"], layer["v"] = layer["k"][:16], layer["v"][:16]
    ours, theirs = split_run(layers), grouped_run(layers)
    plan = driftline.align(ours, theirs)
    table = driftline.compare(ours, theirs, plan=plan)
    assert table.verdict == "pass", table.finding
    assert sum(row.compared for row in table.rows) == 2 * 3 * 3 + 2
    assert any("group by group (2 groups)" in note for note in plan.notes)
    assert driftline.compare(theirs, ours).verdict == "pass"
    assert driftline.compare(ours, grouped_run(layers, order="qvk")).verdict == "fail"
    assert driftline.compare(split_run(layers, wrong="k"), theirs).verdict == "fail"
