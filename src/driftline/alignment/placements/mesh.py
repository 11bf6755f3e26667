"""The device mesh of a run, and the placement that a record declares.

This file reads facts of processes and the text of placements, but no tensors. A run without a
described mesh gets a flat one with a single axis named `ranks`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from driftline.runs.json_values import MOST_RANKS, count_of, list_of
from driftline.runs.records import Record
from driftline.runs.run import Run

Coordinate = tuple[int, ...]
Named = tuple[tuple[str, ...], tuple[int, ...]]
"""Names and sizes of the axes of a mesh; the names may be empty."""

_TEXT = re.compile(
    r"(local )?\[(.*?)\] of \(([\d, ]*)\) over mesh \(([\d, ]*)\)"
    r"(?: named \(([^()]*)\))?(?: at \(([\d, ]*)\))?"
)
_PLACED = re.compile(r"(S|_S|R|P|MaskP|[A-Za-z_]+)(?:\(([^()]*)\))?(?:,\s*|$)")


_MOST_AXES = 8
"""Largest number of mesh axes that are searched; real meshes have fewer."""


class Mesh(NamedTuple):
    """The ranks of a run on named axes.

    Attributes:
        names: Names of the axes.
        sizes: Sizes of the axes.
        coordinates: Coordinate of each rank.
        others: Coordinates of the ranks on other meshes that placements name, by names and sizes.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: Mapping[int, Coordinate]
    others: Mapping[Named, Mapping[int, Coordinate]] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted(self.coordinates)

    def plain_axes(self, placement: RecordPlacement) -> tuple[int, ...]:
        """The axes of this mesh that a placement names; empty if it names another mesh."""
        if placement.names and set(placement.names) <= set(self.names):
            axes = tuple(self.names.index(name) for name in placement.names)
            return axes if tuple(self.sizes[axis] for axis in axes) == placement.sizes else ()
        if not placement.names and placement.sizes == self.sizes:
            return tuple(range(len(self.sizes)))
        return ()

    def axes_of(self, placement: RecordPlacement) -> tuple[tuple[int, ...], ...]:
        """The axes of this mesh that correspond to each axis of a record's placement.

        An axis of the placement may consist of several flattened axes. The result is empty if the
        placement's mesh cannot be expressed by this one.
        """
        # By name first; only a mesh that was flattened or sliced needs the search over coordinates.
        if plain := self.plain_axes(placement):
            return tuple((axis,) for axis in plain)
        standing = self.others.get((placement.names, placement.sizes), {})
        axes_by_position: list[tuple[int, ...]] = []
        for position, size in enumerate(placement.sizes):
            axes = self._counting_as(
                {rank: coordinate[position] for rank, coordinate in standing.items()}, size
            )
            # Two axes of a placement cannot correspond to the same axis of the mesh.
            if axes is None or any(set(axes) & set(other) for other in axes_by_position):
                return ()
            axes_by_position.append(axes)
        return tuple(axes_by_position)

    def _counting_as(self, places: Mapping[int, int], size: int) -> tuple[int, ...] | None:
        """The axes whose coordinates, counted in C order, give these places of the ranks."""
        if not places or not set(places) <= set(self.coordinates):
            return None
        usable = [axis for axis, many in enumerate(self.sizes) if many > 1][:_MOST_AXES]
        # The fewest axes first, because a flattened axis rarely consists of more than two.
        for many in range(len(usable) + 1):
            for axes in itertools.combinations(usable, many):
                if math.prod(self.sizes[axis] for axis in axes) == size and all(
                    _counted(
                        [self.coordinates[rank][axis] for axis in axes],
                        [self.sizes[a] for a in axes],
                    )
                    == place
                    for rank, place in places.items()
                ):
                    return axes
        return None

    def fit(self, placements: Sequence[RecordPlacement]) -> tuple[int, int, int]:
        """How well this mesh expresses placements: how many at all, how many by name, its axes."""
        return (
            sum(bool(self.axes_of(placement)) for placement in placements),
            sum(bool(self.plain_axes(placement)) for placement in placements),
            len(self.sizes),
        )

    def __str__(self) -> str:
        axes = list(zip(self.names, self.sizes, strict=True))
        return " x ".join(f"{n} {size}" for n, size in [a for a in axes if a[1] > 1] or axes)


