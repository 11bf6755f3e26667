"""Ranks of which some hold the same part: key-value heads that several ranks share.

Where there are more ranks than parts, places along one axis of a mesh are told by two numbers:
which part, and which copy of it. Neighbours share a part in most programs; which ranks do is seen
by the bytes of a site's parameters and outputs. Reads no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from driftline.alignment.joining import Shape, ways
from driftline.alignment.rank_groups import MICRO, Bytes, Group
from driftline.alignment.rank_mesh import Coordinate, Placed


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
