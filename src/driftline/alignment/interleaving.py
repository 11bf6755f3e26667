"""How the q, k and v of a fused projection lie: one after the other, or head by head.

Classes that are known say it. Of others the shapes allow both, and values break that tie, but only
if one cut agrees with all three parts and the other with none: a fault is no reason to cut anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.alignment.calls import Call, main_tensor
from driftline.alignment.sides import Gathered, Replicas, SeenRun, origins_of
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.record import Record
from driftline.runs.run import Run

_AGREE, _APART = 0.05, 0.5
_LARGEST = 1 << 22
"""Elements that are read of one tensor: whole rows from its beginning."""
_TRIES = 8
"""So many projections of a class are looked at before the usual cut is taken for all of them."""
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128)

F64 = npt.NDArray[np.float64]


class Interleaving:
    """Numbers of heads, by the class around a fused projection and its size."""

    def __init__(self, reference: Run, candidate: Run, notes: list[str]) -> None:
        self._runs = (reference, candidate)
        self._known: dict[tuple[str, int], int | None] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self._notes = notes

    def heads(
        self, fused: Call, members: Sequence[Call], members_are_ours: bool, holder: str
    ) -> int | None:
        """The number of heads if the parts lie head by head; None if they do not, for all we know.

        Args:
            fused: The one site.
            members: q, k and v; k and v equally large, q as large or a multiple of that.
            members_are_ours: Whether they are of the reference.
            holder: Class of the module around the fused site.
        """
        about = (holder, fused.features)
        if about in self._known:
            return self._known[about]
        self._tries[about] = self._tries.get(about, 0) + 1
        if self._tries[about] > _TRIES:
            return None
        here, there = self._runs if members_are_ours else self._runs[::-1]
        whole = rows_of(there, main_tensor(fused.records, "output"))
        parts = [rows_of(here, main_tensor(member.records, "output")) for member in members]
        if whole is None or any(part is None for part in parts):
            return None
        found = _cut(whole, [part for part in parts if part is not None])
        if found is None:
            return None
        self._known[about] = found or None
        if found:
            where = f"of {holder}" if holder else f"of '{fused.site}'"
            output = main_tensor(fused.records, "output")
            origin = None if output is None else origins_of(there).get(output.key)
            ranks = len(origin.recipe.records) if isinstance(origin, Gathered) else 0
            shared = members[0].features != members[1].features  # several queries share a key
            what = "rank" if ranks == found else "group" if shared else "head"
            self._notes.append(
                f"the fused q, k and v {where} lie {what} by {what} ({found} {what}s): so cut all "
                "three agree, one after the other none does"
            )
        return self._known[about]


def _cut(whole: F64, parts: Sequence[F64]) -> int | None:
    """0 for one after the other, a number of heads for head by head, None if values do not say."""
    sizes = [part.shape[-1] for part in parts]
    rows = min(len(whole), *(len(part) for part in parts))
    if not rows or whole.shape[-1] != sum(sizes):
        return None
    whole, parts = whole[:rows], [part[:rows] for part in parts]
    plain = [
        share_off(part_of, part)
        for part_of, part in zip(_taken_apart(whole, sizes, 1), parts, strict=True)
    ]
    if max(plain) < _AGREE:
        return 0
    if min(plain) < _APART:
        return None  # some of it agrees: a fault in the rest, and no other cut
    fitting: list[int] = []
    for heads in _HEADS:
        if heads > 1 and not any(size % heads for size in sizes):
            cuts = zip(_taken_apart(whole, sizes, heads), parts, strict=True)
            if all(share_off(part_of, part) < _AGREE for part_of, part in cuts):
                fitting.append(heads)
    return fitting[0] if len(fitting) == 1 else None


def _taken_apart(whole: F64, sizes: Sequence[int], groups: int) -> list[F64]:
    """The parts of a matrix that has one piece of each in every group of columns."""
    split = whole.reshape(len(whole), groups, -1)
    ends = [0, *itertools.accumulate(size // groups for size in sizes)]
    return [split[:, :, a:b].reshape(len(whole), -1) for a, b in itertools.pairwise(ends)]


def share_off(ours: F64, theirs: F64) -> float:
    """How far off one matrix is, as a share of the other."""
    scale = float(np.linalg.norm(theirs))
    return float(np.linalg.norm(ours - theirs)) / scale if scale else math.inf


def rows_of(run: Run, record: Record | None) -> F64 | None:
    """The first rows of a tensor as numbers; of one that is joined from ranks, theirs."""
    if record is None:
        return None
    origin = origins_of(run).get(record.key)
    if isinstance(origin, Gathered):
        step = origin.recipe.steps[0]
        parts = [_stored(run, part) for part in origin.recipe.records]
        if len(origin.recipe.steps) > 1 or any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        if step.kind != "concat" or step.axis != len(record.shape) - 1:
            return None
        return np.concatenate([part[: min(map(len, known))] for part in known], axis=1)
    if isinstance(origin, Replicas):
        return _stored(run, origin.records[0])
    return _stored(run, origin if isinstance(origin, Record) else record)


def _stored(run: Run, record: Record) -> F64 | None:
    if record.kept != "full" or len(record.shape) < 2:
        return None
    width = record.shape[-1]
    dtype = DTYPES.get(record.dtype)
    if dtype is None or not dtype.is_floating or dtype.bits < 16 or not 0 < width <= _LARGEST:
        return None
    whole = run.whole if isinstance(run, SeenRun) else run
    try:
        raw: Any = whole.raw(record).reshape(-1, width)[: _LARGEST // width]
        numbers = to_float64(np.ascontiguousarray(raw).reshape(-1), dtype)
        return numbers.astype(np.float64, copy=False).reshape(-1, width)
    except (DriftlineError, OSError, ValueError):
        return None  # comparing it will say why