class AxisPlacement(NamedTuple):
    """How a tensor is distributed along one axis of a mesh.

    Attributes:
        kind: In shards, complete, or as terms of a sum (or of a mean).
        axis: The axis of the tensor that is cut.
        late: Not 0 if this mesh axis was cut after the axes to its right (FSDP over a tensor that
            tensor parallelism had already cut). The largest number was cut last; among equal
            numbers, the first axis.
    """

    kind: Literal["shard", "replicate", "sum", "mean", "unknown"]
    axis: int = 0
    late: int = 0

    def __str__(self) -> str:
        inside = f"({self.axis})" if self.kind == "shard" else ""
        return {"sum": "partial(sum)", "mean": "partial(mean)"}.get(self.kind, self.kind + inside)


REPLICATE = AxisPlacement("replicate")


class RecordPlacement(NamedTuple):
    """The placement that a record declares for itself.

    Attributes:
        placed: Placement for each axis of its mesh.
        shape: Shape of the complete tensor.
        sizes: Sizes of the mesh's axes.
        names: Names of the mesh's axes; empty if they have none.
        local: Whether the record is a plain local tensor, so that the program continues with the
            part alone.
        coordinate: Coordinate of the record's rank on that mesh; empty if not given.
    """

    placed: tuple[AxisPlacement, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    local: bool = False
    coordinate: Coordinate = ()


def record_placement(record: Record) -> RecordPlacement | None:
    """Parse a record's placement; None if it has none or the text cannot be read.

    >>> from driftline.runs.records import TensorKey
    >>> key = TensorKey.of("up", "param", "weight")
    >>> text = "[S(0)] of (8, 4) over mesh (2,) named (tp) at (1,)"
    >>> record_placement(Record(key, 0, "float32", (4, 4), placement=text)).names
    ('tp',)
    """
    if not record.placement:
        return None
    match = _TEXT.fullmatch(record.placement)
    if match is None:
        return None
    placed = tuple(_placed(*entry.groups()) for entry in _PLACED.finditer(match[2]))
    sizes = _numbers(match[4])
    # The text comes from a file: a placement whose numbers do not match is ignored, not guessed.
    if len(placed) != len(sizes):
        return None
    names = tuple(name.strip() for name in (match[5] or "").split(",") if name.strip())
    if names and len(names) != len(sizes):
        return None
    coordinate = _numbers(match[6] or "")
    coordinate = coordinate if len(coordinate) == len(sizes) else ()
    return RecordPlacement(placed, _numbers(match[3]), sizes, names, bool(match[1]), coordinate)


def _placed(kind: str, inside: str | None) -> AxisPlacement:
    first = (inside or "").split(",")[0].strip()
    if kind in ("S", "_S") and first.isdigit():
        return AxisPlacement("shard", int(first), int(kind == "_S"))
    if kind == "R":
        return REPLICATE
    # Masked terms of a sharded embedding add up like other terms.
    if kind in ("P", "MaskP") and first in ("sum", "avg"):
        return AxisPlacement("sum" if first == "sum" else "mean")
    return AxisPlacement("unknown")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.strip())


