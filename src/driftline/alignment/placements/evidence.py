"""Evidence from values about a distributed run, if shapes leave its placements open.

Inputs show in which order ranks had the rows and tokens of a batch: samplers distribute rows, and
context parallelism gives every rank two stretches of the text. Gradients show whether they are
summed or averaged over ranks, and outputs show whether they are terms of a sum. Values are read
only for these questions. This file never decides which tensors are paired.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.alignment.normalise.view import AlignedView, Copies, Gathered, origins_of
from driftline.alignment.placements.groups import Group, in_execution
from driftline.alignment.placements.join import DoesNotFit, distance, join, thinned, values_of
from driftline.alignment.placements.layouts import Layouts
from driftline.alignment.placements.mesh import AxisPlacement, record_placement
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey

Order = tuple[int, ...]
"""For each element of the other run's axis, its position in the joined tensor."""


def orders(
    made: npt.NDArray[Any], wanted: npt.NDArray[Any], parts: Mapping[int, int]
) -> dict[int, Order]:
    """The orders, by axis, that turn joined inputs into the other run's.

    Empty if no reordering is needed, or none achieves it.

    Args:
        made: Inputs, joined rank by rank.
        wanted: Inputs of the other run.
        parts: Axis of the inputs → number of ranks among which it was split.
    """
    if made.shape != wanted.shape or np.array_equal(made, wanted):
        return {}
    # Rows before tokens, because samplers that distribute rows are the common case.
    if 0 in parts and (rows := _matched(made, wanted)):
        return {0: rows}
    for axis, many in parts.items():
        if axis == 0 or axis >= made.ndim:
            continue
        # The order of context parallelism is tried before a search, which needs distinct tokens.
        for order in (from_both_ends(made.shape[axis], many), _distinct(made, wanted, axis)):
            if not order:
                continue
            turned = np.take(made, order, axis=axis)
            if np.array_equal(turned, wanted):
                return {axis: order}
            if 0 in parts and (rows := _matched(turned, wanted)):
                return {0: rows, axis: order}
    return {}


def from_both_ends(length: int, ranks: int) -> Order:
    """The order of context parallelism; empty if the length does not divide.

    Rank r holds stretch r from the start and stretch r from the end.

    >>> from_both_ends(8, 2)
    (0, 1, 4, 5, 6, 7, 2, 3)
    """
    if ranks < 2 or length % (2 * ranks):
        return ()
    stretch_length = length // (2 * ranks)
    # Two stretches per rank, one counted from the start and one from the end, so that all ranks
    # have equal work.
    stretches = [0] * (2 * ranks)
    for rank in range(ranks):
        stretches[rank], stretches[2 * ranks - 1 - rank] = 2 * rank, 2 * rank + 1
    return tuple(
        stretch * stretch_length + n for stretch in stretches for n in range(stretch_length)
    )


