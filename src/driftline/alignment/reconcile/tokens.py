"""Tokens: padded against unpadded sequences, packed ones, and batches of different size.

A pair is cut only where the inputs of its step explain the difference: a site that alone has
another shape is a finding. On which side the pads are is read from the captured attention_mask or
from equal token ids; where neither is there, nothing is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.alignment.normalise.steps import counter_of, counters_alike, is_ids, read_ids
from driftline.alignment.normalise.view import shapes_of, with_steps
from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Step
from driftline.runs.records import Record
from driftline.runs.run import Run

Shape = tuple[int, ...]
Mask: TypeAlias = "npt.NDArray[np.bool_]"
MASK_NAME = "attention_mask"


class Batch(NamedTuple):
    """What one side worked on in one step.

    Attributes:
        rows: Sequences.
        tokens: Positions of each.
        flat: Whether that is not known to be more than one list of tokens.
        ids: The token ids, [rows, tokens], if they were captured.
        mask: True for what is no pad, [rows, tokens], if it was captured.
        cached: The same with the tokens of earlier steps in front: what keys and values are of.
    """

    rows: int
    tokens: int
    flat: bool = False
    ids: npt.NDArray[np.int64] | None = None
    mask: Mask | None = None
    cached: Mask | None = None


def batch_of(run: Run, records: Iterable[Record]) -> Batch | None:
    """What one step (of one process) of a run worked on, by its inputs.

    Args:
        run: Where the values are.
        records: Those of that step, in execution order.
    """
    first: Record | None = None
    ids: Record | None = None
    mask: Record | None = None
    for record in records:
        if is_mask(record):
            mask = mask or record
        elif ids is None and is_ids(record):
            ids = record
        elif first is None and record.key.port in ("input", "output") and len(record.shape) >= 2:
            first = record
    if first is not None and first.key.port == "output" and len(first.shape) == 2:
        first = None  # what comes first is what the step was given; a mere matrix says less
    known = None if ids is None else read_ids(run, ids)
    found = None if mask is None else read_mask(run, mask)
    shape: tuple[int, ...]
    if ids is not None:
        shape = ids.shape if len(ids.shape) == 2 else (1, math.prod(ids.shape))
        flat = len(ids.shape) == 1
        known = None if known is None else known.reshape(shape)
    elif found is not None:
        shape, flat = found.shape, False
    elif first is not None and run.ordered:
        flat = len(first.shape) == 2
        shape = (1, *first.shape[:1]) if flat else first.shape[:2]
    else:
        return None
    rows, tokens = int(shape[0]), int(shape[1])
    cached = found
    if found is not None:  # of a later token: the mask covers what is in the cache, too
        found = found[:, -tokens:] if tokens else found
        found = found if found.shape == (rows, tokens) else None
    return Batch(rows, tokens, flat, known, found, cached)


def is_mask(record: Record) -> bool:
    """Whether a tensor is the model's own [rows, tokens] attention mask."""
    names = (record.key.slot, record.alias, record.key.site.rpartition(".")[2])
    return MASK_NAME in names and len(record.shape) == 2


def read_mask(run: Run, record: Record) -> Mask | None:
    """A captured mask; None when it was not kept."""
    if record.dtype not in ("int64", "int32", "int8", "uint8", "bool", "float32", "float16"):
        return None
    if record.kept != "full" or run.lost(record) or math.prod(record.shape) > 1 << 22:
        return None
    raw: npt.NDArray[Any] = run.raw(record)
    return raw.reshape(record.shape) != 0


class Common(NamedTuple):
    """What two batches share, and how to cut each side to it.

    Attributes:
        rows: Sequences both have: the first so many.
        ours: First and last-plus-one token of the reference to keep.
        theirs: The same for the candidate.
        packed: Which side is a plain list of the other's unmasked tokens; empty for none.
        trouble: Why tokens cannot be set against each other although they should.
        said: What is done, in words.
    """

    rows: int
    ours: tuple[int, int]
    theirs: tuple[int, int]
    packed: str = ""
    trouble: str = ""
    said: str = ""


def common_part(ours: Batch, theirs: Batch) -> Common | None:
    """How two steps of different size are cut to what both have; None when nothing is known."""
    rows = min(ours.rows, theirs.rows)
    whole = Common(rows, (0, ours.tokens), (0, theirs.tokens))
    if ours.flat != theirs.flat:
        flat, full = (ours, theirs) if ours.flat else (theirs, ours)
        if flat.tokens == full.rows * full.tokens:
            return whole
        if full.mask is not None and flat.tokens == int(full.mask.sum()):
            side = "reference" if ours.flat else "candidate"
            said = f"the {side} has the {flat.tokens} tokens that the other side's mask keeps"
            return whole._replace(packed=side, said=said)
    if ours.tokens == theirs.tokens:
        first = "the first row" if rows == 1 else f"the first {rows} rows"
        said = "" if ours.rows == theirs.rows else f"{first} of the larger batch"
        return whole._replace(said=said)
    if (ours.rows, ours.tokens) == (theirs.tokens, theirs.rows) and not ours.flat | theirs.flat:
        return whole._replace(
            trouble="rows and tokens look swapped; a plan with a transpose step decides that"
        )
    longer, shorter = (ours, theirs) if ours.tokens > theirs.tokens else (theirs, ours)
    kept, why = _kept(longer, shorter, rows)
    if kept is None:
        return whole._replace(trouble=why) if why else None
    full = (0, shorter.tokens)
    cut = (kept, full) if longer is ours else (full, kept)
    side = "reference" if longer is ours else "candidate"
    said = f"tokens {kept[0]}:{kept[1]} of {longer.tokens} in the {side}, {why}"
    return Common(rows, *cut, said=said)


