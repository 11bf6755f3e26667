"""Layouts: the placement of every tensor of a distributed run.

A tensor's own declaration comes first, then its shape: which ways of joining the parts give the
shape of the other run? Ranks may share parts, such as key-value heads: with more ranks than parts,
a place along a mesh axis is described by two numbers, the part and the copy (`Sharing`). The bytes
of a site's parameters and outputs show which ranks share. Only digests of values are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from driftline.alignment.placements.groups import MICRO, Bytes, Group, groups_of
from driftline.alignment.placements.join import DoesNotFit, Shape, fitting_placements, join
from driftline.alignment.placements.mesh import (
    REPLICATE,
    AxisPlacement,
    Coordinate,
    RecordPlacement,
    mesh_of,
    record_placement,
)
from driftline.alignment.placements.stages import stages_of
from driftline.alignment.recipe import Recipe, Step, joined
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run


class Shared(NamedTuple):
    """How the places along a mesh axis share parts.

    Attributes:
        axis: Axis of the mesh.
        many: Size of a group of neighbours.
        neighbours: Whether neighbours hold the same part; otherwise they hold different parts.
    """

    axis: int
    many: int
    neighbours: bool


class Sharing:
    """Finds ranks that share parts; the first tensors of a site decide for the others.

    Args:
        mesh_axes: Number of axes of the mesh.
        of: Digests of the tensors.
    """

    def __init__(self, mesh_axes: int, of: Bytes) -> None:
        self._mesh_axes = mesh_axes
        self._bytes = of
        self._by_site: dict[str, Shared] = {}

    def separated(self, group: Group, target: Shape) -> tuple[Group, int] | None:
        """The group with places given by part and copy, if its parts then make the target.

        Returns:
            The group, and the axis along which it holds copies.
        """
        fitting = [shared for shared in self._possible(group) if self._fits(group, shared, target)]
        if not fitting:
            return None
        # Most equal bytes decide, because several ways of sharing often fit the shape.
        most = max(fitting, key=lambda shared: self._equal(group, shared))
        # The first tensor of a site whose bytes agree decides for its gradients, whose bytes do
        # not.
        if self._equal(group, most):
            self._by_site.setdefault(group.key.site, most)
        site_sharing = self._by_site.get(group.key.site)
        best = site_sharing if site_sharing is not None and site_sharing in fitting else most
        separated = self._split_axis(group, best)
        return separated, _copies(best, separated)

    def shapes(self, group: Group) -> Iterator[tuple[int, Shape]]:
        """Shapes that shared parts would make along each axis, if bytes show that ranks share them.

        Gradients are terms and differ on all ranks, so the parameters and outputs of their site
        decide.
        """
        if (site_sharing := self._by_site.get(group.key.site)) is None:
            visible = (shared for shared in self._possible(group) if self._is_seen(group, shared))
            if (site_sharing := next(visible, None)) is None:
                return
            self._by_site[group.key.site] = site_sharing
        shape = group.first.shape
        if any(part.shape != shape for part in group.records):
            return
        parts = (
            _size(group, site_sharing.axis) // site_sharing.many
            if site_sharing.neighbours
            else site_sharing.many
        )
        for axis, size in enumerate(shape):
            yield axis, (*shape[:axis], size * parts, *shape[axis + 1 :])

    def _possible(self, group: Group) -> Iterator[Shared]:
        for axis in range(self._mesh_axes):
            size = _size(group, axis)
            # At least two parts with at least two copies; anything less is a plain shard or
            # replica.
            for many in range(2, min(size // 2, len(group.parts)) + 1):
                if size % many == 0:
                    yield Shared(axis, many, True)
                    yield Shared(axis, many, False)

    def _fits(self, group: Group, shared: Shared, target: Shape) -> bool:
        separated = self._split_axis(group, shared)
        fixed = {_copies(shared, separated): AxisPlacement("replicate")}
        return bool(fitting_placements(separated.parts, target, fixed, len(separated.axes)))

    def _equal(self, group: Group, shared: Shared) -> int:
        """Number of copies that are equal to the first one."""
        separated = self._split_axis(group, shared)
        axis = _copies(shared, separated)
        first: dict[Coordinate, str] = {}
        equal = 0
        for coordinate, record in separated.parts.items():
            name = self._bytes.of(record)
            rest = (*coordinate[:axis], 0, *coordinate[axis + 1 :])
            # An empty name means unknown bytes, which are equal to nothing.
            equal += rest in first and first[rest] == name != ""
            first.setdefault(rest, name)
        return equal

    def _is_seen(self, group: Group, shared: Shared) -> bool:
        """Whether the bytes show the sharing: copies are equal and parts are not."""
        separated = self._split_axis(group, shared)
        copies = _copies(shared, separated)
        parts = shared.axis if copies != shared.axis else len(separated.axes) - 1
        differ = self._bytes.differ_along(separated)
        return copies not in differ and parts in differ

    def _split_axis(self, group: Group, shared: Shared) -> Group:
        axis, many, micro = shared.axis, shared.many, self._mesh_axes
        parts = {
            (
                *coordinate[:axis],
                coordinate[axis] // many,
                *coordinate[axis + 1 : micro],
                coordinate[micro] if len(coordinate) > micro else 0,
                coordinate[axis] % many,
            ): record
            for coordinate, record in group.parts.items()
        }
        # The new axis goes last, after that of micro-batches, so that the numbers of mesh axes
        # stay.
        axes = (*group.axes[:micro], MICRO, f"neighbours on {group.axes[axis]}")
        return Group(group.key, dict(sorted(parts.items())), axes)


def _copies(shared: Shared, separated: Group) -> int:
    """The axis along which a separated group holds copies."""
    return len(separated.axes) - 1 if shared.neighbours else shared.axis


def _size(group: Group, axis: int) -> int:
    return 1 + max(coordinate[axis] for coordinate in group.parts)


Placements = tuple[AxisPlacement, ...]
WEIGHTS = frozenset({"param", "param_grad", "optimizer_grad"})
# Inputs of the first layers show where the data differ; later inputs repeat that.
_FIRST_INPUTS = 4
_SHARED, _TERMS, _ODD = 20, 20, 40
"""Costs of unlikely explanations: shared parts, terms of a sum, any other placement."""
_NO_TARGETS: Mapping[TensorKey, Shape] = {}


class Layouts:
    """The tensors of a distributed run, with the placement of each.

    Args:
        run: The distributed run.
        other: The run it is compared with; None if that is distributed, too.
        onto: Rank and process of the joined tensors.
        targets: Shapes of complete tensors, if they are known from elsewhere.
        calls: Whether the calls of a step are joined, too.

    Attributes:
        mesh: Coordinates of the ranks.
        groups: The tensors, each with its parts.
        wholes: Tensors of the other run, by every name of their slots.
        data: Mesh axes along which the first inputs differ, and the axis of micro-batches.
        split: Mesh axis of `data` → axis of the inputs that is cut along it.
        notes: Conclusions about the whole run.
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
            # The other run may identify a slot by position while this run identifies it by name.
            for record in other.records:
                if record.alias:
                    self.wholes.setdefault(record.key._replace(slot=record.alias), record)
        self.bytes = Bytes(run)
        self._targets = targets
        self._known_ways: dict[object, list[Placements]] = {}
        self._cut_by_site: dict[str, set[int]] = {}
        self._copies: dict[TensorKey, int] = {}
        self._sharing = Sharing(len(self.mesh.names), self.bytes)
        # Shared parts are separated before data axes are determined, which need the final places.
        self.groups = [self._by_part_and_copy(group) for group in self.groups]
        self.data, self.split = self._data_axes()
        self._placed = {group.key: self._find_placement(group) for group in self.groups}

    def counterpart(self, group: Group) -> Record | None:
        """The other run's tensor for a group, which may have the other name of the slot."""
        record = self.wholes.get(group.key)
        if record is None and (alias := group.first.alias):
            record = self.wholes.get(group.key._replace(slot=alias))
        return record

    def placement_of(self, group: Group) -> tuple[Placements | None, str]:
        """Placement of a tensor by mesh axis, None if unknown; and its source."""
        return self._placed[group.key]

    def shared(self, group: Group) -> set[int]:
        """Mesh axes along which ranks share the parts of a group's site."""
        if (copies := self._copies.get(group.key)) is not None:
            return {copies}
        cut = self._cut_by_site.get(group.key.site)
        return set() if not cut else set(range(len(self.mesh.names))) - cut

    def flat(self, group: Group) -> Recipe | None:
        """Recipe of a weight in flat pieces, as FSDP1 stores them; some ranks may hold nothing."""
        target = self._target(group)
        if (
            target is None
            or group.key.port not in WEIGHTS
            or record_placement(group.first) is not None
        ):
            return None
        pieces = [part for part in group.records if 0 not in part.shape]
        sizes = [part.shape[0] for part in pieces if len(part.shape) == 1]
        if len(sizes) < len(pieces) or sum(sizes) != math.prod(target) or not sizes:
            return None
        # A join along an axis is the simpler explanation, if it fits.
        if self._fitting_placements(group, target, {}):
            return None
        joined_up = joined(pieces, "concat", 0, (sum(sizes),))
        return joined_up.then(Step("reshape", numbers=target), shape=target)

    def possible(self) -> dict[TensorKey, dict[Shape, int]]:
        """Every shape that the parts of a tensor could make, with its cost."""
        return {group.key: self._possible(group) for group in self.groups}

    def _possible(self, group: Group) -> dict[Shape, int]:
        says = record_placement(group.first)
        declared = {} if says is None else self._known(says)
        # Equal bytes along a mesh axis mean replicas; only the other axes are open.
        differ = self.bytes.differ_along(group) - set(declared)
        alike = (n for n in range(len(group.axes)) if n not in differ and n not in declared)
        fixed = {**declared, **dict.fromkeys(alike, REPLICATE)}
        costs = dict.fromkeys(self._possible_shapes(group, fixed), _ODD)
        shape, last = group.first.shape, len(group.first.shape) - 1
        if differ and not declared and all(part.shape == shape for part in group.records):
            # Equal shapes with different bytes may be terms of a sum, unless they are parameters.
            costs[shape] = _ODD if group.key.port == "param" else _TERMS
        for axis, made in () if declared else self._sharing.shapes(group):
            costs[made] = _SHARED + self._unusual(group, axis, last)
        for axis in range(last + 1):
            cut = {n: self._cut_along(axis, n) for n in differ}
            try:
                joined_sources = join(
                    group.parts, [{**fixed, **cut}[n] for n in range(len(group.axes))]
                )
            except DoesNotFit:
                continue
            usual = min(costs.get(joined_sources[0].shape, _ODD), self._unusual(group, axis, last))
            costs[joined_sources[0].shape] = usual
        return costs

    def _cut_along(self, axis: int, of_mesh: int) -> AxisPlacement:
        """Different data are cut into rows, all other tensors along one axis."""
        return AxisPlacement("shard", 0 if of_mesh in self.data else axis)

    def _unusual(self, group: Group, axis: int, last: int) -> int:
        """Cost of a cut: weights are usually cut into rows, activations into features."""
        return axis if group.key.port in WEIGHTS else last - axis

    def _possible_shapes(self, group: Group, fixed: Mapping[int, AxisPlacement]) -> set[Shape]:
        """Shapes that result from cuts along all mesh axes whose placement is open."""
        shapes: set[Shape] = set()
        rank = len(group.first.shape)
        free = [n for n in range(len(group.axes)) if n not in fixed]
        tries: list[dict[int, AxisPlacement]] = [dict(fixed)]
        for n in free:
            cuts = [REPLICATE, *(AxisPlacement("shard", axis) for axis in range(rank))]
            # Every combination is tried. There are few, because meshes have few axes; the limit is
            # for foreign files.
            tries = [{**placements, n: cut} for placements in tries for cut in cuts]
        for placements in tries[:256]:
            try:
                joined_sources = join(group.parts, [placements[n] for n in range(len(group.axes))])
            except DoesNotFit:
                continue
            shapes.add(joined_sources[0].shape)
        return shapes

    def _target(self, group: Group) -> Shape | None:
        """The shape that the parts of a group should make."""
        target = self._targets.get(group.key)
        if target is None and (record := self.counterpart(group)) is not None:
            target = record.shape
        return target

    def _by_part_and_copy(self, group: Group) -> Group:
        """The group with places given by part and copy, if some ranks hold the same part."""
        target = self._target(group)
        if (
            target is None
            or record_placement(group.first) is not None
            or self._fitting_placements(group, target, {})
        ):
            return group
        separated = self._sharing.separated(group, target)
        if separated is None:
            return group
        self._copies[group.key] = separated[1]
        return separated[0]

    def _find_placement(self, group: Group) -> tuple[Placements | None, str]:
        says = record_placement(group.first)
        declared = {} if says is None else self._known(says)
        target = self._target(group)
        if target is None and says is not None and declared:
            target = says.shape
        how = "as the tensors say" if declared else "by shape"
        if (copies := self._copies.get(group.key)) is not None:
            declared = {copies: REPLICATE}
        if target is not None and (best := self._best(group, target, declared)) is not None:
            return best, how
        # Without a target, or if nothing makes it, declared axes count, and all others are
        # replicas.
        default = tuple(declared.get(axis, REPLICATE) for axis in range(len(group.axes)))
        if declared or len({part.shape for part in group.records}) == 1:
            return default, how
        return None, how

    def _fitting_placements(
        self, group: Group, target: Shape, fixed: Mapping[int, AxisPlacement]
    ) -> list[Placements]:
        # Layers repeat their shapes, so the search is done once for each kind of layer.
        shapes = tuple((coordinate, part.shape) for coordinate, part in group.parts.items())
        question = (shapes, target, tuple(fixed.items()))
        if question not in self._known_ways:
            self._known_ways[question] = fitting_placements(
                group.parts, target, fixed, len(group.axes)
            )
        return self._known_ways[question]

    def _best(
        self, group: Group, target: Shape, fixed: Mapping[int, AxisPlacement]
    ) -> Placements | None:
        """The cheapest fitting placement in which places with equal bytes are copies.

        If all places differ (gradients are terms), a site's other tensors show the copies.
        """
        candidates = self._fitting_placements(group, target, fixed)
        if len(candidates) < 2:
            return next(iter(candidates), None)
        differ, site = self.bytes.differ_along(group), group.key.site
        usual = self._cut_by_site.get(site)

        def cost(placements: Placements) -> tuple[int, int]:
            # Six exceeds any usual cut: copies with different bytes are the least likely
            # explanation.
            replicated = {n for n, how in enumerate(placements) if how.kind == "replicate"}
            return self._cost_of(placements) + 6 * len(
                replicated & differ
            ), usual is not None and _cut(placements) != usual

        best = min(candidates, key=cost)
        # If all places differ, the bytes have not decided, so the result is not stored for the
        # site.
        if differ != set(range(len(group.axes))):
            self._cut_by_site.setdefault(site, _cut(best))
        return best

    def _known(self, says: RecordPlacement) -> dict[int, AxisPlacement]:
        """A record's own placement by axis of the run's mesh; terms in a local tensor stay open."""
        axes = self.mesh.axes_of(says)
        if not axes:
            return {}
        placed_on: dict[int, AxisPlacement] = {}
        # From the last axis to the first, because late cuts (FSDP over tensor parallelism) are
        # undone in that order.
        for turn, (together, how) in enumerate(
            zip(reversed(axes), reversed(says.placed), strict=True)
        ):
            if how.kind == "unknown" or (says.local and how.kind in ("sum", "mean")):
                continue
            for n, axis in enumerate(together, turn * len(self.mesh.names) + 1):
                placed_on[axis] = how._replace(late=n) if how.late else how
        return placed_on

    def _cost_of(self, placements: Placements) -> int:
        """Cost of a placement: different data are usually cut into rows, weights are not."""
        cost = 0
        for axis, how in enumerate(placements):
            if how.kind == "shard":
                cost += 2 * how.axis if axis in self.data else (3 if how.axis == 0 else 0)
        return cost

    def _data_axes(self) -> tuple[set[int], dict[int, int]]:
        # Micro-batches are different data by definition; their axis comes after those of the mesh.
        self.data = data_axes = {len(self.mesh.names)}
        split: dict[int, int] = {}
        inputs = [g for g in self.groups if g.key.port == "input" and not g.first.placement]
        for group in inputs[:_FIRST_INPUTS]:
            differ = self.bytes.differ_along(group)
            data_axes |= differ
            for axis, how in enumerate(self._find_placement(group)[0] or ()):
                if axis in differ and how.kind == "shard":
                    split.setdefault(axis, how.axis)
        return data_axes, split


def _cut(placements: Placements) -> set[int]:
    return {n for n, how in enumerate(placements) if how.kind == "shard"}