def _matched(made: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Order:
    """The order that matches equal rows.

    Interchangeable rows keep their order, because they give equal results.
    """
    rows: dict[bytes, list[int]] = {}
    row: Any
    for index, row in enumerate(np.ascontiguousarray(made)):
        rows.setdefault(row.tobytes(), []).append(index)
    order: list[int] = []
    for row in np.ascontiguousarray(wanted):
        # Each row is used once, in order, so that equal rows keep their order.
        places = rows.get(row.tobytes())
        if not places:
            return ()
        order.append(places.pop(0))
    return tuple(order)


def _distinct(made: npt.NDArray[Any], wanted: npt.NDArray[Any], axis: int) -> Order:
    """The order that matches tokens; empty if two of them are equal.

    Equal tokens give different results at different positions.
    """
    made_tokens, wanted_tokens = (
        np.ascontiguousarray(np.moveaxis(values, axis, 0)) for values in (made, wanted)
    )
    tokens: Any = wanted_tokens
    # Attention distinguishes equal tokens by position, so their order must not be guessed.
    if len({values.tobytes() for values in tokens}) < len(wanted_tokens):
        return ()
    return _matched(made_tokens, wanted_tokens)


ACTIVATION_GRADIENTS = ("grad_input", "grad_output")
# Relative distances. Below the first, two tensors are equal; above the second, they are not. In
# between is rounding that no rule should decide on.
_AGREE, _APART = 0.02, 0.1
# Number of gradients that are checked before the convention is certain.
_VOTES = 6
_SUM = AxisPlacement("sum")

F64 = npt.NDArray[np.float64]


class Evidence:
    """Evidence from the values of a distributed run and of the run it is compared with.

    Args:
        layouts: Placements of the tensors.
        averaged: Whether gradients are averaged, if the other run does not show it.

    Attributes:
        averaged: Whether gradients of different data are averaged over ranks, rather than summed.
        decided: Whether the gradients showed that, or there are none that could.
        terms: Tensors that are terms of a sum, with the mesh axes over which they are summed.
        notes: Conclusions, one sentence each.
    """

    def __init__(self, layouts: Layouts, *, averaged: bool) -> None:
        self._layouts = layouts
        self.decided = True
        self.notes: list[str] = []
        self._orders: dict[int, dict[int, Order]] = {}
        # Summaries hold sketches instead of values, in which rows have no order.
        self._sketched = any(
            record.kept == "summary"
            for run in (layouts.run, layouts.other)
            if run is not None
            for record in run.records
        )
        if not self._sketched:
            self._find_orders()
        self.averaged = self._convention() if layouts.other is not None else averaged
        self.terms = self._find_terms()

    # --- rows and tokens

    def in_order(self, group: Group, source: Source, placed: Sequence[AxisPlacement]) -> Source:
        """A joined source with its rows and tokens in the other run's order."""
        for of_inputs, order in self._orders.get(group.key.step, {}).items():
            split = {n for n, axis in self._layouts.split.items() if axis == of_inputs}
            along = {how.axis for n, how in enumerate(placed) if how.kind == "shard" and n in split}
            if len(along) != 1 or not isinstance(source, Recipe):
                continue
            axis = along.pop()
            # An axis may hold several elements for each row, such as tokens folded into it. That is
            # allowed for rows only, because the tokens of a row are not adjacent.
            block, rest = divmod(source.shape[axis], len(order))
            if rest or not block or (block > 1 and of_inputs):
                continue
            numbers = tuple(index * block + n for index in order for n in range(block))
            source = source.then(Step("select", axis, numbers=numbers), shape=source.shape)
        return source

    def _find_orders(self) -> None:
        """Find the order in which the ranks had the batch of each step."""
        for group in self._layouts.groups:
            wanted_record = self._layouts.counterpart(group)
            step = group.key.step
            # The first input of a step that shows an order decides for the whole step.
            if group.key.port != "input" or wanted_record is None or self._orders.get(step):
                continue
            placed, _ = self._layouts.placement_of(group)
            if placed is None or not wanted_record.shape:
                continue
            cut = {n: how.axis for n, how in enumerate(placed) if how.kind == "shard"}
            parts = {
                axis: _places(group, {n for n in cut if cut[n] == axis})
                for axis in {cut[n] for n in cut if n in self._layouts.data}
            }
            made, wanted = (
                self._joined_values(group, placed),
                self._wanted_values(wanted_record, placed),
            )
            if not parts or made is None or wanted is None:
                continue
            self._orders[step] = orders(made, wanted, parts)
            self._note_orders(self._orders[step])

    def _note_orders(self, step_orders: Mapping[int, Order]) -> None:
        texts = {
            0: "the ranks' rows together are the other run's in another order (as samplers deal "
            "them out): put in its order by the inputs",
            1: "the ranks' tokens together are the other run's in another order (as context "
            "parallelism deals them out): put in its order by the inputs",
        }
        for axis in step_orders:
            if (note := texts[min(axis, 1)]) not in self.notes:
                self.notes.append(note)

    # --- gradients of different data

    def data_terms(self, group: Group, placed: Sequence[AxisPlacement]) -> set[int]:
        """Mesh axes with different data along which a group holds terms of one gradient or loss."""
        # Only gradients of weights and scalars, such as a loss, are terms of the data.
        if group.key.port != "param_grad" and (group.first.shape or group.key.port != "output"):
            return set()
        if not _is_float(group.first):
            return set()
        return _whole_axes(placed) & self._layouts.data & self._layouts.bytes.differ_along(group)

    def rows_apart(self, group: Group, placed: Sequence[AxisPlacement]) -> int:
        """Number of places over which the data of a group are split."""
        axes = {n for n, how in enumerate(placed) if how.kind == "shard"}
        return _places(group, axes & self._layouts.data)

    def _convention(self) -> bool:
        votes = Counter[bool]()
        groups = self._layouts.groups
        weights = [group for group in groups if group.key.port == "param_grad"]
        others = [group for group in groups if group.key.port in ACTIVATION_GRADIENTS]
        # Gradients of weights are checked first: they are terms themselves, while gradients of
        # activations only carry the factor of the mean.
        for group in [*weights, *others]:
            if sum(votes.values()) >= _VOTES:
                break
            placed, _ = self._layouts.placement_of(group)
            wanted_record = self._layouts.counterpart(group)
            if placed is None or wanted_record is None:
                continue
            axes = self.data_terms(group, placed)
            many = _places(group, axes) if axes else self.rows_apart(group, placed)
            if many < 2 or (not axes and group.key.port == "param_grad"):
                continue
            summed, wanted = (
                self._joined_values(group, _with(placed, axes, _SUM)),
                self._wanted_values(wanted_record, placed),
            )
            if summed is None or wanted is None:
                continue
            self.decided = False
            added, averaged = distance(wanted, summed), distance(wanted, summed / many)
            # Gradients that fit neither way are wrong themselves, and have no vote.
            if min(added, averaged) < _AGREE:
                votes[averaged < added] += 1
        # A split vote is not a conclusion; the majority is used without a note.
        if len(votes) == 1:
            word = "the mean" if True in votes else "the sum"
            self.notes.append(
                f"gradients of ranks that had other data: {word} of them is the other run's"
            )
        self.decided = self.decided or bool(votes)
        return votes[True] > votes[False]

    # --- terms of a sum

    def _find_terms(self) -> dict[TensorKey, set[int]]:
        suspects: dict[TensorKey, set[int]] = {}
        believed: set[TensorKey] = set()
        for group in self._layouts.groups:
            placed, _ = self._layouts.placement_of(group)
            wanted_record = self._layouts.counterpart(group)
            if placed is None or wanted_record is None or group.key.port in ("input", "param"):
                continue
            # A distributed tensor declares whether it is a term.
            says = record_placement(group.first)
            if (says is not None and not says.local) or not _is_float(group.first):
                continue
            axes = _whole_axes(placed) & self._layouts.bytes.differ_along(group)
            axes -= self.data_terms(group, placed)
            if axes and self._is_sum(group, placed, axes, wanted_record):
                suspects[group.key] = axes
            # Summaries cannot show that a sum agrees, so shared parts are assumed to be terms.
            elif axes and self._sketched and self._is_shared_gradient(group, axes):
                suspects[group.key] = axes
                believed.add(group.key)
        reduced = self._reduced_later(suspects) if suspects else set[TensorKey]()
        reduced |= {key for key in suspects if key in believed}
        return {key: axes for key, axes in suspects.items() if key in reduced}

    def _is_shared_gradient(self, group: Group, axes: set[int]) -> bool:
        """Whether a gradient belongs to a part that ranks share, so that each rank has a term of
        it.

        Values would show whether the sum agrees; summaries of several parts cannot.
        """
        gradient = group.key.port in (*ACTIVATION_GRADIENTS, "param_grad")
        return gradient and axes <= self._layouts.shared(group)

    def _is_sum(
        self, group: Group, placed: Sequence[AxisPlacement], axes: set[int], wanted_record: Record
    ) -> bool:
        summed, alone = (
            self._joined_values(group, _with(placed, axes, _SUM)),
            self._joined_values(group, placed),
        )
        if summed is None or alone is None:
            return False
        # Terms are accepted only if their sum agrees and a single one does not.
        return any(
            distance(wanted, summed) < _AGREE and distance(wanted, alone) > _APART
            for wanted in (
                self._wanted_values(wanted_record, placed),
                self._summed_values(wanted_record, placed),
            )
            if wanted is not None
        )

    def _reduced_later(self, suspects: Mapping[TensorKey, set[int]]) -> set[TensorKey]:
        """Suspected terms for which the run itself shows that they are added up later.

        If they are not added up, the tensor that is computed next differs between ranks, or differs
        from the other run if ranks have different tokens. A next tensor that is cut differently
        (into heads, features) may have other sources, and is no evidence.
        """
        reduced: set[TensorKey] = set()
        for backward in (False, True):
            # Iterated backwards, so that the tensor that follows in execution is known at every
            # suspect.
            following: Group | None = None
            flow = [
                group
                for group in in_execution(self._layouts.groups)
                if (group.key.port in ACTIVATION_GRADIENTS) is backward
                and group.key.port not in ("param", "param_grad", "optimizer_grad")
            ]
            for group in reversed(flow):
                if group.key in suspects:
                    if following is not None and self._is_sound(following):
                        reduced.add(group.key)
                elif self._decides(group):
                    following = group
        # A weight's gradient in one backward pass is not added up yet, but the optimizer adds it.
        return reduced | {key for key in suspects if key.port == "param_grad"}

    def _decides(self, group: Group) -> bool:
        placed, _ = self._layouts.placement_of(group)
        split = self._layouts.split
        return placed is not None and all(
            how.kind != "shard" or how.axis == split.get(n, 0 if n in self._layouts.data else -1)
            for n, how in enumerate(placed)
        )

    def _is_sound(self, group: Group) -> bool:
        placed, _ = self._layouts.placement_of(group)
        if placed is None:
            return False
        # Copies that differ were computed from terms that were not added up.
        if _whole_axes(placed) & self._layouts.bytes.differ_along(group):
            return False
        wanted_record = self._layouts.counterpart(group)
        if all(how.kind != "shard" for how in placed) or wanted_record is None:
            return True
        many = self.rows_apart(group, placed) if group.key.port in ACTIVATION_GRADIENTS else 1
        many = many if self.averaged else 1
        made, wanted = (
            self._joined_values(group, placed),
            self._wanted_values(wanted_record, placed),
        )
        if made is not None and wanted is not None:
            return distance(wanted, made / many) < _AGREE
        return self._sketched and self._has_the_size_of(group, placed, wanted_record, many)

    def _has_the_size_of(
        self, group: Group, placed: Sequence[AxisPlacement], wanted_record: Record, many: int
    ) -> bool:
        """Whether the norms of shards, known only from summaries, add up to the other run's."""
        try:
            source = join(group.parts, placed)[0]
        except DoesNotFit:
            return False
        other = self._layouts.other
        origin: object = wanted_record
        if isinstance(other, AlignedView):
            origin = origins_of(other).get(wanted_record.key, wanted_record)
            origin = origin.recipe if isinstance(origin, Gathered) else origin
        wanted = _size(origin) if isinstance(origin, Record | Recipe) else math.nan
        # The other side may be stored completely although this one kept summaries.
        if (
            other is not None
            and math.isnan(wanted)
            and (all_of_it := values_of(other, wanted_record)) is not None
        ):
            wanted = float(np.linalg.norm(all_of_it.reshape(-1)))
        return wanted > 0 and abs(_size(source) / many / wanted - 1) < _AGREE

    # --- values

    def _joined_values(self, group: Group, placed: Sequence[AxisPlacement]) -> F64 | None:
        try:
            source = join(group.parts, placed)[0]
        except DoesNotFit:
            return None
        source = self.in_order(group, source, placed)
        thin = thinned(source.shape, placed)
        return values_of(self._layouts.run, source, sketched=self._sketched, thin=thin)

    def _summed_values(self, record: Record, placed: Sequence[AxisPlacement]) -> F64 | None:
        """The sum of the copies of the other run, which may be terms as well."""
        other = self._layouts.other
        if not isinstance(other, AlignedView):
            return None
        origin = origins_of(other).get(record.key)
        if not isinstance(origin, Copies) or len(origin.sources) < 2:
            return None
        if len({source.shape for source in origin.sources}) > 1:
            return None
        total = Recipe(origin.sources, (Step("sum"),), origin.sources[0].shape)
        thin = thinned(total.shape, placed)
        return values_of(other.base, total, sketched=self._sketched, thin=thin)

    def _wanted_values(self, record: Record, placed: Sequence[AxisPlacement]) -> F64 | None:
        """Values of the other run's tensor, even if it is itself gathered from ranks."""
        other = self._layouts.other
        if other is None:
            return None
        origin: object = record
        if isinstance(other, AlignedView):
            origin, other = origins_of(other).get(record.key, record), other.base
        if isinstance(origin, Gathered):
            origin = origin.recipe
        elif isinstance(origin, Copies):
            origin = origin.sources[0]
        if not isinstance(origin, Record | Recipe):
            return None
        thin = thinned(origin.shape, placed)
        return values_of(other, origin, sketched=self._sketched, thin=thin)


def _size(source: Source) -> float:
    """Norm of joined shards from their summaries; NaN if one has no summary."""
    parts = source.records if isinstance(source, Recipe) else (source,)
    sizes = [math.nan if part.summary is None else part.summary.l2 for part in parts]
    return math.nan if any(map(math.isnan, sizes)) else math.hypot(*sizes)


def _is_float(record: Record) -> bool:
    dtype = DTYPES.get(record.dtype)
    return dtype is not None and dtype.is_floating


def _whole_axes(placed: Sequence[AxisPlacement]) -> set[int]:
    return {n for n, how in enumerate(placed) if how.kind == "replicate"}


def _with(
    placed: Sequence[AxisPlacement], axes: set[int], how: AxisPlacement
) -> list[AxisPlacement]:
    return [how if n in axes else previous for n, previous in enumerate(placed)]


def _places(group: Group, axes: set[int]) -> int:
    """Number of places of a group along some mesh axes."""
    return math.prod(len({coordinate[axis] for coordinate in group.parts}) for axis in axes)
