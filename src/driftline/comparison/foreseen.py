"""What two runs will most likely be asked for, by the text of their indexes alone.

A command that compares two runs spends most of its start on loading what reads, checks and pairs
their records. The kernel need not wait for that: lines of the same name, written as our writer
writes them, say where two tensors lie. It is a guess, and nothing is believed: only what lies
inside the mapped files is looked at, and moments are taken only for records which, read and checked
as ever, lie in just those places (`ahead`). What is written otherwise is not foreseen.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.comparison.blocks import ENOUGH, LARGE, MAPPED, blocks_of, cores
from driftline.numerics import kernel
from driftline.numerics.addresses import address_of
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.many_pairs import ManyPairs, ask
from driftline.runs.layout import INDEX, is_shard_name, parse_folder

if TYPE_CHECKING:
    from driftline.runs.record import Record

_LONGEST = 1 << 20
"""Bytes of an index: what has a longer one takes longer to measure than to begin with."""
_MOST_FOLDERS = 16
_WIDTHS = {name: DTYPES[name].bits // 8 for name in ("float32", "bfloat16", "float16")}

_Place = tuple[str, int, int]
"""Shard, offset and length, as a `Blob`."""


class Foreseen:
    """Blocks that are being measured, by the places of the two tensors.

    Attributes:
        of: What it was begun with.
        work: Who measures them.
    """

    def __init__(self, of: tuple[Any, ...], blocks: dict[Any, int], work: ManyPairs) -> None:
        self.of = of
        self.work = work
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def turn(self, ours: Record, theirs: Record, start: int, stop: int) -> int | None:
        """The how manieth a block is; None if it is none of them."""
        one, other = ours.key, theirs.key
        here = (one.rank, one.process), ours.blob, ours.dtype
        there = (other.rank, other.process), theirs.blob, theirs.dtype
        return self._blocks.get((here, there, start, stop))


class _Folder:
    """What one process left: lines by name, shards as they are asked for."""

    def __init__(self, path: Path, mapped: list[memoryview]) -> None:
        self._path = path
        self._mapped = mapped  # of all folders: each is an open file
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise ValueError
        self._maps: dict[str, tuple[int, int]] = {}

    def lines(self) -> dict[bytes, tuple[str, bytes, bytes]]:
        """Type, shape and place of the tensors that are there in full, by all that names them."""
        with os.fdopen(self._open(INDEX), "rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError
        found: dict[bytes, tuple[str, bytes, bytes]] = {}
        for line in content.split(b"\n"):
            head, _, described = line.partition(b',"dtype":"')
            dtype, _, described = described.partition(b'","shape":[')
            shape, _, described = described.partition(b'],"kept":"full"')
            place = described.rpartition(b',"shard":"')[2]
            if place:
                # Numbers of execution differ where one run has more than the other.
                found[head[head.find(b",") :]] = dtype.decode(), shape, place
        return found

    def address(self, place: _Place) -> int:
        """Where that is, in a shard that is mapped."""
        shard, offset, length = place
        if shard not in self._maps:
            if not is_shard_name(shard) or len(self._mapped) == MAPPED:
                raise ValueError
            file = self._open(shard)
            try:
                view = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(file)
            self._mapped.append(view)
            self._maps[shard] = len(view), address_of(view)
        size, address = self._maps[shard]
        if not 0 <= offset <= size - length:
            raise ValueError
        return address + offset

    def _open(self, name: str) -> int:
        """A file that lies here, and is no link and nothing that would be waited for."""
        path = self._path / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)


_Pair = tuple[int, str, str, _Place, _Place, _Folder, _Folder, tuple[int, int]]
"""Elements, types, places, whose, which."""
_begun: list[Foreseen] = []
"""One at most: a process that is one command begins once."""


def begin(
    reference: str, candidate: str, elementwise: Callable[[str, str], tuple[float, float]]
) -> None:
    """Begin to measure what two runs have in common; `elementwise` as the engine is told it.

    Nothing is said of what is wrong with them: whoever opens them will.
    """
    forget()
    if os.name != "posix" or not kernel.takes_addresses():
        return
    try:
        pairs = _pairs(reference, candidate)
        blocks: dict[Any, int] = {}
        asks: list[bytes] = []
        left = ENOUGH
        for count, our_type, their_type, here, there, ours, theirs, which in pairs:
            left -= count
            if left < 0:
                break
            one, other = ours.address(here), theirs.address(there)
            our_width, their_width = _WIDTHS[our_type], _WIDTHS[their_type]
            if here[2] != count * our_width or there[2] != count * their_width:
                return
            types, allowed = (our_type, their_type), elementwise(our_type, their_type)
            sides = (which, here, our_type), (which, there, their_type)
            for start, stop in blocks_of(count):
                blocks[*sides, start, stop] = len(asks)
                at, other_at = one + start * our_width, other + start * their_width
                asks.append(ask(at, other_at, types, stop - start, *allowed, mapped=True))
    except (OSError, ValueError):
        return
    if asks:
        of = reference, candidate, elementwise
        _begun[:] = [Foreseen(of, blocks, ManyPairs(asks, pairs, max(2, cores()) - 1))]


def forget() -> None:
    """Let go of what was begun and nobody came for; what is under way is waited for."""
    _begun.clear()


def taken(*of: object) -> Foreseen | None:
    """What was begun with just these; for one asker, and for others it ends."""
    known = _begun.pop() if _begun else None
    return known if known is not None and known.of == of else None


def _pairs(reference: str, candidate: str) -> list[_Pair]:
    """Large pairs of one name and shape, largest first."""
    names = sorted(filter(parse_folder, (child.name for child in Path(reference).iterdir())))
    if len(names) > _MOST_FOLDERS:
        return []
    counts: dict[bytes, int] = {}
    found: list[_Pair] = []
    mapped: list[memoryview] = []
    for name in names:
        ours, theirs = (_Folder(Path(run, name), mapped) for run in (reference, candidate))
        which = parse_folder(name) or (0, 0)
        others = theirs.lines()
        seen: set[tuple[bytes, bytes]] = set()
        for line, (dtype, shape, place) in ours.lines().items():
            other_dtype, other_shape, other_place = others.get(line, ("", b"", b""))
            if other_shape != shape or dtype not in _WIDTHS or other_dtype not in _WIDTHS:
                continue
            if (count := counts.get(shape)) is None:
                count = counts[shape] = math.prod(map(int, shape.split(b","))) if shape else 1
            if count < LARGE or (place, other_place) in seen:
                continue
            seen.add((place, other_place))
            types = dtype, other_dtype
            found.append((count, *types, _place(place), _place(other_place), ours, theirs, which))
    return sorted(found, key=lambda pair: pair[0], reverse=True)


def _place(text: bytes) -> _Place:
    """`tensors-00000.safetensors","offset":0,"length":4}`, read."""
    shard, _, rest = text.partition(b'","offset":')
    offset, _, length = rest.partition(b',"length":')
    return shard.decode(), int(offset), int(length.removesuffix(b"}"))
