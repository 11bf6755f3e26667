"""Tokens: padded against unpadded sequences, packed ones, and batches of different sizes.

A pair is cut only if the inputs of its step explain the difference; a single site with another
shape is a finding. The side of the padding is read from the captured attention_mask or from equal
token ids; without either, nothing is cut. `StepBatches` finds the batch of each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.alignment.normalise.steps import counter_groups, counter_of, is_ids, read_ids
from driftline.alignment.normalise.view import shapes_of, with_steps
from driftline.alignment.plan import LeftOut, Pair
from driftline.alignment.recipe import Step
from driftline.alignment.sites.site_graph import ROOTS
from driftline.runs.records import Record
from driftline.runs.run import Run

Shape = tuple[int, ...]
Mask: TypeAlias = "npt.NDArray[np.bool_]"
MASK_NAME = "attention_mask"
_MOST_STEPS = 8
_MOST_ELEMENTS = 1 << 26
"""Largest number of elements of a model's input that are read to check for repeated rows."""


class Batch(NamedTuple):
    """The batch of one side in one step.

    Attributes:
        rows: Number of sequences.
        tokens: Positions of each sequence.
        flat: Whether only a list of tokens is known, which may hold several sequences.
        ids: The token ids, [rows, tokens], if they were captured.
        mask: False for padding, [rows, tokens], if it was captured.
        cached: The same mask with the tokens of earlier steps in front, as keys and values have
            them.
    """

    rows: int
    tokens: int
    flat: bool = False
    ids: npt.NDArray[np.int64] | None = None
    mask: Mask | None = None
    cached: Mask | None = None


class _StepInputs(NamedTuple):
    """The tensors of one step that show its batch.

    Attributes:
        first: The first input, or an output with a token axis.
        ids: The token ids.
        mask: The attention mask.
    """

    first: Record | None
    ids: Record | None
    mask: Record | None


def batch_of(run: Run, records: Iterable[Record]) -> Batch | None:
    """The batch of one step of one process, by its inputs; None if they do not show it.

    Args:
        run: The run that holds the values.
        records: The records of that step, in execution order.
    """
    inputs = _step_inputs(records)
    ids = None if inputs.ids is None else read_ids(run, inputs.ids)
    mask = None if inputs.mask is None else read_mask(run, inputs.mask)
    shape: Shape
    # Ids are exact; a mask may also cover earlier tokens; a first tensor may have other axes.
    if inputs.ids is not None:
        flat = len(inputs.ids.shape) == 1
        shape = (1, math.prod(inputs.ids.shape)) if flat else inputs.ids.shape
        ids = None if ids is None else ids.reshape(shape)
    elif mask is not None:
        shape, flat = mask.shape, False
    elif inputs.first is not None and run.ordered:
        flat = len(inputs.first.shape) == 2
        shape = (1, *inputs.first.shape[:1]) if flat else inputs.first.shape[:2]
    else:
        return None
    rows, tokens = int(shape[0]), int(shape[1])
    cached = mask
    if mask is not None:
        # In a decode step, the mask also covers the tokens in the cache, which come first.
        mask = mask[:, -tokens:] if tokens else mask
        mask = mask if mask.shape == (rows, tokens) else None
    return Batch(rows, tokens, flat, ids, mask, cached)


def _step_inputs(records: Iterable[Record]) -> _StepInputs:
    """The first mask, the first token ids and the first other tensor of a step."""
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
    # An output shows the step's tokens only if it has an axis for them; a matrix may be anything.
    if first is not None and first.key.port == "output" and len(first.shape) == 2:
        first = None
    return _StepInputs(first, ids, mask)


def is_mask(record: Record) -> bool:
    """Whether a tensor is the model's own [rows, tokens] attention mask."""
    names = (record.key.slot, record.alias, record.key.site.rpartition(".")[2])
    return MASK_NAME in names and len(record.shape) == 2


def read_mask(run: Run, record: Record) -> Mask | None:
    """A captured mask; None if its values were not kept."""
    if record.dtype not in ("int64", "int32", "int8", "uint8", "bool", "float32", "float16"):
        return None
    # Limited, because a mask becomes positions in the plan.
    if record.kept != "full" or run.lost(record) or math.prod(record.shape) > 1 << 22:
        return None
    raw: npt.NDArray[Any] = run.raw(record)
    return raw.reshape(record.shape) != 0


