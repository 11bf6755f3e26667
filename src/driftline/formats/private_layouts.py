"""Storage layouts of tensor cores back to the tensor a person means: NZ → ND, NC1HWC0 → NCHW, …

Everything is one rearrangement: see the elements in a shape, swap axes, merge, cut the padding off.
It is planned from shapes alone, so that a dump can be listed unread; it knows no file format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]

PLAIN = frozenset({"NCHW", "NHWC", "ND", "CHWN", "HWCN", "NDHWC", "NCDHW", "DHWCN", "NC", "NCL"})
_SWAPS: dict[tuple[str, str], Shape] = {
    ("NHWC", "NCHW"): (0, 3, 1, 2),
    ("HWCN", "NCHW"): (3, 2, 0, 1),
    ("CHWN", "NCHW"): (3, 0, 1, 2),
    ("NCHW", "NHWC"): (0, 2, 3, 1),
    ("NDHWC", "NCDHW"): (0, 4, 1, 2, 3),
    ("DHWCN", "NCDHW"): (4, 3, 0, 1, 2),
    ("NCDHW", "NDHWC"): (0, 2, 3, 4, 1),
}


class Rearrangement(NamedTuple):
    """How stored elements become the tensor.

    Attributes:
        seen_as: The shape in which the stored elements are seen first.
        axes: Its axes in their new order.
        merged: The shape after that, padding included.
        kept: How much of each axis of `merged` is no padding.
        shape: What comes out.
    """

    seen_as: Shape
    axes: Shape
    merged: Shape
    kept: Shape
    shape: Shape

    @property
    def keeps_order(self) -> bool:
        """Whether only the shape changes: flat, nothing is to be done."""
        return self.axes == tuple(range(len(self.axes))) and self.kept == self.merged

    def apply(self, flat: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        """The elements in the tensor's own order, flat."""
        whole = flat.reshape(self.seen_as).transpose(self.axes).reshape(self.merged)
        cut = whole[tuple(slice(0, size) for size in self.kept)]
        return np.ascontiguousarray(cut).reshape(-1)


def rearrangement(
    format_name: str, stored: Shape, original: Sequence[int] | None
) -> Rearrangement | None:
    """How a tensor stored in a layout becomes the original one.

    Args:
        format_name: As `atb_types` calls it.
        stored: The shape in storage.
        original: The shape it had before; None when it is not known.

    Returns:
        None where nothing is to be done, or where nobody can say what: the elements then stay in
        the order in which they are stored.
    """
    wanted = None if original is None else tuple(original)
    if wanted == stored or 0 in stored:
        return None
    if format_name.startswith("FRACTAL_NZ"):
        return _from_nz(stored, wanted)
    if wanted is None:
        return None
    if format_name in ("NC1HWC0", "NC1HWC0_C04"):
        return _from_nc1hwc0(stored, wanted)
    if format_name == "NDC1HWC0":
        return _from_ndc1hwc0(stored, wanted)
    if format_name == "FRACTAL_Z":
        return _from_fractal_z(stored, wanted)
    if format_name in PLAIN:
        return _from_plain(format_name, stored, wanted)
    return None


def _checked(
    seen_as: Shape, axes: Shape, merged: Shape, kept: Shape, shape: Shape
) -> Rearrangement | None:
    """The rearrangement, if nothing but padding would be cut off and nothing is missing."""
    fits = (
        math.prod(seen_as) == math.prod(merged)
        and len(merged) == len(kept)
        and all(0 < part <= whole for part, whole in zip(kept, merged, strict=True))
        and math.prod(kept) == math.prod(shape)
    )
    return Rearrangement(seen_as, axes, merged, kept, shape) if fits else None


def _from_nz(stored: Shape, wanted: Shape | None) -> Rearrangement | None:
    """(…, N1, M1, M0, C0) → (…, M, N)."""
    if len(stored) < 4:
        return None
    lead = stored[:-4]
    columns, rows, row_size, column_size = stored[-4:]
    first = len(lead)
    axes = (*range(first), first + 1, first + 2, first, first + 3)
    merged = (*lead, rows * row_size, columns * column_size)
    if wanted is None:
        return _checked(stored, axes, merged, merged, merged)
    if not wanted:
        return None
    matrix = wanted[-2:] if len(wanted) > 1 else (1, *wanted)
    return _checked(stored, axes, merged, (*lead, *matrix), wanted)


def _from_nc1hwc0(stored: Shape, wanted: Shape) -> Rearrangement | None:
    if len(stored) != 5 or len(wanted) != 4:
        return None
    n, c1, h, w, c0 = stored
    if (wanted[0], *wanted[2:]) == (n, h, w):
        return _checked(stored, (0, 1, 4, 2, 3), (n, c1 * c0, h, w), wanted, wanted)
    return _checked(stored, (0, 2, 3, 1, 4), (n, h, w, c1 * c0), wanted, wanted)


def _from_ndc1hwc0(stored: Shape, wanted: Shape) -> Rearrangement | None:
    if len(stored) != 6 or len(wanted) != 5:
        return None
    n, d, c1, h, w, c0 = stored
    if (wanted[0], *wanted[2:]) == (n, d, h, w):
        return _checked(stored, (0, 2, 5, 1, 3, 4), (n, c1 * c0, d, h, w), wanted, wanted)
    return _checked(stored, (0, 1, 3, 4, 2, 5), (n, d, h, w, c1 * c0), wanted, wanted)


def _from_fractal_z(stored: Shape, wanted: Shape) -> Rearrangement | None:
    """(C1·H·W, N1, N0, C0) → NCHW."""
    if len(stored) != 4 or len(wanted) != 4:
        return None
    whole, n1, n0, c0 = stored
    _, _, h, w = wanted
    if not h * w or whole % (h * w):
        return None
    c1 = whole // (h * w)
    return _checked(
        (c1, h, w, n1, n0, c0), (3, 4, 0, 5, 1, 2), (n1 * n0, c1 * c0, h, w), wanted, wanted
    )


def _from_plain(format_name: str, stored: Shape, wanted: Shape) -> Rearrangement | None:
    """Swap axes where that gives the wanted shape, else see the same elements in it."""
    for (source, _), axes in _SWAPS.items():
        if source == format_name and len(stored) == len(axes):
            swapped = tuple(stored[axis] for axis in axes)
            if swapped == wanted:
                return Rearrangement(stored, axes, swapped, swapped, wanted)
    if math.prod(stored) == math.prod(wanted):
        return Rearrangement(stored, tuple(range(len(stored))), stored, stored, wanted)
    return None