def _kept(longer: Batch, shorter: Batch, rows: int) -> tuple[tuple[int, int] | None, str]:
    surplus = longer.tokens - shorter.tokens
    right, left = (0, shorter.tokens), (surplus, longer.tokens)
    if longer.mask is not None:
        mask = longer.mask[:rows]
        if not mask[:, shorter.tokens :].any():
            return right, "the rest is pads on the right by its attention_mask"
        if not mask[:, :surplus].any():
            return left, "the rest is pads on the left by its attention_mask"
        return None, f"its attention_mask keeps more than {shorter.tokens} tokens"
    if longer.ids is not None and shorter.ids is not None:
        mine, its = longer.ids[:rows], shorter.ids[:rows]
        starts = np.array_equal(mine[:, : shorter.tokens], its)
        ends = np.array_equal(mine[:, surplus:], its)
        if starts and not ends:
            return right, "the token ids agree from the first on"
        if ends and not starts:
            return left, "the token ids agree up to the last"
        if starts and ends:
            return right, "the token ids agree from the first on (and up to the last)"
        return None, "their token ids are not part of each other"
    if not shorter.tokens:
        return None, ""
    if longer.flat and shorter.flat and longer.tokens % shorter.tokens == 0:
        times = longer.tokens // shorter.tokens
        return right, f"taken for a batch {times} times as large"
    if longer.flat and longer.ids is None:
        return None, ""
    return None, "neither an attention_mask nor token ids say on which side the pads are"


def cut(pair: Pair, ours: Batch, theirs: Batch, common: Common) -> Pair | None:
    """The pair with both sides cut to what they share; None where that is not the difference."""
    here, there = shapes_of(pair)
    if common.packed:
        return _unpacked(pair, ours, theirs, common)
    here, ours_first = _unfolded(here, there, ours)
    there, theirs_first = _unfolded(there, here, theirs)
    if ours_first is None and len(here) == len(there):
        here, ours_first = _unfolded_both(here, there, ours, theirs)
        if ours_first is not None:
            there, theirs_first = _unfolded_both(there, here, theirs, None)
    if len(here) != len(there):
        return None
    left: list[Step] = [] if ours_first is None else [ours_first]
    right: list[Step] = [] if theirs_first is None else [theirs_first]
    shape = list(here)
    for axis, (a, b) in enumerate(zip(here, there, strict=True)):
        if a == b:
            continue
        if axis == 0 and (a, b) == (ours.rows, theirs.rows):
            kept = ((0, common.rows), (0, common.rows))
        elif (a, b) == (ours.tokens, theirs.tokens) and not common.trouble:
            kept = (common.ours, common.theirs)
        elif (found := _cache(ours, theirs, a, b, common.rows)) is not None:
            kept = found
        else:
            return None
        for steps, (begin, end), size in ((left, kept[0], a), (right, kept[1], b)):
            if (begin, end) != (0, size):
                steps.append(Step("trim", axis, begin, end))
        shape[axis] = kept[0][1] - kept[0][0]
    if left:
        pair = with_steps(pair, "reference", *left, shape=tuple(shape))
    if right:
        pair = with_steps(pair, "candidate", *right, shape=tuple(shape))
    return pair


