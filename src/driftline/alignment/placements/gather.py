"""Gathering: the parts of a distributed run become tensors; shards are joined and terms added.

`layouts` finds the placement of a tensor by shape, and `evidence` adds what values show. This file
converts both to the origins that a view needs. A replica that differs stays a replica, so that the
comparison reports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.normalise.view import Copies, Gathered, Origin, Unjoinable
from driftline.alignment.placements.evidence import ACTIVATION_GRADIENTS, Evidence
from driftline.alignment.placements.groups import Group
from driftline.alignment.placements.join import (
    DoesNotFit,
    Shape,
    is_called_fused,
    join,
    parts_by_values,
    positions,
    shapes_text,
)
from driftline.alignment.placements.layouts import WEIGHTS, Layouts
from driftline.alignment.placements.mesh import AxisPlacement, Coordinate
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_DONE = {"shard": "joined along axis {}", "sum": "summed", "mean": "averaged"}
_NO_TARGETS: Mapping[TensorKey, Shape] = {}


class Decision(NamedTuple):
    """The decision about one tensor.

    Attributes:
        origin: Its origin.
        shape: Shape of the complete tensor.
        word: Label in the count that the plan prints.
    """

    origin: Origin
    shape: Shape
    word: str


class Gathering:
    """Joins the tensors of a distributed run.

    Args:
        run: The distributed run.
        other: The run it is compared with; None if its shapes are no evidence.
        onto: Rank and process of the joined tensors.
        targets: Shapes of complete tensors, if they are known from elsewhere.
        calls: Whether the calls of a step are joined, too.
        averaged: Whether gradients of different data are averaged, if the other run does not show
            it.

    Attributes:
        decided: Whether the other run showed that, or nothing needed to be shown.
    """

    def __init__(
        self,
        run: Run,
        other: Run | None,
        onto: tuple[int, int],
        targets: Mapping[TensorKey, Shape] = _NO_TARGETS,
        *,
        calls: bool = False,
        averaged: bool = True,
    ) -> None:
        self._layouts = Layouts(run, other, onto, targets, calls=calls)
        self._evidence = Evidence(self._layouts, averaged=averaged)
        self.decided = self._evidence.decided
        self.mesh, self.groups = self._layouts.mesh, self._layouts.groups
        present = {record.key.rank for record in run.records}
        # Ranks of the mesh without any stored tensor: they crashed, or were not captured.
        self._lost = [rank for rank in self.mesh.ranks if rank not in present]
        self._lost_by_cut: dict[frozenset[int], dict[Coordinate, int]] = {}
        self._fused: dict[str, tuple[int, ...]] = {}
        self._fused_notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """Conclusions about the whole run, one sentence each."""
        return [*self._layouts.notes, *self._evidence.notes, *self._fused_notes]

    def decide(self, group: Group) -> Decision:
        """Decide what a group is: one tensor, several copies of it, or parts that do not fit."""
        # Flat pieces first: their shapes fit no axis of the tensor, so the usual search would fail.
        if (flat := self._layouts.flat(group)) is not None:
            return Decision(_origin([flat]), flat.shape, "joined from flat pieces (by shape)")
        placed, how = self._layouts.placement_of(group)
        if placed is None:
            return self._unjoinable(group)
        placed = self._with_terms(group, placed)
        # Checked before joining, because the remaining parts may fit together and still be too few.
        if why := self._why_incomplete(group, placed):
            return self._unjoinable(group, why)
        try:
            sources = join(group.parts, placed)
        except DoesNotFit as trouble:
            return self._unjoinable(group, str(trouble))
        sources = [self._finished(group, source, placed) for source in sources]
        word = self._label(group, placed, how, len(sources))
        return Decision(_origin(sources), sources[0].shape, word)

    def _why_incomplete(self, group: Group, placed: Sequence[AxisPlacement]) -> str:
        """Why a lost rank leaves a tensor incomplete; empty if the tensor is complete."""
        if not self._lost:
            return ""
        wanted_record = self._layouts.counterpart(group)
        cut = frozenset(n for n, how in enumerate(placed) if how.kind != "replicate")
        # Computed once for each set of cut axes. Along these axes, a lost rank removes a part from
        # its neighbours; replicas elsewhere are complete.
        if cut not in self._lost_by_cut:
            places = ((self.mesh.coordinates[rank], rank) for rank in self._lost)
            self._lost_by_cut[cut] = {
                _drop_axes(coordinate, cut): rank for coordinate, rank in places
            }
        lost_ranks, axes = self._lost_by_cut[cut], len(self.mesh.names)
        for coordinate in group.parts if cut else ():
            if (rank := lost_ranks.get(_drop_axes(coordinate[:axes], cut))) is not None:
                axis = min(cut)
                # If it is cut along several axes, or into micro-batches, a part has no single
                # number.
                if len(cut) > 1 or axis >= axes:
                    return "a part is missing"
                part = self.mesh.coordinates[rank][axis] + 1
                return f"part {part} of {self.mesh.sizes[axis]} is missing"
        if not cut and wanted_record is not None and wanted_record.shape != group.first.shape:
            return "the parts that are here do not make the whole"
        return ""

    def _unjoinable(self, group: Group, why: str = "") -> Decision:
        records = group.records
        why = why or f"the ranks' shapes differ, {shapes_text(records)}, and make no whole"
        present = {record.key.rank for record in records}
        if gone := [rank for rank in self.mesh.ranks if rank not in present]:
            shown = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
            who = f"rank{'s' if len(gone) > 1 else ''} {shown}"
            # A rank without any tensor crashed; a rank with other tensors only lacks this one.
            lost = not {record.key.rank for record in self._layouts.run.records} & set(gone)
            why += f"; the values are lost with {who}" if lost else f"; {who} left nothing of it"
        return Decision(Unjoinable(records, why), records[0].shape, "that do not fit together")

    def _label(self, group: Group, placed: Sequence[AxisPlacement], how: str, copies: int) -> str:
        axes = [
            f"{_DONE[placement.kind].format(placement.axis)} over {group.axes[n]}"
            for n, placement in enumerate(placed)
            if placement.kind in _DONE and len({coordinate[n] for coordinate in group.parts}) > 1
        ]
        if not axes:
            return "replicas" if copies > 1 else "of one rank"
        return f"{' and '.join(axes)} ({how})"

    def _with_terms(
        self, group: Group, placed: tuple[AxisPlacement, ...]
    ) -> tuple[AxisPlacement, ...]:
        data = self._evidence.data_terms(group, placed)
        terms = self._evidence.terms.get(group.key, set[int]())
        kind = AxisPlacement("mean" if self._evidence.averaged else "sum")
        return tuple(
            kind if n in data else AxisPlacement("sum") if n in terms else how
            for n, how in enumerate(placed)
        )

    def _finished(self, group: Group, source: Source, placed: Sequence[AxisPlacement]) -> Source:
        """A joined source with rows and fused parts in order, and with scaled gradients."""
        source = self._in_projection_order(
            group, self._evidence.in_order(group, source, placed), placed
        )
        if not self._evidence.averaged:
            return source
        # With averaged gradients, the gradient of an activation was divided by the number of ranks
        # too.
        many = 1
        if group.key.port in ACTIVATION_GRADIENTS:
            many = self._evidence.rows_apart(group, placed)
        if group.key.port in (*ACTIVATION_GRADIENTS, "param_grad"):
            many *= self._losses_of_others(group)
        if many < 2:
            return source
        recipe = source if isinstance(source, Recipe) else start(source)
        return recipe.then(Step("times", factor=1 / many), shape=recipe.shape)

    def _losses_of_others(self, group: Group) -> int:
        """Number of ranks whose losses add up in the gradients of a module that one rank has.

        An expert is on one rank and gets tokens of all ranks, each of which has its own mean.
        """
        return math.prod(
            size
            for n, size in enumerate(self.mesh.sizes)
            if n in self._layouts.data and len({coordinate[n] for coordinate in group.parts}) == 1
        )

    def _in_projection_order(
        self, group: Group, source: Source, placed: Sequence[AxisPlacement]
    ) -> Source:
        """Put a fused projection's shards in order: each rank has a piece of q, of k and of v."""
        key = group.key
        cut = [how for how in placed if how.kind == "shard"]
        if len(cut) != 1 or not isinstance(source, Recipe) or not is_called_fused(key.site):
            return source
        axis, shards = cut[0].axis, source.sources
        records = [shard for shard in shards if isinstance(shard, Record)]
        # Only a plain join of stored shards can be put in order; a join of joins has lost the
        # ranks.
        if len(records) != len(shards) or [step.kind for step in source.steps] != ["concat"]:
            return source
        if key.port == "input" or (key.port == "param" and axis and "weight" in key.slot):
            return source
        if key.site not in self._fused:
            self._fused[key.site] = self._fused_parts(key)
        parts = self._fused[key.site]
        places = positions([shard.shape[axis] for shard in records], parts) if parts else None
        if places is None:
            return source
        # One note for the run, because all layers of a model are fused in the same way.
        if not self._fused_notes:
            self._fused_notes.append(
                f"each rank holds its piece of {len(parts)} parts of '{key.site}' and its like: "
                "so joined they agree, rank after rank they do not; "
                f"--placement 'SITE=shard(-1, {':'.join(map(str, parts))})' says it"
            )
        return source.then(Step("select", axis, numbers=places), shape=source.shape)

    def _fused_parts(self, key: TensorKey) -> tuple[int, ...]:
        other = self._layouts.other
        for group in self.groups if other is not None else ():
            group_key, wanted_record = group.key, self._layouts.counterpart(group)
            placed, _ = self._layouts.placement_of(group)
            if (
                group_key.site != key.site
                or group_key.port != "output"
                or wanted_record is None
                or placed is None
            ):
                continue
            cut = [n for n, how in enumerate(placed) if how.kind == "shard"]
            if (
                len(cut) == 1
                and placed[cut[0]].axis == len(wanted_record.shape) - 1
                and other is not None
            ):
                return parts_by_values(self._layouts.run, group.records, other, wanted_record)
        return ()


