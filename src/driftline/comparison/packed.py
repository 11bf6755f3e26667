"""The measurements of a row in a fifth of the memory: for tables of very many rows.

A dict of twenty numbers takes two kilobytes, the numbers themselves 160 bytes. What rows have in
common, the names and kinds of their numbers, is kept once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from driftline.comparison.row import MANY as MANY
from driftline.comparison.row import Number


class _Layout:
    """Names and kinds of numbers that many rows share."""

    __slots__ = ("names", "packing", "places")

    def __init__(self, names: tuple[str, ...], kinds: str) -> None:
        self.names = names
        self.packing = struct.Struct("=" + kinds)
        self.places = {name: place for place, name in enumerate(names)}


_layouts: dict[tuple[tuple[str, ...], str], _Layout] = {}
_KINDS: dict[type, str] = {float: "d", int: "q", bool: "?"}


class Packed(Mapping[str, Number]):
    """Numbers by name, as a dict shows them."""

    __slots__ = ("_bytes", "_layout")

    def __init__(self, layout: _Layout, content: bytes) -> None:
        self._layout = layout
        self._bytes = content

    def __getitem__(self, name: str) -> Number:
        layout = self._layout
        return layout.packing.unpack(self._bytes)[layout.places[name]]

    def get(self, name: str, default: Any = None) -> Any:
        layout = self._layout
        place = layout.places.get(name)
        return default if place is None else layout.packing.unpack(self._bytes)[place]

    def __contains__(self, name: object) -> bool:
        return name in self._layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.names)

    def __len__(self) -> int:
        return len(self._layout.names)

    def items(self) -> Any:
        return dict(zip(self._layout.names, self.values(), strict=True)).items()

    def values(self) -> Any:
        return self._layout.packing.unpack(self._bytes)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def packed(found: Mapping[str, Number]) -> Mapping[str, Number]:
    """The same numbers; as they are where they are of another kind or beyond 64 bits."""
    try:
        kinds = "".join([_KINDS[type(value)] for value in found.values()])
        shape = (tuple(found), kinds)
        layout = _layouts.get(shape)
        if layout is None:
            layout = _layouts[shape] = _Layout(*shape)
        return Packed(layout, layout.packing.pack(*found.values()))
    except (KeyError, struct.error):
        return found