class Common(NamedTuple):
    """The common part of two batches, and how each side is cut to it.

    Attributes:
        rows: Number of sequences that both have, counted from the first.
        reference: First and last-plus-one token of the reference to keep.
        candidate: The same for the candidate.
        packed: The side that is a plain list of the other's unmasked tokens; empty if there is
            none.
        trouble: Why tokens that should be compared with each other cannot be.
        note: The cut, in words.
        left: For the reference and the candidate, what has no partner and is not padding, in words.
        repeated: The rows of the smaller side, as often as the larger side has them, in its order;
            empty if rows are cut instead.
    """

    rows: int
    reference: tuple[int, int]
    candidate: tuple[int, int]
    packed: str = ""
    trouble: str = ""
    note: str = ""
    left: tuple[str, str] = ("", "")
    repeated: tuple[int, ...] = ()


def _with_rows_of_other(reference: Batch, candidate: Batch) -> tuple[Batch, Batch]:
    """Both batches; a plain list of all tokens of the other side gets that side's rows."""
    if reference.flat == candidate.flat:
        return reference, candidate
    flat, full = (reference, candidate) if reference.flat else (candidate, reference)
    if flat.tokens != full.rows * full.tokens:
        return reference, candidate
    flat = flat._replace(rows=full.rows, tokens=full.tokens)
    return (flat, full) if reference.flat else (full, flat)


def common_part(reference: Batch, candidate: Batch) -> Common | None:
    """How two steps of different sizes are cut to their common part; None if nothing shows it."""
    reference, candidate = _with_rows_of_other(reference, candidate)
    rows = min(reference.rows, candidate.rows)
    uncut = Common(rows, (0, reference.tokens), (0, candidate.tokens))
    # One side is a plain list of tokens: all of the other's, or those that its mask keeps.
    if reference.flat != candidate.flat:
        flat, full = (reference, candidate) if reference.flat else (candidate, reference)
        if (flat.rows, flat.tokens) == (full.rows, full.tokens):
            return uncut
        if full.mask is not None and flat.tokens == int(full.mask.sum()):
            side = "reference" if reference.flat else "candidate"
            note = f"the {side} has the {flat.tokens} tokens that the other side's mask keeps"
            return uncut._replace(packed=side, note=note)
    if reference.tokens == candidate.tokens:
        first = "the first row" if rows == 1 else f"the first {rows} rows"
        note = "" if reference.rows == candidate.rows else f"{first} of the larger batch"
        return uncut._replace(note=note, left=_rows_left_out(reference, candidate))
    # A transposed batch has the same number of tokens, but that is not certain.
    if (reference.rows, reference.tokens) == (
        candidate.tokens,
        candidate.rows,
    ) and not reference.flat | candidate.flat:
        return uncut._replace(
            trouble="rows and tokens look swapped; a plan with a transpose step decides that"
        )
    longer, shorter = (
        (reference, candidate) if reference.tokens > candidate.tokens else (candidate, reference)
    )
    kept, why = _kept(longer, shorter, rows)
    if kept is None:
        return uncut._replace(trouble=why) if why else None
    full = (0, shorter.tokens)
    cut = (kept, full) if longer is reference else (full, kept)
    side = "reference" if longer is reference else "candidate"
    note = f"tokens {kept[0]}:{kept[1]} of {longer.tokens} in the {side}, {why}"
    left = _rows_left_out(reference, candidate)
    if not why.startswith(_PADS):
        first, last = (kept[1], longer.tokens) if kept[0] == 0 else (0, kept[0])
        words = f"{_numbered('token', first, last)} of {longer.tokens}"
        side_words = (words, "") if longer is reference else ("", words)
        left = (_joined(left[0], side_words[0]), _joined(left[1], side_words[1]))
    return Common(rows, *cut, note=note, left=left)


def _joined(first: str, second: str) -> str:
    return " and ".join(filter(None, (first, second)))


def _rows_left_out(reference: Batch, candidate: Batch) -> tuple[str, str]:
    """The rows that only one side has, in words, for each side."""
    if reference.rows == candidate.rows or reference.flat or candidate.flat:
        return "", ""
    more, fewer = sorted((reference.rows, candidate.rows), reverse=True)
    words = f"{_numbered('row', fewer, more)} of {more}"
    return (words, "") if reference.rows > candidate.rows else ("", words)


def _numbered(word: str, first: int, stop: int) -> str:
    return f"{word} {first}" if stop - first == 1 else f"{word}s {first}-{stop - 1}"


_PADS = "the rest is pads"