_PLACED_LIKE = {
    "param_grad": "param",
    "optimizer_grad": "param",
    "grad_output": "output",
    "grad_input": "input",
}


def common_shapes(
    first: Run, second: Run, onto: tuple[int, int], *, calls: bool = False
) -> dict[TensorKey, Shape]:
    """Shapes that the parts of both runs can make; of several shapes, the one with the lowest cost.

    A gradient gets the shape of the tensor that it belongs to, if its parts can make it.
    """
    first_costs, second_costs = (
        Layouts(run, None, onto, calls=calls).possible() for run in (first, second)
    )
    shapes: dict[TensorKey, Shape] = {}
    made: dict[tuple[object, ...], Shape] = {}
    # Gradients come last, because they follow the shape of the tensor that they belong to.
    for key in sorted(
        first_costs.keys() & second_costs.keys(), key=lambda key: key.port in _PLACED_LIKE
    ):
        common = first_costs[key].keys() & second_costs[key].keys()
        # Weights are equal in every call, so all calls share their shape.
        call = (0, 0) if key.port in WEIGHTS else (key.step, key.visit)
        like = made.get((key.site, _PLACED_LIKE.get(key.port, ""), key.slot, *call))
        if like is None or like not in common:
            # The shape itself breaks a tie, so that the choice does not depend on the order of a
            # set.
            cost = {shape: first_costs[key][shape] + second_costs[key][shape] for shape in common}
            like = min(common, key=lambda shape: (cost[shape], shape), default=None)
        if like is not None:
            shapes[key] = made[key.site, key.port, key.slot, *call] = like
    return shapes


def _drop_axes(coordinate: Coordinate, axes: frozenset[int]) -> Coordinate:
    return tuple(place for n, place in enumerate(coordinate) if n not in axes)


def _origin(sources: Sequence[Source]) -> Origin:
    if len(sources) == 1 and isinstance(sources[0], Recipe):
        return Gathered(sources[0])
    return Copies(tuple(sources))
