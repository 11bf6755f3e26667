"""How each tensor of a run of many ranks lies: by what it says of itself, then by shape.

A plain tensor is laid over the mesh so that its parts make the shape that the other run has. Which
axes of the mesh had other data the first inputs say: those are rows, or tokens. Reads no values.
"""

from __future__ import annotations

from collections.abc import Mapping

from driftline.alignment.joining import DoesNotFit, Shape, join, ways
from driftline.alignment.rank_groups import Bytes, Group, groups_of
from driftline.alignment.rank_mesh import REPLICATE, Lying, Placed, lying_of, mesh_of
from driftline.alignment.stages import stages_of
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

Way = tuple[Placed, ...]
_FIRST_INPUTS = 4
_NO_TARGETS: Mapping[TensorKey, Shape] = {}


class Layouts:
    """The tensors of a run, each with its parts at their places.

    Args:
        run: Of many ranks.
        other: What it is compared with; None where that is not one either.
        onto: Rank and process to see everything as.
        targets: Shapes of wholes, where they are known from elsewhere.
        calls: Whether the calls of a step are to be made one, too.

    Attributes:
        mesh: Where the ranks stand.
        groups: The tensors.
        wholes: What the other run has of each.
        data: Axes of the mesh along which the first inputs differ; the axis of micro-batches.
        split: Of those, the axis of the inputs that is cut.
        notes: What was concluded about the run as a whole.
    """

    def __init__(
        self,
        run: Run,
        other: Run | None,
        onto: tuple[int, int],
        targets: Mapping[TensorKey, Shape] = _NO_TARGETS,
        *,
        calls: bool = False,
    ) -> None:
        self.run = run
        self.other = other
        self.calls = calls
        self.mesh = mesh_of(run)
        stages = stages_of(run, other)
        self.groups = groups_of(run, other, self.mesh, stages, onto, calls=calls)
        self.notes: list[str] = [] if stages is None else [stages.note()]
        self.wholes: dict[TensorKey, Record] = {}
        if other is not None:
            self.wholes = {record.key: record for record in other.records}
        self.bytes = Bytes(run)
        self._targets = targets
        self._known_ways: dict[object, Way | None] = {}
        self.data, self.split = self._data_axes()
        self._placed = {group.key: self._lie(group) for group in self.groups}

    def lie(self, group: Group) -> tuple[Way | None, str]:
        """How a tensor lies, by axis of its places, and what says so; None where nothing does."""
        return self._placed[group.key]

    def possible(self) -> dict[TensorKey, set[Shape]]:
        """Every shape that the parts of a tensor could make, for the most usual ways."""
        found: dict[TensorKey, set[Shape]] = {}
        for group in self.groups:
            says = lying_of(group.first)
            known = {} if says is None else self._known(says)
            if known:
                shape = says.shape if says is not None else group.first.shape
                found[group.key] = {shape, *self._made(group, known)}
                continue
            differ = self.bytes.differ_along(group)
            same = {n: REPLICATE for n in range(len(group.axes)) if n not in differ}
            found[group.key] = self._made(group, same)
        return found

    def _made(self, group: Group, known: Mapping[int, Placed]) -> set[Shape]:
        """Shapes that come of cutting along any axes that are not known."""
        made: set[Shape] = set()
        rank = len(group.first.shape)
        free = [n for n in range(len(group.axes)) if n not in known]
        tries: list[dict[int, Placed]] = [dict(known)]
        for n in free:
            cuts = [REPLICATE, *(Placed("shard", axis) for axis in range(rank))]
            tries = [{**each, n: cut} for each in tries for cut in cuts]
        for each in tries[:256]:
            try:
                whole = join(group.parts, [each[n] for n in range(len(group.axes))])
            except DoesNotFit:
                continue
            made.add(whole[0].shape)
        return made

    def _lie(self, group: Group) -> tuple[Way | None, str]:
        says = lying_of(group.first)
        known = {} if says is None else self._known(says)
        target = self._targets.get(group.key)
        if target is None and (whole := self.wholes.get(group.key)) is not None:
            target = whole.shape
        if target is None and says is not None and known:
            target = says.shape
        how = "as the tensors say" if known else "by shape"
        if target is not None and (best := self._best(group, target, known)) is not None:
            return best, how
        unknown = tuple(known.get(axis, REPLICATE) for axis in range(len(group.axes)))
        if known or len({part.shape for part in group.records}) == 1:
            return unknown, how
        return None, how

    def _best(self, group: Group, target: Shape, known: Mapping[int, Placed]) -> Way | None:
        shapes = tuple((at, part.shape) for at, part in group.parts.items())
        about = (shapes, target, tuple(known.items()))
        if about not in self._known_ways:
            found = ways(group.parts, target, known, len(group.axes))
            self._known_ways[about] = min(found, key=self._strange, default=None)
        return self._known_ways[about]

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

    def _strange(self, way: Way) -> int:
        """Of several ways the usual one: other data are rows or tokens, other weights are not."""
        cost = 0
        for axis, how in enumerate(way):
            if how.kind == "shard":
                cost += 2 * how.axis if axis in self.data else (3 if how.axis == 0 else 0)
        return cost

    def _data_axes(self) -> tuple[set[int], dict[int, int]]:
        self.data = found = {len(self.mesh.names)}
        split: dict[int, int] = {}
        inputs = [g for g in self.groups if g.key.port == "input" and not g.first.placement]
        for group in inputs[:_FIRST_INPUTS]:
            differ = self.bytes.differ_along(group)
            found |= differ
            for axis, how in enumerate(self._lie(group)[0] or ()):
                if axis in differ and how.kind == "shard":
                    split.setdefault(axis, how.axis)
        return found, split