def _kept(longer: Batch, shorter: Batch, rows: int) -> tuple[tuple[int, int] | None, str]:
    surplus = longer.tokens - shorter.tokens
    right, left = (0, shorter.tokens), (surplus, longer.tokens)
    # The mask is used before the ids, because padding has ids, too.
    if longer.mask is not None:
        mask = longer.mask[:rows]
        if not mask[:, shorter.tokens :].any():
            return right, f"{_PADS} on the right by its attention_mask"
        if not mask[:, :surplus].any():
            return left, f"{_PADS} on the left by its attention_mask"
        return None, f"its attention_mask keeps more than {shorter.tokens} tokens"
    if longer.ids is not None and shorter.ids is not None:
        longer_ids, shorter_ids = longer.ids[:rows], shorter.ids[:rows]
        starts = np.array_equal(longer_ids[:, : shorter.tokens], shorter_ids)
        ends = np.array_equal(longer_ids[:, surplus:], shorter_ids)
        if starts and not ends:
            return right, "the token ids agree from the first on"
        if ends and not starts:
            return left, "the token ids agree up to the last"
        # If all ids are equal, either end fits; the first tokens are the usual choice.
        if starts and ends:
            return right, "the token ids agree from the first on (and up to the last)"
        return None, "their token ids are not part of each other"
    if not shorter.tokens:
        return None, ""
    # Without ids or a mask, a list that is several times as long is treated as a larger batch.
    if longer.flat and shorter.flat and longer.tokens % shorter.tokens == 0:
        times = longer.tokens // shorter.tokens
        return right, f"treated as a batch {times} times as large"
    if longer.flat and longer.ids is None:
        return None, ""
    return None, "neither an attention_mask nor token ids say on which side the pads are"


def cut(pair: Pair, reference: Batch, candidate: Batch, common: Common) -> Pair | None:
    """The pair with both sides cut to the common part; None if the batch is not how they differ."""
    reference_shape, candidate_shape = shapes_of(pair)
    if common.packed:
        return _unpacked(pair, reference, candidate, common)
    reference, candidate = _with_rows_of_other(reference, candidate)
    # Rows and tokens may be folded into one axis on one side, or on both.
    reference_shape, reference_first = _unfolded(reference_shape, candidate_shape, reference)
    candidate_shape, candidate_first = _unfolded(candidate_shape, reference_shape, candidate)
    if reference_first is None and len(reference_shape) == len(candidate_shape):
        reference_shape, reference_first = _unfolded_both(
            reference_shape, candidate_shape, reference, candidate
        )
        if reference_first is not None:
            candidate_shape, candidate_first = _unfolded_both(
                candidate_shape, reference_shape, candidate, None
            )
    if len(reference_shape) != len(candidate_shape):
        return None
    left: list[Step] = [] if reference_first is None else [reference_first]
    right: list[Step] = [] if candidate_first is None else [candidate_first]
    shape = list(reference_shape)
    for axis, (a, b) in enumerate(zip(reference_shape, candidate_shape, strict=True)):
        if a == b:
            continue
        is_batch = axis == 0 and (a, b) == (reference.rows, candidate.rows)
        if is_batch and common.repeated:
            (left if a < b else right).append(Step("select", 0, numbers=common.repeated))
            shape[0] = max(a, b)
            continue
        # The batch must explain each axis that differs; any other difference is a finding.
        kept = _kept_of_axis(reference, candidate, common, (a, b), is_batch=is_batch)
        if kept is None:
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


