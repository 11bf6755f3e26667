"""In which order ranks had the rows and tokens of a batch, seen by its inputs.

Samplers deal rows out, and context parallelism gives every rank two stretches of the text, one from
either end. Knows arrays only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.alignment.normalise.view import Copies, Gathered, SeenRun, origins_of
from driftline.alignment.placements.groups import Group, in_execution
from driftline.alignment.placements.join import DoesNotFit, distance, join, thinned, values_of
from driftline.alignment.placements.layouts import Layouts
from driftline.alignment.placements.mesh import Placed, lying_of
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey

Order = tuple[int, ...]
"""Where the elements of the other run's axis lie in the joined one."""


def orders(
    made: npt.NDArray[Any], wanted: npt.NDArray[Any], parts: Mapping[int, int]
) -> dict[int, Order]:
    """What must be done to joined inputs to make them the other run's, by axis; empty if nothing,
    or if nothing does it.

    Args:
        made: Inputs, joined rank after rank.
        wanted: The other run's.
        parts: Axis of the inputs → among how many ranks it was split.
    """
    if made.shape != wanted.shape or np.array_equal(made, wanted):
        return {}
    if 0 in parts and (rows := _matched(made, wanted)):
        return {0: rows}
    for axis, many in parts.items():
        if axis == 0 or axis >= made.ndim:
            continue
        for order in (from_both_ends(made.shape[axis], many), _distinct(made, wanted, axis)):
            if not order:
                continue
            turned = np.take(made, order, axis=axis)
            if np.array_equal(turned, wanted):
                return {axis: order}
            if 0 in parts and (rows := _matched(turned, wanted)):
                return {0: rows, axis: order}
    return {}


def from_both_ends(length: int, many: int) -> Order:
    """Rank r holds stretch r and, counted from the end, stretch r; empty if that does not go.

    >>> from_both_ends(8, 2)
    (0, 1, 4, 5, 6, 7, 2, 3)
    """
    if many < 2 or length % (2 * many):
        return ()
    each = length // (2 * many)
    found = [0] * (2 * many)
    for rank in range(many):
        found[rank], found[2 * many - 1 - rank] = 2 * rank, 2 * rank + 1
    return tuple(stretch * each + n for stretch in found for n in range(each))


