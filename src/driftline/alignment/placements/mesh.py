"""Where the ranks of a run stand: the mesh its processes described, and what a record's placement
says.

Reads facts and words only, no tensor. A run that left no mesh has a flat one, called `ranks`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from driftline.runs.records import Record
from driftline.runs.run import Run

Coordinate = tuple[int, ...]
Named = tuple[tuple[str, ...], tuple[int, ...]]
"""Names of the axes of a mesh, if it has any, and their sizes."""

_TEXT = re.compile(
    r"(local )?\[(.*?)\] of \(([\d, ]*)\) over mesh \(([\d, ]*)\)"
    r"(?: named \(([^()]*)\))?(?: at \(([\d, ]*)\))?"
)
_PLACED = re.compile(r"(S|_S|R|P|MaskP|[A-Za-z_]+)(?:\(([^()]*)\))?(?:,\s*|$)")


_MOST_AXES = 8
"""Of a mesh that are tried: it may be a stranger's, and no program has more."""


class Mesh(NamedTuple):
    """Ranks on axes.

    Attributes:
        names: Of the axes.
        sizes: Of the axes.
        at: Where each rank stands.
        others: Where ranks stand on meshes that placements speak of, by names and sizes of those.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    at: Mapping[int, Coordinate]
    others: Mapping[Named, Mapping[int, Coordinate]] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted(self.at)

    def plain_axes(self, lying: Lying) -> tuple[int, ...]:
        """The axes that a placement names; empty where they are not of this mesh."""
        if lying.names and set(lying.names) <= set(self.names):
            axes = tuple(self.names.index(name) for name in lying.names)
            return axes if tuple(self.sizes[axis] for axis in axes) == lying.sizes else ()
        if not lying.names and lying.sizes == self.sizes:
            return tuple(range(len(self.sizes)))
        return ()

    def axes_of(self, lying: Lying) -> tuple[tuple[int, ...], ...]:
        """The axes of this mesh that each axis of a record's placement stands for.

        An axis may be several flattened into one. Empty where a placement is of no such mesh.
        """
        if plain := self.plain_axes(lying):
            return tuple((axis,) for axis in plain)
        standing = self.others.get((lying.names, lying.sizes), {})
        found: list[tuple[int, ...]] = []
        for which, size in enumerate(lying.sizes):
            axes = self._counting_as({rank: at[which] for rank, at in standing.items()}, size)
            if axes is None or any(set(axes) & set(other) for other in found):
                return ()
            found.append(axes)
        return tuple(found)

    def _counting_as(self, places: Mapping[int, int], size: int) -> tuple[int, ...] | None:
        """The axes whose places, counted through in their order, are these of the ranks."""
        if not places or not set(places) <= set(self.at):
            return None
        usable = [axis for axis, many in enumerate(self.sizes) if many > 1][:_MOST_AXES]
        for many in range(len(usable) + 1):
            for axes in itertools.combinations(usable, many):
                if math.prod(self.sizes[axis] for axis in axes) == size and all(
                    _counted([self.at[rank][axis] for axis in axes], [self.sizes[a] for a in axes])
                    == place
                    for rank, place in places.items()
                ):
                    return axes
        return None

    def fit(self, said: Sequence[Lying]) -> tuple[int, int, int]:
        """How well placements can be told on this mesh: all of them, by name, and finely."""
        return (
            sum(bool(self.axes_of(each)) for each in said),
            sum(bool(self.plain_axes(each)) for each in said),
            len(self.sizes),
        )

    def __str__(self) -> str:
        axes = list(zip(self.names, self.sizes, strict=True))
        return " x ".join(f"{n} {size}" for n, size in [a for a in axes if a[1] > 1] or axes)


class Placed(NamedTuple):
    """How one axis of a mesh holds a tensor.

    Attributes:
        kind: In pieces, whole, or as terms of a sum (of a mean).
        axis: Along which axis of the tensor it is cut.
        late: Cut after the axes to its right, though it stands before them (FSDP over a tensor
            that tensor parallelism had cut already). Of several such, the largest number was cut
            last; of equal ones the first.
    """

    kind: Literal["shard", "replicate", "sum", "mean", "unknown"]
    axis: int = 0
    late: int = 0

    def __str__(self) -> str:
        inside = f"({self.axis})" if self.kind == "shard" else ""
        return {"sum": "partial(sum)", "mean": "partial(mean)"}.get(self.kind, self.kind + inside)


REPLICATE = Placed("replicate")


class Lying(NamedTuple):
    """What a record says of itself.

    Attributes:
        placed: By axis of its mesh.
        shape: Of the whole.
        sizes: Of its mesh.
        names: Of its mesh's axes; empty where they have none.
        local: It is a plain tensor: the program goes on with the part as it is.
        at: Where the rank of the record stands on that mesh; empty where that is not said.
    """

    placed: tuple[Placed, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    local: bool = False
    at: Coordinate = ()


def lying_of(record: Record) -> Lying | None:
    """A record's placement, understood; None where it says nothing.

    >>> from driftline.runs.records import TensorKey
    >>> key = TensorKey.of("up", "param", "weight")
    >>> text = "[S(0)] of (8, 4) over mesh (2,) named (tp) at (1,)"
    >>> lying_of(Record(key, 0, "float32", (4, 4), placement=text)).names
    ('tp',)
    """
    if not record.placement:
        return None
    found = _TEXT.fullmatch(record.placement)
    if found is None:
        return None
    placed = tuple(_placed(*each.groups()) for each in _PLACED.finditer(found[2]))
    sizes = _numbers(found[4])
    if len(placed) != len(sizes):
        return None
    names = tuple(name.strip() for name in (found[5] or "").split(",") if name.strip())
    if names and len(names) != len(sizes):
        return None
    at = _numbers(found[6] or "")
    at = at if len(at) == len(sizes) else ()
    return Lying(placed, _numbers(found[3]), sizes, names, bool(found[1]), at)


def _placed(kind: str, inside: str | None) -> Placed:
    first = (inside or "").split(",")[0].strip()
    if kind in ("S", "_S") and first.isdigit():
        return Placed("shard", int(first), int(kind == "_S"))
    if kind == "R":
        return REPLICATE
    if kind in ("P", "MaskP") and first in ("sum", "avg"):
        return Placed("sum" if first == "sum" else "mean")
    return Placed("unknown")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.strip())


def mesh_of(run: Run) -> Mesh:
    """The mesh over which a run's ranks are to be gathered.

    It holds all of them, and tells most placements, by name if possible; else it is the finest.
    """
    facts = run.facts.processes
    here = sorted({record.key.rank for record in run.records})
    world = max(run.facts.world, here[-1] + 1, len(here))
    known = [_mesh(shown, world) for each in facts for shown in each.meshes]
    meshes = [mesh for mesh in known if mesh is not None]
    said, standing = _said(run)
    meshes += [
        _named(Mesh(names, sizes, at))
        for (names, sizes), at in standing.items()
        if sorted(at) == list(range(world)) and len(set(at.values())) == math.prod(sizes) == world
    ]
    meshes = [mesh._replace(others=standing) for mesh in meshes]
    best = max(meshes, key=lambda mesh: mesh.fit(said), default=None)
    if best is None:
        best = _of_groups([list(each.groups) for each in facts], world)
    if best is not None and set(here) <= set(best.at):
        return best
    flat = {rank: (rank,) for rank in range(world)}
    return Mesh(("ranks",), (world,), flat, standing)


def _said(run: Run) -> tuple[list[Lying], dict[Named, dict[int, Coordinate]]]:
    """The meshes that placements speak of, and where ranks stand on each."""
    said: dict[Named, Lying] = {}
    standing: dict[Named, dict[int, Coordinate]] = {}
    for record in {(r.key.rank, r.placement): r for r in run.records if r.placement}.values():
        if lying := lying_of(record):
            name = (lying.names, lying.sizes)
            said.setdefault(name, lying)
            if lying.at:
                standing.setdefault(name, {})[record.key.rank] = lying.at
    return list(said.values()), standing


def _mesh(shown: Any, world: int) -> Mesh | None:
    if not isinstance(shown, Mapping):
        return None
    about = cast("Mapping[str, Any]", shown)
    sizes = tuple(_whole(size) for size in _list(about.get("shape")))
    ranks = [_whole(rank) for rank in _list(about.get("ranks"))]
    if not sizes or math.prod(sizes) != len(ranks) or sorted(ranks) != list(range(world)):
        return None
    names = tuple(str(name) for name in _list(about.get("names")))
    return _named(Mesh(names, sizes, {rank: _place(n, sizes) for n, rank in enumerate(ranks)}))


def _named(mesh: Mesh) -> Mesh:
    if len(mesh.names) == len(mesh.sizes):
        return mesh
    return mesh._replace(names=tuple(f"axis {n}" for n in range(len(mesh.sizes))))


def _counted(at: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of a place, counted in C order; the inverse of `_place`."""
    found = 0
    for each, size in zip(at, sizes, strict=True):
        found = found * size + each
    return found


def _of_groups(groups: Sequence[Sequence[Any]], world: int) -> Mesh | None:
    """A mesh of two axes, if groups of neighbours cut the job into equal parts."""
    found = {tuple(_whole(rank) for rank in _list(ranks)) for mine in groups for ranks in mine}
    for size in sorted({len(ranks) for ranks in found}):
        if not 1 < size < world or world % size:
            continue
        blocks = {tuple(range(at, at + size)) for at in range(0, world, size)}
        if blocks <= found:
            sizes = (world // size, size)
            at = {rank: _place(rank, sizes) for rank in range(world)}
            return Mesh(("groups", "group"), sizes, at)
    return None


def _place(number: int, sizes: Sequence[int]) -> Coordinate:
    found: list[int] = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        found.append(at)
    return tuple(reversed(found))


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 20 else 0