def _kept_of_axis(
    reference: Batch, candidate: Batch, common: Common, sizes: tuple[int, int], *, is_batch: bool
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The compared stretch of each side's axis; None if the batch explains no difference."""
    if is_batch:
        return (0, common.rows), (0, common.rows)
    if sizes == (reference.tokens, candidate.tokens) and not common.trouble:
        return common.reference, common.candidate
    return _cache(reference, candidate, *sizes, common.rows)


def _cache(
    reference: Batch, candidate: Batch, a: int, b: int, rows: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Cut of an axis of keys: the stretch that the longer side's mask keeps.

    None if it does not have the other side's length.
    """
    longer, size, other = (reference, a, b) if a > b else (candidate, b, a)
    if longer.cached is None or longer.cached.shape[1] < size:
        return None
    mask = longer.cached[:rows, :size]
    # The kept keys must be contiguous, because a trim cannot leave a gap.
    kept = np.flatnonzero(mask.any(axis=0))
    if kept.size != other or not other or int(kept[-1]) - int(kept[0]) + 1 != other:
        return None
    cut, full = (int(kept[0]), int(kept[-1]) + 1), (0, other)
    return (cut, full) if a > b else (full, cut)


def _unfolded(shape: Shape, other: Shape, batch: Batch) -> tuple[Shape, Step | None]:
    """Unfold [rows * tokens, ...] to [rows, tokens, ...], if the other side has two axes."""
    if len(shape) + 1 == len(other) and shape and shape[0] == batch.rows * batch.tokens:
        unfolded = (batch.rows, batch.tokens, *shape[1:])
        return unfolded, Step("reshape", numbers=unfolded)
    return shape, None


def _unfolded_both(
    shape: Shape, other: Shape, batch: Batch, others: Batch | None
) -> tuple[Shape, Step | None]:
    """Unfold [rows * tokens, ...] to [rows, tokens, ...], if both sides are folded.

    Both sides must fold several sequences of different lengths into one axis.
    """
    folded = shape and shape[0] == batch.rows * batch.tokens and not batch.flat
    if others is not None:
        folded = folded and other[0] == others.rows * others.tokens and not others.flat
        folded = folded and shape[0] != other[0] and (batch.rows, others.rows) != (1, 1)
        folded = folded and shape[:2] != (batch.rows, batch.tokens)
    if not folded:
        return shape, None
    unfolded = (batch.rows, batch.tokens, *shape[1:])
    return unfolded, Step("reshape", numbers=unfolded)


def _unpacked(pair: Pair, reference: Batch, candidate: Batch, common: Common) -> Pair | None:
    """The padded side without its padding, as a list of tokens like the other side."""
    reference_shape, candidate_shape = shapes_of(pair)
    side = "candidate" if common.packed == "reference" else "reference"
    padded, full = (
        (reference_shape, reference) if side == "reference" else (candidate_shape, candidate)
    )
    packed = candidate_shape if side == "reference" else reference_shape
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
    positions = tuple(int(position) for position in np.flatnonzero(full.mask.ravel()))
    steps.append(Step("select", 0, numbers=positions))
    return with_steps(pair, side, *steps, shape=packed)


Place = tuple[int, int, int, str]
"""Step, rank, process, and the counter that the step belongs to."""


class StepBatches:
    """Batches of both runs, determined once for each step and rank.

    Attributes:
        notes: What was cut or could not be cut, one sentence for each step.
    """

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._records: list[dict[Place, list[Record]] | None] = [None, None]
        self._counters: list[dict[str, str]] = [{}, {}]
        self._batches: dict[tuple[int, Place], Batch | None] = {}
        self._common: dict[tuple[Place, Place], Common | None] = {}
        # Side and words → steps to which they apply, and elements of compared tensors.
        self._left: dict[tuple[str, str], tuple[set[int], list[int]]] = {}
        self.notes: list[str] = []

    def cut(self, pair: Pair) -> tuple[Pair | None, str]:
        """The pair cut to the tokens that both sides have; else None, with a reason if known."""
        reference, candidate = self.batches(pair)
        common = self.common(pair)
        if reference is None or candidate is None or common is None:
            return None, ""
        cut_pair = cut(pair, reference, candidate, common)
        if cut_pair is not None and any(common.left):
            self._add_left_out(cut_pair, common)
        return cut_pair, common.trouble

    def _add_left_out(self, pair: Pair, common: Common) -> None:
        """Add up what a pair leaves out on either side."""
        whole = (pair.reference.shape, pair.candidate.shape)
        for side, words, own, compared in zip(
            ("reference", "candidate"), common.left, whole, shapes_of(pair), strict=True
        ):
            if words:
                steps, elements = self._left.setdefault((side, words), (set(), [0]))
                steps.add(pair.reference.key.step)
                elements[0] += max(0, math.prod(own) - math.prod(compared))

    def left_out(self) -> Iterator[LeftOut]:
        """Parts that were cut off although they are not padding, each with its steps."""
        for (side, words), (steps, elements) in self._left.items():
            numbers = sorted(steps)
            shown = ", ".join(map(str, numbers[:_MOST_STEPS]))
            more = f" and {len(numbers) - _MOST_STEPS} more" if len(numbers) > _MOST_STEPS else ""
            when = f" in step{'s' if len(numbers) > 1 else ''} {shown}{more}"
            yield LeftOut(side, words + (when if numbers != [0] else ""), elements[0])

    def batches(self, pair: Pair) -> tuple[Batch | None, Batch | None]:
        """The batches of both sides of a pair; None if unknown."""
        reference, candidate = self._places(pair)
        return self._batch(0, reference), self._batch(1, candidate)

    def common(self, pair: Pair) -> Common | None:
        """The common part of both sides of a pair; None if a batch is unknown."""
        reference, candidate = self.batches(pair)
        if reference is None or candidate is None:
            return None
        places = self._places(pair)
        if places not in self._common:
            self._common[places] = self._compared(places, reference, candidate)
        return self._common[places]

    def _places(self, pair: Pair) -> tuple[Place, Place]:
        return self._place(0, pair.reference), self._place(1, pair.candidate)

    def _place(self, side: int, record: Record) -> Place:
        steps = self._records[side]
        # Records are grouped by step on first use; most comparisons never need it.
        if steps is None:
            steps = self._records[side] = {}
            self._counters[side] = counter_groups(self._runs[side])
            for stored in self._runs[side].records:
                steps.setdefault(self._place(side, stored), []).append(stored)
        key = record.key
        counter = counter_of(key.site)
        return key.step, key.rank, key.process, self._counters[side].get(counter, counter)

    def _batch(self, side: int, place: Place) -> Batch | None:
        if (side, place) not in self._batches:
            steps = self._records[side] or {}
            self._batches[side, place] = batch_of(self._runs[side], steps.get(place, ()))
        return self._batches[side, place]

    def _compared(
        self, places: tuple[Place, Place], reference: Batch, candidate: Batch
    ) -> Common | None:
        if (reference.rows, reference.tokens) == (candidate.rows, candidate.tokens):
            all_tokens = (0, reference.tokens)
            return Common(reference.rows, all_tokens, all_tokens)
        common = common_part(reference, candidate)
        if common is None:
            return None
        if any(common.left) and reference.tokens == candidate.tokens:
            common = self._with_repeats(places, reference, candidate, common)
        step = places[0][0]
        # Noted once for each step, because the caller caches the result.
        sizes = f"{_size(reference)} tokens in the reference, {_size(candidate)} in the candidate"
        if common.trouble:
            self.notes.append(f"step {step}: {sizes}; {common.trouble}")
        elif common.note:
            self.notes.append(f"step {step}: {sizes}; compared: {common.note}")
        return common

    def _with_repeats(
        self, places: tuple[Place, Place], reference: Batch, candidate: Batch, common: Common
    ) -> Common:
        """Repeat the smaller side if the larger one works on the same rows several times."""
        side = 0 if reference.rows > candidate.rows else 1
        larger, smaller = sorted((reference.rows, candidate.rows), reverse=True)
        records = (self._records[side] or {}).get(places[side], ())
        repeated = repeated_rows(self._runs[side], records, larger, smaller)
        if not repeated:
            return common
        names = ("reference", "candidate")
        note = f"the {names[1 - side]} repeated, as the {names[side]}'s inputs repeat their rows"
        return common._replace(rows=larger, repeated=repeated, left=("", ""), note=note)


def repeated_rows(
    run: Run, records: Iterable[Record], larger: int, smaller: int
) -> tuple[int, ...]:
    """The first row that every row of a step's inputs repeats; empty if a row repeats none.

    Args:
        run: The run that holds the values.
        records: The records of that step, in execution order.
        larger: Number of rows of this run's batch.
        smaller: Number of rows that may be repeated in it.
    """
    if not smaller or larger % smaller:
        return ()
    inputs = [record for record in records if record.key.port == "input"]
    # The model's own inputs; if it has none, those of the first call.
    own = [record for record in inputs if record.key.site in ROOTS] or inputs[:1]
    batched = [record for record in own if record.shape[:1] == (larger,)]
    orders = [
        tuple(row % smaller for row in range(larger)),
        tuple(row // (larger // smaller) for row in range(larger)),
    ]
    for record in batched:
        if record.kept != "full" or run.lost(record) or math.prod(record.shape) > _MOST_ELEMENTS:
            return ()
        words = np.ascontiguousarray(run.raw(record)).view(np.uint8).reshape(larger, -1)
        # Every row is compared with the first row that should be equal.
        orders = [
            order
            for order in orders
            if np.array_equal(words[[order.index(row) for row in order]], words)
        ]
    return orders[0] if batched and orders else ()


def _size(batch: Batch) -> str:
    return f"{batch.tokens}" if batch.flat else f"{batch.rows}x{batch.tokens}"
