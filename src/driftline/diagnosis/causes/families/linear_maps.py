"""What an output is made of: the weights of a linear map, and sums over the neighbours in a graph.

A map is solved for from input and output; two maps that have a simple relation tell the mistake.
Edges are two lists of ends that a site was given; a sum over neighbours has a few ways to weigh
them, and both sides are read as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.comparison.verdict.sites import FINE
from driftline.diagnosis.causes.case import F64, Case, Clue, Codes
from driftline.diagnosis.causes.gates import Member, compared
from driftline.diagnosis.causes.linear_solve import solve

_GROUPS = (8, 16, 32, 64, 128, 256)
_WIDEST, _MOST_ROWS = 512, 4096
_CLEAR, _ALIKE = 0.9, 0.01
_SPARE_ROWS = 12
"""Rows beyond the columns: a map of as many rows as columns fits anything."""
_LEFT = 1e-6


Places = npt.NDArray[np.int64]


class _Maps(NamedTuple):
    """Both sides' weights, [inputs, outputs], and rows of the input that they are of."""

    inputs: F64
    right: F64
    wrong: F64


def weight(case: Case) -> Clue | None:
    """A linear map whose weights have factors by input or by group, or a part of low rank more."""
    if case.ratio < 4.0 or case.r.ndim < 2 or not case.finite.all():
        return None
    for x in case.inputs.values():
        maps = _maps(case, x)
        if maps is None:
            continue
        clues = [clue for clue in _relations(case, maps) if clue.score >= _CLEAR]
        # The first has the fewest numbers.
        if clues:
            return clues[0]
    return None


