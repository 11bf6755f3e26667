"""How the tensors of a run of many ranks lie, concluded: shards joined, terms added, replicas kept.

What a tensor says of itself comes first (`rank_mesh.lying_of`). A plain one is laid over the mesh
so that its parts make the shape that the other run has. Which axes of the mesh had other data the
inputs say. Values are asked for three things only, each for a run or a tensor as a whole: in which
order the ranks had the rows, whether gradients of other data are averaged or added, and whether
plain tensors that differ are terms of a sum that is taken later. A replica that differs stays one:
that is a finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.alignment.joining import DoesNotFit, distance, join, shapes_said, values_of, ways
from driftline.alignment.rank_groups import MICRO, Bytes, Group, groups_of, in_execution
from driftline.alignment.rank_mesh import REPLICATE, Lying, Placed, lying_of, mesh_of
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.alignment.shard_parts import is_called_fused, parts_by_values, positions
from driftline.alignment.sides import Apart, Copies, Gathered, Origin, SeenRun, origins_of
from driftline.alignment.stages import stages_of
from driftline.numerics.dtypes import DTYPES
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

_AGREE, _APART = 0.02, 0.1
_VOTES = 6
_DONE = {"shard": "joined along axis {}", "sum": "summed", "mean": "averaged"}
_FIRST_INPUTS = 4
_ACTIVATION_GRADIENTS = ("grad_input", "grad_output")
_BACKWARD = (*_ACTIVATION_GRADIENTS, "param_grad", "optimizer_grad")


class Decision(NamedTuple):
    """What a group is taken for.

    Attributes:
        origin: As the plan needs it.
        shape: Of the whole.
        word: For the count that the plan prints.
    """

    origin: Origin
    shape: tuple[int, ...]
    word: str


class Gathering:
    """A run of many ranks, and what is concluded about it.

    Args:
        run: It.
        other: What it is compared with; empty where that says nothing about shapes.
        onto: Rank and process to see everything as.

    Attributes:
        notes: What was concluded about the run as a whole, one sentence each.
    """

    def __init__(self, run: Run, other: Run | None, onto: tuple[int, int]) -> None:
        self.run = run
        self._other = other
        self.mesh = mesh_of(run)
        stages = None if other is None else stages_of(run, other)
        self.groups = groups_of(run, other, self.mesh, stages, onto)
        self.notes: list[str] = [] if stages is None else [stages.note()]
        self._wholes = {} if other is None else {record.key: record for record in other.records}
        self._bytes = Bytes(run)
        self._ways: dict[object, tuple[Placed, ...] | None] = {}
        self._fused: dict[str, tuple[int, ...]] = {}
        self._fused_said = False
        self._data = self._data_axes()
        self._rows: dict[int, tuple[int, ...]] = {}
        self._order_of_rows()
        self._placed = {group.key: self._lie(group) for group in self.groups}
        self._averaged = self._convention()
        self._summed = self._terms()

    # --- one tensor

    def decide(self, group: Group) -> Decision:
        """What a group is: one whole, several copies of it, or parts that do not fit together."""
        placed, how = self._placed[group.key]
        if placed is None:
            return self._apart(group)
        placed = self._with_terms(group, placed)
        try:
            sources = join(group.parts, placed)
        except DoesNotFit as trouble:
            return self._apart(group, str(trouble))
        sources = [self._finished(group, source, placed) for source in sources]
        return Decision(_origin(sources), sources[0].shape, self._word(placed, how, len(sources)))

    def _apart(self, group: Group, why: str = "") -> Decision:
        records = group.records
        why = why or f"the ranks' shapes differ, {shapes_said(records)}, and make no whole"
        if lacking := self._lacking(group):
            why += f"; {lacking}"
        return Decision(Apart(records, why), records[0].shape, "that do not fit together")

    def _lacking(self, group: Group) -> str:
        here = {record.key.rank for record in group.records}
        gone = [rank for rank in self.mesh.ranks if rank not in here]
        if not gone:
            return ""
        shown = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
        return f"rank{'s' if len(gone) > 1 else ''} {shown} left nothing of it"

    def _word(self, placed: Sequence[Placed], how: str, copies: int) -> str:
        names = (*self.mesh.names, MICRO)
        axes = [
            f"{_DONE[each.kind].format(each.axis)} over {names[n]}"
            for n, each in enumerate(placed)
            if each.kind in _DONE
        ]
        if not axes:
            return "replicas" if copies > 1 else "of one rank"
        return f"{' and '.join(axes)} ({how})"

    # --- how it lies

    def _lie(self, group: Group) -> tuple[tuple[Placed, ...] | None, str]:
        """How the parts of a group lie, and what says so."""
        whole = self._wholes.get(group.key)
        says = lying_of(group.first)
        known = {} if says is None else self._known(says)
        target = whole.shape if whole is not None else None
        if target is None and says is not None and known:
            target = says.shape
        how = "as the tensors say" if known else "by shape"
        if target is not None:
            shapes = tuple((at, part.shape) for at, part in group.parts.items())
            about = (shapes, target, tuple(known.items()), group.key.port in _BACKWARD)
            if about not in self._ways:
                found = ways(group.parts, target, known, len(group.axes))
                self._ways[about] = min(found, key=self._strange, default=None)
            if (best := self._ways[about]) is not None:
                return best, how
        unknown = tuple(known.get(axis, REPLICATE) for axis in range(len(group.axes)))
        shapes_here = {part.shape for part in group.records}
        if known or len(shapes_here) == 1:
            return unknown, how
        return None, how

    def _known(self, says: Lying) -> dict[int, Placed]:
        """What a record says, by axis of the run's mesh. Terms in a plain tensor are a question."""
        axes = self.mesh.axes_of(says)
        if not axes:
            return {}
        return {
            axis: how
            for axis, how in zip(axes, says.placed, strict=True)
            if how.kind != "unknown" and not (says.local and how.kind in ("sum", "mean"))
        }

    def _strange(self, way: tuple[Placed, ...]) -> int:
        """Of several ways the usual one: other data are rows, other weights are not."""
        cost = 0
        for axis, how in enumerate(way):
            if how.kind == "shard":
                cost += 2 * how.axis if axis in self._data else (3 if how.axis == 0 else 0)
        return cost

    # --- what is known of the run as a whole

    def _data_axes(self) -> set[int]:
        """Axes of the mesh along which the first inputs differ; micro-batches always do."""
        found = {len(self.mesh.names)}
        inputs = [g for g in self.groups if g.key.port == "input" and not g.first.placement]
        for group in inputs[:_FIRST_INPUTS]:
            found |= self._bytes.differ_along(group)
        return found

    def _order_of_rows(self) -> None:
        """Which row of the joined inputs is which row of the other run's; by step."""
        for group in self.groups:
            whole = self._wholes.get(group.key)
            step = group.key.step
            if group.key.port != "input" or whole is None or step in self._rows:
                continue
            placed, _ = self._lie(group)
            if placed is None or not self._is_split(placed) or not whole.shape:
                continue
            made = values_of(self.run, join(group.parts, placed)[0])
            wanted = self._whole_values(whole)
            if made is None or wanted is None or made.shape != wanted.shape:
                continue
            self._rows[step] = _row_order(made, wanted)
            if self._rows[step] and len(self._rows) == 1:
                self.notes.append(
                    "the ranks' rows together are the other run's in another order (as samplers "
                    "deal them out): put in its order by the inputs"
                )

    def _is_split(self, placed: Sequence[Placed]) -> bool:
        """Whether ranks with other data hold its rows."""
        return any(
            how.kind == "shard" and how.axis == 0 and axis in self._data
            for axis, how in enumerate(placed)
        )

    def _convention(self) -> bool:
        """Whether losses, and so gradients, of ranks with other data are averaged."""
        votes = Counter[bool]()
        weights = [g for g in self.groups if g.key.port == "param_grad"]
        others = [g for g in self.groups if g.key.port in _ACTIVATION_GRADIENTS]
        for group in [*weights, *others]:
            if sum(votes.values()) >= _VOTES:
                break
            placed, _ = self._placed[group.key]
            whole = self._wholes.get(group.key)
            if placed is None or whole is None:
                continue
            axes = self._data_terms(group, placed)
            rows = {n for n, how in enumerate(placed) if how.kind == "shard" and n in self._data}
            many = _places(group, axes if axes else rows)
            if many < 2 or (not axes and group.key.port == "param_grad"):
                continue
            summed = [Placed("sum") if n in axes else how for n, how in enumerate(placed)]
            wanted = self._whole_values(whole)
            try:
                found = values_of(
                    self.run, self._in_order(group, join(group.parts, summed)[0], placed)
                )
            except DoesNotFit:
                continue
            if found is None or wanted is None:
                continue
            added, averaged = distance(wanted, found), distance(wanted, found / many)
            if min(added, averaged) < _AGREE:
                votes[averaged < added] += 1
        if votes and len(votes) == 1:
            word = "the mean" if True in votes else "the sum"
            self.notes.append(
                f"gradients of ranks that had other data: {word} of them is the other run's"
            )
        return votes[True] >= votes[False]

    def _data_terms(self, group: Group, placed: Sequence[Placed]) -> set[int]:
        """Axes of other data along which a group holds terms of one gradient or loss."""
        if group.key.port != "param_grad" and (group.first.shape or group.key.port != "output"):
            return set()
        if not DTYPES.get(group.first.dtype, DTYPES["int64"]).is_floating:
            return set()
        whole = {n for n, how in enumerate(placed) if how.kind == "replicate"}
        return whole & self._data & self._bytes.differ_along(group)

    def _terms(self) -> dict[TensorKey, set[int]]:
        """Groups of plain tensors that are terms of a sum along axes that had the same data."""
        suspects: dict[TensorKey, set[int]] = {}
        for group in self.groups:
            placed, _ = self._placed[group.key]
            whole = self._wholes.get(group.key)
            if placed is None or whole is None or group.key.port in ("input", "param"):
                continue
            says = lying_of(group.first)
            if says is not None and not says.local:
                continue
            if not DTYPES.get(group.first.dtype, DTYPES["int64"]).is_floating:
                continue
            axes = {n for n, how in enumerate(placed) if how.kind == "replicate"} - self._data
            axes &= self._bytes.differ_along(group)
            if axes and self._is_sum(group, placed, axes, whole):
                suspects[group.key] = axes
        if not suspects:
            return {}
        reduced = self._reduced_later(suspects)
        return {key: axes for key, axes in suspects.items() if key in reduced}

    def _is_sum(
        self, group: Group, placed: Sequence[Placed], axes: set[int], whole: Record
    ) -> bool:
        summed = [Placed("sum") if n in axes else how for n, how in enumerate(placed)]
        wanted = self._whole_values(whole)
        try:
            found = values_of(self.run, self._in_order(group, join(group.parts, summed)[0], placed))
            alone = values_of(self.run, self._in_order(group, join(group.parts, placed)[0], placed))
        except DoesNotFit:
            return False
        if wanted is None or found is None or alone is None:
            return False
        return distance(wanted, found) < _AGREE and distance(wanted, alone) > _APART

    def _reduced_later(self, suspects: Mapping[TensorKey, set[int]]) -> set[TensorKey]:
        """Those of which the run itself shows that somebody adds them up.

        What is computed next from terms that nobody added differs from rank to rank.
        """
        found: set[TensorKey] = set()
        for backward in (False, True):
            flow = [
                group
                for group in in_execution(self.groups)
                if (group.key.port in _ACTIVATION_GRADIENTS) is backward
                and group.key.port not in ("param", "param_grad", "optimizer_grad")
                and self._placed[group.key][0] is not None
            ]
            sound = False
            for group in reversed(flow):
                if group.key not in suspects:
                    placed = self._placed[group.key][0] or ()
                    if any(
                        how.kind == "shard" for n, how in enumerate(placed) if n not in self._data
                    ):
                        continue
                    differs = self._bytes.differ_along(group) - self._data
                    sound = not differs
                elif sound:
                    found.add(group.key)
        # What one backward pass contributes is not added up yet; what the optimizer sees must be.
        return found | {key for key in suspects if key.port == "param_grad"}

    # --- from parts to the whole

    def _with_terms(self, group: Group, placed: tuple[Placed, ...]) -> tuple[Placed, ...]:
        data = self._data_terms(group, placed)
        terms = self._summed.get(group.key, set[int]())
        if not data and not terms:
            return placed
        kind = Placed("mean" if self._averaged else "sum")
        return tuple(
            kind if n in data else Placed("sum") if n in terms else how
            for n, how in enumerate(placed)
        )

    def _finished(self, group: Group, source: Source, placed: Sequence[Placed]) -> Source:
        """A joined source with its rows in order, its fused parts apart, its gradients scaled."""
        source = self._in_order(group, source, placed)
        source = self._parted(group, source, placed)
        if self._averaged and group.key.port in _ACTIVATION_GRADIENTS:
            rows = {n for n, how in enumerate(placed) if how.kind == "shard" and n in self._data}
            if (many := _places(group, rows)) > 1:
                recipe = source if isinstance(source, Recipe) else start(source)
                return recipe.then(Step("times", factor=1 / many), shape=recipe.shape)
        return source

    def _in_order(self, group: Group, source: Source, placed: Sequence[Placed]) -> Source:
        order = self._rows.get(group.key.step, ())
        if not order or not isinstance(source, Recipe) or not self._is_split(placed):
            return source
        each, rest = divmod(source.shape[0], len(order))
        if rest or not each:
            return source
        numbers = tuple(row * each + n for row in order for n in range(each))
        return source.then(Step("select", 0, numbers=numbers), shape=source.shape)

    def _parted(self, group: Group, source: Source, placed: Sequence[Placed]) -> Source:
        """Shards of a fused projection: each rank has its piece of q, of k and of v."""
        key = group.key
        cut = [how for n, how in enumerate(placed) if how.kind == "shard" and n not in self._data]
        if len(cut) != 1 or not isinstance(source, Recipe) or not is_called_fused(key.site):
            return source
        axis, shards = cut[0].axis, source.sources
        records = [each for each in shards if isinstance(each, Record)]
        if len(records) != len(shards) or not source.steps or source.steps[0].kind != "concat":
            return source
        if key.port == "input" or (key.port == "param" and axis and "weight" in key.slot):
            return source
        if key.site not in self._fused:
            self._fused[key.site] = self._fused_parts(key)
        parts = self._fused[key.site]
        places = positions([each.shape[axis] for each in records], parts) if parts else None
        if places is None:
            return source
        if not self._fused_said:
            self._fused_said = True
            self.notes.append(
                f"each rank holds its piece of {len(parts)} parts of '{key.site}' and its like: "
                "so joined they agree, rank after rank they do not; "
                f"--placement 'SITE=shard(-1, {':'.join(map(str, parts))})' says it"
            )
        return source.then(Step("select", axis, numbers=places), shape=source.shape)

    def _fused_parts(self, key: TensorKey) -> tuple[int, ...]:
        if self._other is None:
            return ()
        for group in self.groups:
            at, whole = group.key, self._wholes.get(group.key)
            placed = self._placed[at][0]
            if at.site != key.site or at.port != "output" or whole is None or placed is None:
                continue
            cut = [n for n, how in enumerate(placed) if how.kind == "shard"]
            if len(cut) == 1 and placed[cut[0]].axis == len(whole.shape) - 1:
                return parts_by_values(self.run, group.records, self._other, whole)
        return ()

    def _whole_values(self, record: Record) -> np.ndarray | None:
        """Values of the other run, also where that is itself gathered from ranks."""
        if not isinstance(self._other, SeenRun):
            return None if self._other is None else values_of(self._other, record)
        origin = origins_of(self._other).get(record.key, record)
        if isinstance(origin, Gathered):
            return values_of(self._other.whole, origin.recipe)
        if isinstance(origin, Copies):
            return values_of(self._other.whole, origin.sources[0])
        return values_of(self._other.whole, origin) if isinstance(origin, Record) else None


def _origin(sources: Sequence[Source]) -> Origin:
    if len(sources) == 1 and isinstance(sources[0], Recipe):
        return Gathered(sources[0])
    return Copies(tuple(sources))


def _places(group: Group, axes: set[int]) -> int:
    """How many places a group has along axes."""
    return math.prod(len({at[axis] for at in group.parts}) for axis in axes)


def _row_order(made: np.ndarray, wanted: np.ndarray) -> tuple[int, ...]:
    """Where the rows of one lie in the other; empty where they lie alike, or where none says."""
    if np.array_equal(made, wanted):
        return ()
    rows: dict[bytes, list[int]] = {}
    for at, row in enumerate(np.ascontiguousarray(made)):
        rows.setdefault(row.tobytes(), []).append(at)
    order: list[int] = []
    for row in np.ascontiguousarray(wanted):
        places = rows.get(row.tobytes())
        if not places:
            return ()
        order.append(places.pop(0))
    return tuple(order)