def mesh_of(run: Run) -> Mesh:
    """The mesh over which a run's ranks are gathered.

    Among the described meshes that hold all ranks, it is the one that expresses most placements,
    then most of them by name, then with most axes.
    """
    facts = run.facts.processes
    ranks = sorted({record.key.rank for record in run.records})
    # The processes of a job that lost ranks still give its size; without them the largest rank
    # counts.
    world = max(run.facts.world, ranks[-1] + 1, len(ranks))
    described = [_mesh(shown, world) for process in facts for shown in process.meshes]
    meshes = [mesh for mesh in described if mesh is not None]
    placements, standing = _record_meshes(run)
    # Placements that name the coordinates of every rank describe a mesh, too.
    meshes += [
        _named(Mesh(names, sizes, coordinates))
        for (names, sizes), coordinates in standing.items()
        if sorted(coordinates) == list(range(world))
        and len(set(coordinates.values())) == math.prod(sizes) == world
    ]
    meshes = [mesh._replace(others=standing) for mesh in meshes]
    best = max(meshes, key=lambda mesh: mesh.fit(placements), default=None)
    if best is None:
        # Programs without a mesh may still have process groups; groups of neighbours form one axis.
        best = _of_groups([list(process.groups) for process in facts], world)
    if best is not None and set(ranks) <= set(best.coordinates):
        return best
    flat = {rank: (rank,) for rank in range(world)}
    return Mesh(("ranks",), (world,), flat, standing)


def _record_meshes(run: Run) -> tuple[list[RecordPlacement], dict[Named, dict[int, Coordinate]]]:
    """The meshes that records name in their placements, and the coordinates of ranks on each."""
    placements: dict[Named, RecordPlacement] = {}
    standing: dict[Named, dict[int, Coordinate]] = {}
    # Thousands of tensors share a few texts, so each text is parsed once per rank.
    for record in {(r.key.rank, r.placement): r for r in run.records if r.placement}.values():
        if placement := record_placement(record):
            name = (placement.names, placement.sizes)
            placements.setdefault(name, placement)
            if placement.coordinate:
                standing.setdefault(name, {})[record.key.rank] = placement.coordinate
    return list(placements.values()), standing


def _mesh(shown: Any, world: int) -> Mesh | None:
    if not isinstance(shown, Mapping):
        return None
    about = cast("Mapping[str, Any]", shown)
    sizes = tuple(count_of(size, MOST_RANKS) for size in list_of(about.get("shape")))
    ranks = [count_of(rank, MOST_RANKS) for rank in list_of(about.get("ranks"))]
    # Facts are read from files: a mesh that does not hold every rank exactly once is ignored.
    if not sizes or math.prod(sizes) != len(ranks) or sorted(ranks) != list(range(world)):
        return None
    names = tuple(str(name) for name in list_of(about.get("names")))
    return _named(Mesh(names, sizes, {rank: _place(n, sizes) for n, rank in enumerate(ranks)}))


def _named(mesh: Mesh) -> Mesh:
    if len(mesh.names) == len(mesh.sizes):
        return mesh
    return mesh._replace(names=tuple(f"axis {n}" for n in range(len(mesh.sizes))))


def _counted(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of a coordinate in C order; the inverse of `_place`."""
    number = 0
    for place, size in zip(coordinate, sizes, strict=True):
        number = number * size + place
    return number


def _of_groups(groups: Sequence[Sequence[Any]], world: int) -> Mesh | None:
    """A mesh of two axes, if process groups of neighbours divide the job into equal parts."""
    rank_sets = {
        tuple(count_of(rank, MOST_RANKS) for rank in list_of(ranks))
        for process_groups in groups
        for ranks in process_groups
    }
    # The smallest groups first: they form the innermost axis, whose ranks are neighbours.
    for size in sorted({len(ranks) for ranks in rank_sets}):
        if not 1 < size < world or world % size:
            continue
        blocks = {
            tuple(range(coordinates, coordinates + size)) for coordinates in range(0, world, size)
        }
        if blocks <= rank_sets:
            sizes = (world // size, size)
            coordinates = {rank: _place(rank, sizes) for rank in range(world)}
            return Mesh(("groups", "group"), sizes, coordinates)
    return None


def _place(number: int, sizes: Sequence[int]) -> Coordinate:
    coordinate: list[int] = []
    for size in reversed(sizes):
        number, place = divmod(number, size)
        coordinate.append(place)
    return tuple(reversed(coordinate))
