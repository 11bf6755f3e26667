"""Ranks of which some hold the same part: key-value heads that several ranks share.

Where there are more ranks than parts, places along one axis of a mesh are told by two numbers:
which part, and which copy of it. Neighbours share a part in most programs; which ranks do is seen
by the bytes of a site's parameters and outputs. Reads no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from driftline.alignment.placements.groups import MICRO, Bytes, Group, groups_of
from driftline.alignment.placements.join import DoesNotFit, Shape, join, ways
from driftline.alignment.placements.mesh import (
    REPLICATE,
    Coordinate,
    Lying,
    Placed,
    lying_of,
    mesh_of,
)
from driftline.alignment.placements.stages import stages_of
from driftline.alignment.recipe import Recipe, Step, joined
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run


class Shared(NamedTuple):
    """How places along an axis share parts.

    Attributes:
        axis: Of the mesh.
        many: How many neighbours are taken together.
        neighbours: Whether those hold the same part; else they hold different ones.
    """

    axis: int
    many: int
    neighbours: bool


class Sharing:
    """Finds out who shares parts with whom; what a site's first tensors say holds for the rest.

    Args:
        mesh_axes: How many axes the mesh has.
        of: Who holds the same bytes.
    """

    def __init__(self, mesh_axes: int, of: Bytes) -> None:
        self._mesh_axes = mesh_axes
        self._bytes = of
        self._by_site: dict[str, Shared] = {}

    def told_apart(self, group: Group, target: Shape) -> tuple[Group, int] | None:
        """The group with its places told by part and copy, if its parts then make the target.

        Returns:
            It, and the axis along which it holds copies.
        """
        found = [each for each in self._possible(group) if self._fits(group, each, target)]
        if not found:
            return None
        most = max(found, key=lambda each: self._equal(group, each))
        if self._equal(group, most):
            self._by_site.setdefault(group.key.site, most)
        known = self._by_site.get(group.key.site)
        best = known if known is not None and known in found else most
        told = self._parted(group, best)
        return told, _copies(best, told)

    def shapes(self, group: Group) -> Iterator[tuple[int, Shape]]:
        """What parts would make, joined along each axis, if the bytes show that ranks share them.

        Gradients are terms, and differ everywhere: a site's parameters and outputs speak for them.
        """
        if (known := self._by_site.get(group.key.site)) is None:
            found = (each for each in self._possible(group) if self._is_seen(group, each))
            if (known := next(found, None)) is None:
                return
            self._by_site[group.key.site] = known
        shape = group.first.shape
        if any(part.shape != shape for part in group.records):
            return
        parts = _size(group, known.axis) // known.many if known.neighbours else known.many
        for axis, size in enumerate(shape):
            yield axis, (*shape[:axis], size * parts, *shape[axis + 1 :])

    def _possible(self, group: Group) -> Iterator[Shared]:
        for axis in range(self._mesh_axes):
            size = _size(group, axis)
            for many in range(2, min(size // 2, len(group.parts)) + 1):
                if size % many == 0:
                    yield Shared(axis, many, True)
                    yield Shared(axis, many, False)

    def _fits(self, group: Group, shared: Shared, target: Shape) -> bool:
        told = self._parted(group, shared)
        known = {_copies(shared, told): Placed("replicate")}
        return bool(ways(told.parts, target, known, len(told.axes)))

    def _equal(self, group: Group, shared: Shared) -> int:
        """How many copies are the same as their first."""
        told = self._parted(group, shared)
        axis = _copies(shared, told)
        first: dict[Coordinate, str] = {}
        equal = 0
        for at, record in told.parts.items():
            name = self._bytes.of(record)
            rest = (*at[:axis], 0, *at[axis + 1 :])
            equal += rest in first and first[rest] == name != ""
            first.setdefault(rest, name)
        return equal

    def _is_seen(self, group: Group, shared: Shared) -> bool:
        """Whether the bytes say so: copies are equal, and parts are not."""
        told = self._parted(group, shared)
        copies = _copies(shared, told)
        parts = shared.axis if copies != shared.axis else len(told.axes) - 1
        differ = self._bytes.differ_along(told)
        return copies not in differ and parts in differ

    def _parted(self, group: Group, shared: Shared) -> Group:
        axis, many, micro = shared.axis, shared.many, self._mesh_axes
        parts = {
            (
                *at[:axis],
                at[axis] // many,
                *at[axis + 1 : micro],
                at[micro] if len(at) > micro else 0,
                at[axis] % many,
            ): record
            for at, record in group.parts.items()
        }
        axes = (*group.axes[:micro], MICRO, f"neighbours on {group.axes[axis]}")
        return Group(group.key, dict(sorted(parts.items())), axes)


def _copies(shared: Shared, told: Group) -> int:
    """The axis along which a group whose places are told apart holds copies."""
    return len(told.axes) - 1 if shared.neighbours else shared.axis


def _size(group: Group, axis: int) -> int:
    return 1 + max(at[axis] for at in group.parts)


# How each tensor of a run of many ranks lies: by what it says of itself, then by shape.


Way = tuple[Placed, ...]
WEIGHTS = frozenset({"param", "param_grad", "optimizer_grad"})
_FIRST_INPUTS = 4
_SHARED, _TERMS, _ODD = 20, 20, 40
"""How strange it is that ranks share parts, that a tensor is a term, or lies in any other way."""
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
        wholes: What the other run has, by every name of its slots.
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
            for record in other.records:
                if record.alias:
                    self.wholes.setdefault(record.key._replace(slot=record.alias), record)
        self.bytes = Bytes(run)
        self._targets = targets
        self._known_ways: dict[object, list[Way]] = {}
        self._cut_by_site: dict[str, set[int]] = {}
        self._copies: dict[TensorKey, int] = {}
        self._sharing = Sharing(len(self.mesh.names), self.bytes)
        self.groups = [self._told_apart(group) for group in self.groups]
        self.data, self.split = self._data_axes()
        self._placed = {group.key: self._lie(group) for group in self.groups}

    def whole(self, group: Group) -> Record | None:
        """What the other run has of a group, which may know its slot by the other of two names."""
        found = self.wholes.get(group.key)
        if found is None and (alias := group.first.alias):
            found = self.wholes.get(group.key._replace(slot=alias))
        return found

    def lie(self, group: Group) -> tuple[Way | None, str]:
        """How a tensor lies, by axis of its places, and what says so; None where nothing does."""
        return self._placed[group.key]

    def shared(self, group: Group) -> set[int]:
        """The axes of a group's places along which ranks share the parts of its site, if any do."""
        if (copies := self._copies.get(group.key)) is not None:
            return {copies}
        cut = self._cut_by_site.get(group.key.site)
        return set() if not cut else set(range(len(self.mesh.names))) - cut

    def flat(self, group: Group) -> Recipe | None:
        """A weight in flat pieces, as FSDP1 keeps them: some ranks may hold none of it."""
        target = self._target(group)
        if target is None or group.key.port not in WEIGHTS or lying_of(group.first) is not None:
            return None
        pieces = [part for part in group.records if 0 not in part.shape]
        sizes = [part.shape[0] for part in pieces if len(part.shape) == 1]
        if len(sizes) < len(pieces) or sum(sizes) != math.prod(target) or not sizes:
            return None
        if self._ways(group, target, {}):
            return None
        joined_up = joined(pieces, "concat", 0, (sum(sizes),))
        return joined_up.then(Step("reshape", numbers=target), shape=target)

    def possible(self) -> dict[TensorKey, dict[Shape, int]]:
        """Every shape that the parts of a tensor could make, and how strange that would be."""
        return {group.key: self._possible(group) for group in self.groups}

    def _possible(self, group: Group) -> dict[Shape, int]:
        says = lying_of(group.first)
        known = {} if says is None else self._known(says)
        differ = self.bytes.differ_along(group) - set(known)
        alike = (n for n in range(len(group.axes)) if n not in differ and n not in known)
        fixed = {**known, **dict.fromkeys(alike, REPLICATE)}
        found = dict.fromkeys(self._made(group, fixed), _ODD)
        shape, last = group.first.shape, len(group.first.shape) - 1
        if differ and not known and all(part.shape == shape for part in group.records):
            found[shape] = _ODD if group.key.port == "param" else _TERMS
        for axis, made in () if known else self._sharing.shapes(group):
            found[made] = _SHARED + self._unusual(group, axis, last)
        for axis in range(last + 1):
            cut = {n: self._cut_along(axis, n) for n in differ}
            try:
                whole = join(group.parts, [{**fixed, **cut}[n] for n in range(len(group.axes))])
            except DoesNotFit:
                continue
            usual = min(found.get(whole[0].shape, _ODD), self._unusual(group, axis, last))
            found[whole[0].shape] = usual
        return found

    def _cut_along(self, axis: int, of_mesh: int) -> Placed:
        """Other data are cut into rows, the rest along one axis of the tensor."""
        return Placed("shard", 0 if of_mesh in self.data else axis)

    def _unusual(self, group: Group, axis: int, last: int) -> int:
        """Weights are cut into rows before columns, activations into features before tokens."""
        return axis if group.key.port in WEIGHTS else last - axis

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

    def _target(self, group: Group) -> Shape | None:
        """The shape that the parts of a group should make."""
        target = self._targets.get(group.key)
        if target is None and (whole := self.whole(group)) is not None:
            target = whole.shape
        return target

    def _told_apart(self, group: Group) -> Group:
        """A group of which some ranks hold the same part, with places that say so."""
        target = self._target(group)
        if target is None or lying_of(group.first) is not None or self._ways(group, target, {}):
            return group
        found = self._sharing.told_apart(group, target)
        if found is None:
            return group
        self._copies[group.key] = found[1]
        return found[0]

    def _lie(self, group: Group) -> tuple[Way | None, str]:
        says = lying_of(group.first)
        known = {} if says is None else self._known(says)
        target = self._target(group)
        if target is None and says is not None and known:
            target = says.shape
        how = "as the tensors say" if known else "by shape"
        if (copies := self._copies.get(group.key)) is not None:
            known = {copies: REPLICATE}
        if target is not None and (best := self._best(group, target, known)) is not None:
            return best, how
        unknown = tuple(known.get(axis, REPLICATE) for axis in range(len(group.axes)))
        if known or len({part.shape for part in group.records}) == 1:
            return unknown, how
        return None, how

    def _ways(self, group: Group, target: Shape, known: Mapping[int, Placed]) -> list[Way]:
        shapes = tuple((at, part.shape) for at, part in group.parts.items())
        about = (shapes, target, tuple(known.items()))
        if about not in self._known_ways:
            self._known_ways[about] = ways(group.parts, target, known, len(group.axes))
        return self._known_ways[about]

    def _best(self, group: Group, target: Shape, known: Mapping[int, Placed]) -> Way | None:
        """Of several ways the usual one in which places that hold the same are copies.

        Where all places differ (gradients are terms), a site's other tensors say which are.
        """
        found = self._ways(group, target, known)
        if len(found) < 2:
            return next(iter(found), None)
        differ, site = self.bytes.differ_along(group), group.key.site
        usual = self._cut_by_site.get(site)

        def cost(way: Way) -> tuple[int, int]:
            whole = {n for n, how in enumerate(way) if how.kind == "replicate"}
            return self._strange(way) + 6 * len(whole & differ), usual is not None and _cut(
                way
            ) != usual

        best = min(found, key=cost)
        if differ != set(range(len(group.axes))):
            self._cut_by_site.setdefault(site, _cut(best))
        return best

    def _known(self, says: Lying) -> dict[int, Placed]:
        """What a record says, by axis of the run's mesh. Terms in a plain tensor are a question."""
        axes = self.mesh.axes_of(says)
        if not axes:
            return {}
        found: dict[int, Placed] = {}
        for turn, (together, how) in enumerate(
            zip(reversed(axes), reversed(says.placed), strict=True)
        ):
            if how.kind == "unknown" or (says.local and how.kind in ("sum", "mean")):
                continue
            for n, axis in enumerate(together, turn * len(self.mesh.names) + 1):
                found[axis] = how._replace(late=n) if how.late else how
        return found

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


def _cut(way: Way) -> set[int]:
    return {n for n, how in enumerate(way) if how.kind == "shard"}