def _maps(case: Case, x: F64) -> _Maps | None:
    width = x.shape[-1] if x.ndim else 0
    if x.shape[:-1] != case.r.shape[:-1] or not 4 <= width <= _WIDEST or not np.isfinite(x).all():
        return None
    inputs = case.rows(x)
    spare = _SPARE_ROWS if case.noise < FINE else width
    if len(inputs) < width + spare:
        return None
    every = max(1, len(inputs) // _MOST_ROWS)
    wide = np.hstack([inputs, np.ones((len(inputs), 1))])[::every]
    weights: list[F64] = []
    for side in (case.r, case.r + case.e):
        rows = case.rows(side)[::every]
        solution = solve(wide, rows)
        left, size = float(np.sum((rows - wide @ solution) ** 2)), float(np.sum(rows * rows))
        if left > (_LEFT + (3.0 * case.noise) ** 2) * size:
            return None
        weights.append(solution[:-1])
    return _Maps(inputs, weights[0], weights[1])


def _relations(case: Case, maps: _Maps) -> Iterator[Clue]:
    inputs, right, wrong = maps

    def score(other: F64, numbers: int) -> float:
        """What other weights explain; so many fitted numbers explain some of anything."""
        made = case.r + (inputs @ (other - right)).reshape(case.r.shape)
        rest = float(np.sum((other - wrong) ** 2)) / max(
            float(np.sum((wrong - right) ** 2)), 1e-300
        )
        spare = max(1.0 - numbers / right.size, 0.1)
        return min(case.explained(made), 1.0 - rest / spare, 0.98)

    order = _order_of_rows(right, wrong)
    if order is not None:
        moved = int(np.count_nonzero(order != np.arange(len(order))))
        what = f"it is the product with weights of which {moved} inputs have those of other ones"
        yield Clue("permutation", score(right[order], 0), what, "weight")
    for size in (1, *_GROUPS):
        groups, rest = divmod(len(right), size)
        if rest or groups < 2:
            continue
        a, b = (x.reshape(groups, size, -1) for x in (right, wrong))
        # One factor for a group of inputs, then one for every output of it.
        for axes, whose in (((1, 2), ""), ((1,), " of every output")):
            count = groups * (right.shape[1] if whose else 1)
            if size == 1 and whose:
                continue
            factors = np.sum(a * b, axis=axes, keepdims=True)
            factors = factors / np.maximum(np.sum(a * a, axis=axes, keepdims=True), 1e-300)
            low, high = float(factors.min()), float(factors.max())
            if high - low <= _ALIKE * max(abs(low), abs(high)):
                continue  # one factor for all of it is another rule's
            which = "each input" if size == 1 else f"each group of {size} inputs{whose}"
            what = (
                f"it is the product with weights that have a factor of their own for {which} "
                f"({low:.4g} to {high:.4g})"
            )
            yield Clue("scale", score((a * factors).reshape(right.shape), count), what, "weight")
    if min(right.shape) >= 16:
        left, sizes, back = np.linalg.svd(wrong - right, full_matrices=False)
        most = min(right.shape) // 4
        energy = np.cumsum(sizes**2) / max(float(np.sum(sizes**2)), 1e-300)
        rank = int(np.argmax(energy >= 0.99)) + 1
        if rank <= most:
            other = right + (left[:, :rank] * sizes[:rank]) @ back[:rank]
            what = (
                f"it is the product with weights that differ by a matrix of rank {rank}, as an "
                "adapter is that was left out, added twice or merged otherwise"
            )
            apart = (wrong - right) ** 2
            # An adapter moves many weights; what moves a single one is damage.
            row, column = divmod(int(np.argmax(apart)), apart.shape[1])
            if float(apart[row, column]) >= _CLEAR * float(apart.sum()):
                what = (
                    "it is the product with weights of which one is another, that of input "
                    f"{row} for output {column}"
                )
            yield Clue("weights", score(other, rank * sum(right.shape)), what, "rank")


def _order_of_rows(right: F64, wrong: F64) -> Places | None:
    """Which input's weights each input has, if all are there; None if they are not, or in order."""
    apart = np.sum(right**2, axis=1)[:, None] - 2.0 * (right @ wrong.T)
    order = np.argmin(apart, axis=0).astype(np.int64)
    places = np.arange(len(right))
    is_order = np.array_equal(np.sort(order), places) and not np.array_equal(order, places)
    return order if is_order else None


# Sums over neighbours.


_MOST_NODES, _MOST_EDGES, _MOST_TENSORS = 1024, 1 << 16, 4


def neighbours(case: Case) -> Clue | None:
    """A sum over the neighbours in a graph that weighs them, or counts a node itself, otherwise."""
    if case.ratio < 4.0 or case.r.ndim < 2 or not 4 <= len(case.r) <= _MOST_NODES:
        return None
    for ends in _edges(case.codes, len(case.r)):
        for rights, wrongs in case.sources:
            members = (_sums(tensors, case.r.shape, ends) for tensors in (rights, wrongs))
            clue = compared(case, (case.r, case.r + case.e), *members)
            if clue is not None:
                return clue
            for name in list(rights)[-_MOST_TENSORS:]:
                if name in wrongs and wrongs[name].shape == rights[name].shape:
                    clue = _weighed(case, name, (rights[name], wrongs[name]), ends)
                    if clue is not None:
                        return clue
    return None


def _edges(codes: Mapping[str, Codes], nodes: int) -> Iterator[tuple[Places, Places]]:
    ends = [x for x in codes.values() if x.ndim == 1]
    for x in codes.values():
        if x.ndim == 2 and len(x) == 2:
            ends += [x[0], x[1]]
    for source, target in itertools.combinations(ends, 2):
        is_one = source.shape == target.shape and 1 < source.size <= _MOST_EDGES
        if is_one and all(x.min() >= 0 and x.max() < nodes for x in (source, target)):
            yield source, target


def _sums(
    tensors: Mapping[str, F64], shape: tuple[int, ...], ends: tuple[Places, Places]
) -> Iterator[Member]:
    nodes = shape[0]
    ways: list[tuple[dict[str, str], F64]] = []
    for number, (source, target) in enumerate((ends, ends[::-1])):
        for loops in ("leaves itself out", "counts itself once more"):
            links = np.zeros((nodes, nodes))
            np.add.at(links, (target, source), 1.0)
            if loops != "leaves itself out":
                links += np.eye(nodes)
            takes, gives = (np.maximum(links.sum(axis=axis, keepdims=True), 1.0) for axis in (1, 0))
            for weighed, matrix in {
                "with a weight of one": links,
                "divided by how many a node takes from": links / takes,
                "divided by to how many a node gives": links / gives,
                "divided by the roots of both ends' counts": links / np.sqrt(takes * takes.T),
                "divided by the roots of what each takes and gives": links / np.sqrt(takes * gives),
            }.items():
                turned = "along its edges" if number == 0 else "against its edges"
                settings = {"scale": weighed, "mask": f"where a node {loops}", "transpose": turned}
                ways.append((settings, matrix))
    for name in list(tensors)[-_MOST_TENSORS:]:
        x = tensors[name]
        if x.shape != shape or not np.isfinite(x).all():
            continue
        flat = x.reshape(nodes, -1)
        for settings, matrix in ways:
            words = {**settings, "scale": f"sums of '{name}' {settings['scale']},"}
            yield Member(words, (matrix @ flat).reshape(shape))


def _weighed(
    case: Case, name: str, tensors: tuple[F64, F64], ends: tuple[Places, Places]
) -> Clue | None:
    """Shares of neighbours that add up to one at one end of the edges, and at the other."""
    if tensors[0].shape != case.r.shape or case.r.ndim != 2:
        return None
    for source, target in (ends, ends[::-1]):
        shares: list[F64] = []
        for made, x in zip((case.r, case.r + case.e), tensors, strict=True):
            solved = _shares(made, x, source, target, case.noise)
            if solved is None:
                break
            shares.append(solved)
        if len(shares) < 2:
            continue
        at_target, at_source = (
            [_add_up(matrix.sum(axis=axis), case.noise) for matrix in shares] for axis in (1, 0)
        )
        if at_target == [True, False] or at_source == [True, False]:
            where = "to which" if at_target[0] else "from which"
            also = ""
            if (at_source if at_target[0] else at_target)[1]:
                also = " but over the nodes at the other end of its edges"
            what = (
                f"shares of '{name}' do not add up to one over the nodes {where} a node has "
                f"edges{also}, as the reference's do"
            )
            return Clue("scale", 0.95, what, "shares")
    return None


def _shares(made: F64, x: F64, source: Places, target: Places, noise: float) -> F64 | None:
    """What every node takes of its neighbours, [nodes, nodes]; None if it is no such sum."""
    shares = np.zeros((len(made), len(made)))
    left = 0.0
    for node in range(len(made)):
        near = np.unique(source[target == node])
        if len(near) > made.shape[1] - 4:
            return None
        if len(near):
            shares[node, near] = solve(x[near].T, made[node])
        rest = made[node] - shares[node] @ x
        left += float(rest @ rest)
    return shares if left <= (1e-8 + (3.0 * noise) ** 2) * float(np.sum(made * made)) else None


def _add_up(sums: F64, noise: float) -> bool:
    sums = sums[np.abs(sums) > 1e-6]
    apart = np.abs(sums - 1.0)
    return len(sums) > 3 and float(np.quantile(apart, 0.9)) < 0.02 + 10.0 * noise