def _cache(
    ours: Batch, theirs: Batch, a: int, b: int, rows: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """An axis of keys: what the longer side's mask keeps of it, if that is as many as the other."""
    longer, size, other = (ours, a, b) if a > b else (theirs, b, a)
    if longer.cached is None or longer.cached.shape[1] < size:
        return None
    mask = longer.cached[:rows, :size]
    kept = np.flatnonzero(mask.any(axis=0))
    if kept.size != other or not other or int(kept[-1]) - int(kept[0]) + 1 != other:
        return None
    cut, whole = (int(kept[0]), int(kept[-1]) + 1), (0, other)
    return (cut, whole) if a > b else (whole, cut)


def _unfolded(shape: Shape, other: Shape, batch: Batch) -> tuple[Shape, Step | None]:
    """[rows * tokens, ...] as [rows, tokens, ...] where the other side has the two apart."""
    if len(shape) + 1 == len(other) and shape and shape[0] == batch.rows * batch.tokens:
        unfolded = (batch.rows, batch.tokens, *shape[1:])
        return unfolded, Step("reshape", numbers=unfolded)
    return shape, None


def _unfolded_both(
    shape: Shape, other: Shape, batch: Batch, others: Batch | None
) -> tuple[Shape, Step | None]:
    """Two lists of tokens of different length, both of several sequences: taken apart first."""
    folded = shape and shape[0] == batch.rows * batch.tokens and not batch.flat
    if others is not None:
        folded = folded and other[0] == others.rows * others.tokens and not others.flat
        folded = folded and shape[0] != other[0] and (batch.rows, others.rows) != (1, 1)
        folded = folded and shape[:2] != (batch.rows, batch.tokens)
    if not folded:
        return shape, None
    unfolded = (batch.rows, batch.tokens, *shape[1:])
    return unfolded, Step("reshape", numbers=unfolded)


def _unpacked(pair: Pair, ours: Batch, theirs: Batch, common: Common) -> Pair | None:
    """The padded side without its pads, as the list of tokens that the other side is."""
    here, there = shapes_of(pair)
    side = "candidate" if common.packed == "reference" else "reference"
    padded, full = (here, ours) if side == "reference" else (there, theirs)
    packed = there if side == "reference" else here
    if full.mask is None or not packed or packed[0] != int(full.mask.sum()):
        return None
    steps: list[Step] = []
    rest = padded[2:] if padded[:2] == (full.rows, full.tokens) else padded[1:]
    if padded[:2] == (full.rows, full.tokens):
        steps.append(Step("reshape", numbers=(full.rows * full.tokens, *rest)))
    elif not padded or padded[0] != full.rows * full.tokens:
        return None
    if rest != packed[1:]:
        return None
    positions = tuple(int(at) for at in np.flatnonzero(full.mask.ravel()))
    steps.append(Step("select", 0, numbers=positions))
    return with_steps(pair, side, *steps, shape=packed)


# What each step of two runs worked on, looked up once per step.


Place = tuple[int, int, int, str]
"""Step, rank, process, and the counter that the step is one of."""


class TokenBook:
    """Batches of both runs by step and rank, and what those of a pair have in common."""

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._records: list[dict[Place, list[Record]] | None] = [None, None]
        self._counters: list[dict[str, str]] = [{}, {}]
        self._known: dict[tuple[int, Place], Batch | None] = {}
        self._common: dict[tuple[Place, Place], Common | None] = {}
        self.notes: list[str] = []

    def cut(self, pair: Pair) -> tuple[Pair | None, str]:
        """The pair cut to the tokens both sides have; else None and perhaps a reason."""
        ours, theirs = self.batches(pair)
        common = self.common(pair)
        if ours is None or theirs is None or common is None:
            return None, ""
        return cut(pair, ours, theirs, common), common.trouble

    def batches(self, pair: Pair) -> tuple[Batch | None, Batch | None]:
        """What both sides of a pair worked on."""
        ours, theirs = self._places(pair)
        return self._batch(0, ours), self._batch(1, theirs)

    def common(self, pair: Pair) -> Common | None:
        """What both sides of a pair share; None when that is not known."""
        ours, theirs = self.batches(pair)
        if ours is None or theirs is None:
            return None
        places = self._places(pair)
        if places not in self._common:
            self._common[places] = self._compared(places, ours, theirs)
        return self._common[places]

    def _places(self, pair: Pair) -> tuple[Place, Place]:
        return self._place(0, pair.reference), self._place(1, pair.candidate)

    def _place(self, side: int, record: Record) -> Place:
        steps = self._records[side]
        if steps is None:
            steps = self._records[side] = {}
            self._counters[side] = counters_alike(self._runs[side])
            for each in self._runs[side].records:
                steps.setdefault(self._place(side, each), []).append(each)
        key = record.key
        counter = counter_of(key.site)
        return key.step, key.rank, key.process, self._counters[side].get(counter, counter)

    def _batch(self, side: int, place: Place) -> Batch | None:
        if (side, place) not in self._known:
            steps = self._records[side] or {}
            self._known[side, place] = batch_of(self._runs[side], steps.get(place, ()))
        return self._known[side, place]

    def _compared(self, places: tuple[Place, Place], ours: Batch, theirs: Batch) -> Common | None:
        if (ours.rows, ours.tokens) == (theirs.rows, theirs.tokens):
            whole = (0, ours.tokens)
            return Common(ours.rows, whole, whole)
        common = common_part(ours, theirs)
        if common is None:
            return None
        step = places[0][0]
        sizes = f"{_size(ours)} tokens in the reference, {_size(theirs)} in the candidate"
        if common.trouble:
            self.notes.append(f"step {step}: {sizes}; {common.trouble}")
        elif common.said:
            self.notes.append(f"step {step}: {sizes}; compared: {common.said}")
        return common


def _size(batch: Batch) -> str:
    return f"{batch.tokens}" if batch.flat else f"{batch.rows}x{batch.tokens}"