def _matched(made: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Order:
    """Equal rows, in the order in which they come: what is computed of equal rows is equal."""
    rows: dict[bytes, list[int]] = {}
    found: Any
    for at, found in enumerate(np.ascontiguousarray(made)):
        rows.setdefault(found.tobytes(), []).append(at)
    order: list[int] = []
    for found in np.ascontiguousarray(wanted):
        places = rows.get(found.tobytes())
        if not places:
            return ()
        order.append(places.pop(0))
    return tuple(order)


def _distinct(made: npt.NDArray[Any], wanted: npt.NDArray[Any], axis: int) -> Order:
    """The same for tokens, if no two are alike: what is computed of equal tokens is not equal."""
    ours, theirs = (np.ascontiguousarray(np.moveaxis(each, axis, 0)) for each in (made, wanted))
    tokens: Any = theirs
    if len({each.tobytes() for each in tokens}) < len(theirs):
        return ()
    return _matched(ours, theirs)


# What values say about a run of many ranks, each for the run or a tensor as a whole.


ACTIVATION_GRADIENTS = ("grad_input", "grad_output")
_AGREE, _APART = 0.02, 0.1
_VOTES = 6
_SUM = Placed("sum")

F64 = npt.NDArray[np.float64]


class Evidence:
    """What the values of a run and of the one it is compared with say.

    Args:
        layouts: How the tensors lie.
        averaged: What to take for true where the other run says nothing.

    Attributes:
        averaged: Whether the mean of gradients of other data is the whole's, not their sum.
        decided: Whether the gradients said that, or there are none that could.
        terms: Tensors that are terms of a sum, and the axes along which.
        notes: What to say about it.
    """

    def __init__(self, layouts: Layouts, *, averaged: bool) -> None:
        self._layouts = layouts
        self.decided = True
        self.notes: list[str] = []
        self._orders: dict[int, dict[int, Order]] = {}
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

    def in_order(self, group: Group, source: Source, placed: Sequence[Placed]) -> Source:
        """A joined source with its rows and tokens in the other run's order."""
        for of_inputs, order in self._orders.get(group.key.step, {}).items():
            split = {n for n, axis in self._layouts.split.items() if axis == of_inputs}
            along = {how.axis for n, how in enumerate(placed) if how.kind == "shard" and n in split}
            if len(along) != 1 or not isinstance(source, Recipe):
                continue
            axis = along.pop()
            each, rest = divmod(source.shape[axis], len(order))
            if rest or not each or (each > 1 and of_inputs):
                continue
            numbers = tuple(at * each + n for at in order for n in range(each))
            source = source.then(Step("select", axis, numbers=numbers), shape=source.shape)
        return source

    def _find_orders(self) -> None:
        """In which order the ranks had the batch; by step."""
        for group in self._layouts.groups:
            whole = self._layouts.whole(group)
            step = group.key.step
            if group.key.port != "input" or whole is None or self._orders.get(step):
                continue
            placed, _ = self._layouts.lie(group)
            if placed is None or not whole.shape:
                continue
            cut = {n: how.axis for n, how in enumerate(placed) if how.kind == "shard"}
            parts = {
                axis: _places(group, {n for n in cut if cut[n] == axis})
                for axis in {cut[n] for n in cut if n in self._layouts.data}
            }
            made, wanted = self._joined(group, placed), self._whole(whole, placed)
            if not parts or made is None or wanted is None:
                continue
            self._orders[step] = orders(made, wanted, parts)
            self._say_orders(self._orders[step])

    def _say_orders(self, found: Mapping[int, Order]) -> None:
        said = {
            0: "the ranks' rows together are the other run's in another order (as samplers deal "
            "them out): put in its order by the inputs",
            1: "the ranks' tokens together are the other run's in another order (as context "
            "parallelism deals them out): put in its order by the inputs",
        }
        for axis in found:
            if (note := said[min(axis, 1)]) not in self.notes:
                self.notes.append(note)

    # --- gradients of other data

    def data_terms(self, group: Group, placed: Sequence[Placed]) -> set[int]:
        """Axes of other data along which a group holds terms of one gradient or loss."""
        if group.key.port != "param_grad" and (group.first.shape or group.key.port != "output"):
            return set()
        if not _is_float(group.first):
            return set()
        return _whole_axes(placed) & self._layouts.data & self._layouts.bytes.differ_along(group)

    def rows_apart(self, group: Group, placed: Sequence[Placed]) -> int:
        """Among how many places the data of a group are split."""
        axes = {n for n, how in enumerate(placed) if how.kind == "shard"}
        return _places(group, axes & self._layouts.data)

    def _convention(self) -> bool:
        votes = Counter[bool]()
        groups = self._layouts.groups
        weights = [group for group in groups if group.key.port == "param_grad"]
        others = [group for group in groups if group.key.port in ACTIVATION_GRADIENTS]
        for group in [*weights, *others]:
            if sum(votes.values()) >= _VOTES:
                break
            placed, _ = self._layouts.lie(group)
            whole = self._layouts.whole(group)
            if placed is None or whole is None:
                continue
            axes = self.data_terms(group, placed)
            many = _places(group, axes) if axes else self.rows_apart(group, placed)
            if many < 2 or (not axes and group.key.port == "param_grad"):
                continue
            found, wanted = (
                self._joined(group, _with(placed, axes, _SUM)),
                self._whole(whole, placed),
            )
            if found is None or wanted is None:
                continue
            self.decided = False
            added, averaged = distance(wanted, found), distance(wanted, found / many)
            if min(added, averaged) < _AGREE:
                votes[averaged < added] += 1
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
        taken: set[TensorKey] = set()
        for group in self._layouts.groups:
            placed, _ = self._layouts.lie(group)
            whole = self._layouts.whole(group)
            if placed is None or whole is None or group.key.port in ("input", "param"):
                continue
            says = lying_of(group.first)
            if (says is not None and not says.local) or not _is_float(group.first):
                continue
            axes = _whole_axes(placed) & self._layouts.bytes.differ_along(group)
            axes -= self.data_terms(group, placed)
            if axes and self._is_sum(group, placed, axes, whole):
                suspects[group.key] = axes
            elif axes and self._sketched and self._is_shared_gradient(group, axes):
                suspects[group.key] = axes
                taken.add(group.key)
        reduced = self._reduced_later(suspects) if suspects else set[TensorKey]()
        reduced |= {key for key in suspects if key in taken}
        return {key: axes for key, axes in suspects.items() if key in reduced}

    def _is_shared_gradient(self, group: Group, axes: set[int]) -> bool:
        """Whether ranks share a part: each one's own heads give it its gradient.

        Values would show whether the sum agrees; summaries of several parts cannot.
        """
        gradient = group.key.port in (*ACTIVATION_GRADIENTS, "param_grad")
        return gradient and axes <= self._layouts.shared(group)

    def _is_sum(
        self, group: Group, placed: Sequence[Placed], axes: set[int], whole: Record
    ) -> bool:
        found, alone = self._joined(group, _with(placed, axes, _SUM)), self._joined(group, placed)
        if found is None or alone is None:
            return False
        return any(
            distance(wanted, found) < _AGREE and distance(wanted, alone) > _APART
            for wanted in (self._whole(whole, placed), self._added(whole, placed))
            if wanted is not None
        )

    def _reduced_later(self, suspects: Mapping[TensorKey, set[int]]) -> set[TensorKey]:
        """Those of which the run itself shows that somebody adds them up.

        What is computed next from terms that nobody added differs from rank to rank, or from the
        other run where ranks have other tokens. What is cut otherwise (heads, features) may have
        come another way, and says nothing.
        """
        found: set[TensorKey] = set()
        for backward in (False, True):
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
                        found.add(group.key)
                elif self._speaks(group):
                    following = group
        # What one backward pass contributes is not added up yet; what the optimizer sees must be.
        return found | {key for key in suspects if key.port == "param_grad"}

    def _speaks(self, group: Group) -> bool:
        placed, _ = self._layouts.lie(group)
        split = self._layouts.split
        return placed is not None and all(
            how.kind != "shard" or how.axis == split.get(n, 0 if n in self._layouts.data else -1)
            for n, how in enumerate(placed)
        )

    def _is_sound(self, group: Group) -> bool:
        placed, _ = self._layouts.lie(group)
        if placed is None:
            return False
        if _whole_axes(placed) & self._layouts.bytes.differ_along(group):
            return False
        whole = self._layouts.whole(group)
        if all(how.kind != "shard" for how in placed) or whole is None:
            return True
        many = self.rows_apart(group, placed) if group.key.port in ACTIVATION_GRADIENTS else 1
        many = many if self.averaged else 1
        made, wanted = self._joined(group, placed), self._whole(whole, placed)
        if made is not None and wanted is not None:
            return distance(wanted, made / many) < _AGREE
        return self._sketched and self._has_the_size_of(group, placed, whole, many)

    def _has_the_size_of(
        self, group: Group, placed: Sequence[Placed], whole: Record, many: int
    ) -> bool:
        """Whether shards of which only summaries were kept are together as large as the whole."""
        try:
            source = join(group.parts, placed)[0]
        except DoesNotFit:
            return False
        other = self._layouts.other
        origin: object = whole
        if isinstance(other, SeenRun):
            origin = origins_of(other).get(whole.key, whole)
            origin = origin.recipe if isinstance(origin, Gathered) else origin
        wanted = _size(origin) if isinstance(origin, Record | Recipe) else math.nan
        if (
            other is not None
            and math.isnan(wanted)
            and (all_of_it := values_of(other, whole)) is not None
        ):
            wanted = float(np.linalg.norm(all_of_it.reshape(-1)))
        return wanted > 0 and abs(_size(source) / many / wanted - 1) < _AGREE

    # --- values

    def _joined(self, group: Group, placed: Sequence[Placed]) -> F64 | None:
        try:
            source = join(group.parts, placed)[0]
        except DoesNotFit:
            return None
        source = self.in_order(group, source, placed)
        thin = thinned(source.shape, placed)
        return values_of(self._layouts.run, source, sketched=self._sketched, thin=thin)

    def _added(self, record: Record, placed: Sequence[Placed]) -> F64 | None:
        """The sum of what the other run's ranks hold, where they may hold terms as well."""
        other = self._layouts.other
        if not isinstance(other, SeenRun):
            return None
        origin = origins_of(other).get(record.key)
        if not isinstance(origin, Copies) or len(origin.sources) < 2:
            return None
        if len({source.shape for source in origin.sources}) > 1:
            return None
        total = Recipe(origin.sources, (Step("sum"),), origin.sources[0].shape)
        thin = thinned(total.shape, placed)
        return values_of(other.whole, total, sketched=self._sketched, thin=thin)

    def _whole(self, record: Record, placed: Sequence[Placed]) -> F64 | None:
        """Values of the other run, also where that is itself gathered from ranks."""
        other = self._layouts.other
        if other is None:
            return None
        origin: object = record
        if isinstance(other, SeenRun):
            origin, other = origins_of(other).get(record.key, record), other.whole
        if isinstance(origin, Gathered):
            origin = origin.recipe
        elif isinstance(origin, Copies):
            origin = origin.sources[0]
        if not isinstance(origin, Record | Recipe):
            return None
        thin = thinned(origin.shape, placed)
        return values_of(other, origin, sketched=self._sketched, thin=thin)


def _size(source: Source) -> float:
    """The norm of shards by their summaries; nan where one has none."""
    parts = source.records if isinstance(source, Recipe) else (source,)
    sizes = [math.nan if part.summary is None else part.summary.l2 for part in parts]
    return math.nan if any(map(math.isnan, sizes)) else math.hypot(*sizes)


def _is_float(record: Record) -> bool:
    dtype = DTYPES.get(record.dtype)
    return dtype is not None and dtype.is_floating


def _whole_axes(placed: Sequence[Placed]) -> set[int]:
    return {n for n, how in enumerate(placed) if how.kind == "replicate"}


def _with(placed: Sequence[Placed], axes: set[int], how: Placed) -> list[Placed]:
    return [how if n in axes else each for n, each in enumerate(placed)]


def _places(group: Group, axes: set[int]) -> int:
    """How many places a group has along axes."""
    return math.prod(len({at[axis] for at in group.parts}) for axis in axes)
