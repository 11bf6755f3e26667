"""Masks: padding takes no part in any metric.

A mask has the shape [rows, tokens], or one that broadcasts to it, and is non-zero for positions
that count. It comes from a file, or is the attention_mask that a run captured. Parameters are never
masked. In tensors with a query and a key axis, padded queries are left out. Padded keys are left
out if they are the same in every row: an attention mask has made them zero, or minus infinity, on
both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.alignment.normalise.view import shapes_of, with_steps
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Step
from driftline.alignment.reconcile.layout import are_weights
from driftline.alignment.reconcile.tokens import StepBatches
from driftline.errors import BadFile, BadInput
from driftline.runs.run import Run

Mask = npt.NDArray[np.bool_]
Shape = tuple[int, ...]
CAPTURED = "captured"
# The plan stores positions as numbers: four million are a batch that still fits into it.
_MOST = 1 << 22


def masked(plan: Plan, reference: Run, candidate: Run, masks: Sequence[str]) -> Plan:
    """The plan with a recipe on both sides of every tensor that a mask fits.

    Raises:
        BadInput: A mask fits no tensor, or leaves nothing; or none was captured.
        BadFile: A file holds no mask.
    """
    files = [read_mask_file(Path(name)) for name in masks if name != CAPTURED]
    book = StepBatches(reference, candidate) if CAPTURED in masks else None
    chosen = _MaskChoice(files, book)
    pairs = tuple(_apply(pair, chosen) for pair in plan.pairs)
    chosen.check(masks)
    fitted = sum(pair is not before for pair, before in zip(pairs, plan.pairs, strict=True))
    return plan._replace(pairs=pairs, notes=(*plan.notes, *chosen.notes(fitted)))


def without_pads(pairs: Sequence[Pair], reference: Run, candidate: Run) -> list[Pair]:
    """The pairs that a captured attention_mask shortens, without their padding.

    Pairs of runs with different masks are left out, because that is another difference.
    """
    book = StepBatches(reference, candidate)
    chosen = _MaskChoice((), book)
    masked_pairs: list[Pair] = []
    for pair in pairs:
        masks = [batch.mask for batch in book.batches(pair) if batch is not None]
        captured = [mask for mask in masks if mask is not None]
        # Different masks on the two sides would compare different tokens.
        if not captured or any(not np.array_equal(captured[0], mask) for mask in captured[1:]):
            continue
        if (cut := _apply(pair, chosen)) is not pair:
            masked_pairs.append(cut)
    return masked_pairs


def read_mask_file(path: Path) -> Mask:
    """Read the mask in a file, as two axes.

    Raises:
        BadFile: The file is not an .npy file with one or two axes of numbers, or no position
            counts.
    """
    from driftline.formats.registry import open_run

    run = open_run(path)
    if len(run.records) != 1:
        raise BadFile(
            f"{path} holds {len(run.records)} tensors; a mask is one",
            hint="give a file with one array of [batch, tokens]",
        )
    record = run.records[0]
    if not 1 <= len(record.shape) <= 2 or math.prod(record.shape) > _MOST:
        shown = "x".join(map(str, record.shape)) or "scalar"
        raise BadFile(f"{path} holds {shown}", hint="a mask is [batch, tokens] or [tokens]")
    raw: npt.NDArray[Any] = run.raw(record)
    # NaN is not 0, so it would silently count as a position to keep.
    if raw.dtype.kind == "f" and np.isnan(raw).any():
        raise BadFile(f"{path} holds NaN", hint="what counts is non-zero, what does not is 0")
    mask = raw.reshape(record.shape) != 0
    if not mask.any():
        raise BadFile(f"{path} leaves out every position", hint="what counts must be non-zero")
    return mask.reshape(1, -1) if mask.ndim == 1 else mask


class _MaskChoice:
    """Chooses the mask of a pair: the user's files, and the mask captured in the pair's step."""

    def __init__(self, files: Sequence[Mask], book: StepBatches | None) -> None:
        self._files = files
        self._book = book
        self._used = [False] * len(files)
        self._captured = self._zeros = self._captured_used = False
        self._positions: dict[bytes, tuple[int, ...]] = {}

    def fitting(self, pair: Pair, shape: Shape) -> Iterator[tuple[Mask, tuple[int, ...]]]:
        """Masks that fit a tensor of this shape, with the axes of its rows and tokens."""
        for index, mask in enumerate(self._files):
            if (fitted := _fit(mask, shape)) is not None:
                self._used[index] = True
                yield fitted
        if self._book is None:
            return
        for mask in self._of_step(pair, self._book):
            self._captured = True
            # A mask without zeros leaves out nothing: it counts as captured, but is not applied.
            if mask.all():
                continue
            self._zeros = True
            if (fitted := _fit(mask, shape)) is not None:
                self._captured_used = True
                yield fitted

    def _of_step(self, pair: Pair, book: StepBatches) -> Iterator[Mask]:
        reference, candidate = book.batches(pair)
        common = book.common(pair)
        for side, batch in (("reference", reference), ("candidate", candidate)):
            if batch is None or batch.mask is None:
                continue
            mask = batch.mask
            # The pair is already cut to common rows and tokens, so the mask is cut in the same way.
            if common is not None and not common.packed:
                begin, end = common.reference if side == "reference" else common.candidate
                mask = mask[: common.rows, begin:end]
            yield mask

    def positions(self, mask: Mask) -> tuple[int, ...]:
        """Flat positions that count; all tensors of a mask share one tuple."""
        name = mask.tobytes() + bytes(str(mask.shape), "ascii")
        # Thousands of tensors share a mask, and a tuple of its positions is large.
        if name not in self._positions:
            self._positions[name] = tuple(int(position) for position in np.flatnonzero(mask))
        return self._positions[name]

    def check(self, masks: Sequence[str]) -> None:
        named = [name for name in masks if name != CAPTURED]
        for name, mask, used in zip(named, self._files, self._used, strict=True):
            if not used:
                raise BadInput(
                    f"the mask {name} ({mask.shape[0]}x{mask.shape[1]}) fits no tensor",
                    hint="a mask is [batch, tokens], as the compared tensors have them",
                )
        if self._book is not None and not self._captured:
            raise BadInput(
                "--mask captured, but no attention_mask of [batch, tokens] was captured",
                hint="give a file: --mask FILE.npy",
            )
        if self._zeros and not self._captured_used:
            raise BadInput(
                "the captured attention_mask fits no tensor", hint="give --mask FILE.npy"
            )

    def notes(self, fitted: int) -> Iterator[str]:
        if self._files or self._zeros:
            yield f"masks leave pads out of {fitted} tensors"
        if self._captured and not self._zeros:
            yield "the captured attention_mask leaves nothing out"


def _fit(mask: Mask, shape: Shape) -> tuple[Mask, tuple[int, ...]] | None:
    """The mask broadcast to a tensor, and the tensor's row and token axes; None if it does not fit.

    Accepted shapes are [rows, tokens, ...], [rows, heads, tokens, size] and [rows * tokens, ...].
    """
    rows, tokens = mask.shape
    for axes in ((0, 1), (0, 2)):
        if len(shape) <= axes[1] + (axes[1] == 2):  # [rows, heads, tokens, size]: four axes
            continue
        goal = (shape[0], shape[axes[1]])
        if axes == (0, 2) and shape[1] == goal[1] and shape[1] > 1:
            continue  # as many heads as tokens: the shape does not show which axis is which
        if all(size in (1, length) for size, length in zip(mask.shape, goal, strict=True)):
            # Only one axis may broadcast: a mask with one row for all rows, or with one token for
            # whole rows.
            wide = goal[1] == tokens and (rows == goal[0] or rows == 1)
            if wide or (tokens == 1 and rows == goal[0] > 1 and axes == (0, 1)):
                return np.broadcast_to(mask, goal), axes
    if shape and shape[0] == rows * tokens and rows * tokens > 1:
        return mask, (0,)
    return None


def _apply(pair: Pair, chosen: _MaskChoice) -> Pair:
    reference_shape, candidate_shape = shapes_of(pair)
    if (
        pair.trouble
        or reference_shape != candidate_shape
        or not reference_shape
        or are_weights(pair)
    ):
        return pair
    fitting = list(chosen.fitting(pair, reference_shape))
    if not fitting:
        return pair
    axes = fitting[0][1]
    combined = fitting[0][0]
    for mask, others in fitting[1:]:
        # Masks of other axes cannot be combined; the first one is used.
        if others == axes and mask.shape == combined.shape:
            combined = combined & mask
    if combined.all():
        return pair
    steps, shape = _steps(reference_shape, combined, axes, chosen.positions(combined))
    for side in ("reference", "candidate"):
        pair = with_steps(pair, side, *steps, shape=shape)
    return pair


def _steps(
    shape: Shape, mask: Mask, axes: tuple[int, ...], positions: tuple[int, ...]
) -> tuple[list[Step], Shape]:
    """Steps that merge rows and tokens into the first axis and select the positions that count."""
    steps: list[Step] = []
    rest = shape[1:]
    if len(axes) == 2:
        if axes == (0, 2):
            order = (0, 2, 1, *range(3, len(shape)))
            steps.append(Step("transpose", numbers=order))
            rest = (shape[1], *shape[3:])
        else:
            rest = shape[2:]
        steps.append(Step("reshape", numbers=(mask.size, *rest)))
    steps.append(Step("select", 0, numbers=positions))
    result = (len(positions), *rest)
    columns = mask.any(axis=0)
    with_keys = axes == (0, 2) and rest[-1] == mask.shape[1] and len(shape) == 4
    # Queries and keys: keys are removed only if the same keys are padding in every row.
    if with_keys and bool((mask == columns).all()):
        keys = tuple(int(position) for position in np.flatnonzero(columns))
        steps.append(Step("select", len(result) - 1, numbers=keys))
        result = (*result[:-1], len(keys))
    return steps, result
