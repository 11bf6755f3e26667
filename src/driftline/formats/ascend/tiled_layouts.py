"""Convert storage layouts of Ascend devices to ordinary order: NZ → ND, NC1HWC0 → NCHW, …

FRACTAL_NZ stores a matrix of M rows and N columns in small tiles: it is padded with zeros, cut into
columns of width C0 (usually 16, or 32 for bytes), and stored one column block after the other. The
same bytes are described by two shapes: `(batch, N1, M, C0)` in ATB, and `(…, N1, M1, 16, C0)` in
the graph engine, with M = 16 · M1. This file knows shapes and arrays, but no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

AnyArray = np.ndarray[Any, np.dtype[Any]]
ROWS = 16
"""Number of rows of one tile in the graph engine's shapes."""


def nz_shape(dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The ordinary shape of tiles that are stored with these sizes, including padding.

    None if the sizes cannot be those of tiles. A single batch is dropped, because a plain matrix is
    stored as `(1, N1, M, C0)`.

    >>> nz_shape((1, 2, 16, 16)), nz_shape((3, 2, 16, 16)), nz_shape((2, 5, 4, 16, 16))
    ((16, 32), (3, 16, 32), (2, 64, 80))
    """
    if len(dims) < 3:
        return None
    # Only the graph engine has a separate axis for the rows of a tile.
    if len(dims) >= 5 and dims[-2] == ROWS:
        *batch, blocks, tiles, rows, width = dims
        return (*batch, tiles * rows, blocks * width)
    *batch, blocks, rows, width = dims
    if len(batch) == 1 and batch[0] == 1:
        batch = []
    return (*batch, rows, blocks * width)


def nz_to_nd(values: AnyArray, dims: tuple[int, ...], crop: tuple[int, ...] = ()) -> AnyArray:
    """Convert stored tiles to the tensor in C order.

    Args:
        values: Elements as stored.
        dims: Sizes as stored.
        crop: True sizes of the last dimensions, if they are known; padding is cut off.

    >>> stored = np.array([[[1, 2], [5, 6]], [[3, 4], [7, 0]]])
    >>> nz_to_nd(stored, (2, 2, 2)).tolist()
    [[1, 2, 3, 4], [5, 6, 7, 0]]
    """
    shape = nz_shape(dims)
    if shape is None:
        raise ValueError(f"tiles have three dimensions at least, not {len(dims)}")
    *batch, rows, columns = shape
    blocks, width = (dims[-4], dims[-1]) if _graph_engine(dims) else (dims[-3], dims[-1])
    tiles = values.reshape(math.prod(batch), blocks, rows, width)
    matrix = tiles.swapaxes(1, 2).reshape(*batch, rows, columns)
    if crop:
        matrix = matrix[(..., *(slice(size) for size in crop))]
    return np.ascontiguousarray(matrix)


def _graph_engine(dims: tuple[int, ...]) -> bool:
    return len(dims) >= 5 and dims[-2] == ROWS


# ---- Layouts of the graph engine, which have the original shape in addition to the stored one


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
    """How stored elements are rearranged into the tensor.

    Attributes:
        seen_as: Shape to which the stored elements are first reshaped.
        axes: Permutation of its axes.
        merged: Shape to which the result is then reshaped, including padding.
        kept: Size of each axis of `merged` without padding.
        shape: Final shape.
    """

    seen_as: Shape
    axes: Shape
    merged: Shape
    kept: Shape
    shape: Shape

    @property
    def keeps_order(self) -> bool:
        """Whether only the shape changes, so that the flat elements stay as they are."""
        return self.axes == tuple(range(len(self.axes))) and self.kept == self.merged

    def apply(self, flat: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        """The elements in the tensor's own order, flat."""
        padded = flat.reshape(self.seen_as).transpose(self.axes).reshape(self.merged)
        cut = padded[tuple(slice(0, size) for size in self.kept)]
        return np.ascontiguousarray(cut).reshape(-1)


def rearrangement(
    format_name: str, stored: Shape, original: Sequence[int] | None
) -> Rearrangement | None:
    """How a stored tensor is rearranged into the original one.

    Args:
        format_name: Name of the layout, as `types.format_name` returns it.
        stored: Stored shape.
        original: Original shape; None if it is unknown.

    Returns:
        None if nothing is to be done, or if the rearrangement is unknown. The elements then stay in
        their stored order.
    """
    wanted = None if original is None else tuple(original)
    # Nothing to move, or no elements.
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
    """The rearrangement, if it cuts off nothing but padding and nothing is missing."""
    # A header that is not trusted must not cut off values as if they were padding.
    fits = (
        math.prod(seen_as) == math.prod(merged)
        and len(merged) == len(kept)
        and all(0 < size <= padded_size for size, padded_size in zip(kept, merged, strict=True))
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
    # A vector is stored as a matrix with one row.
    matrix = wanted[-2:] if len(wanted) > 1 else (1, *wanted)
    return _checked(stored, axes, merged, (*lead, *matrix), wanted)


def _from_nc1hwc0(stored: Shape, wanted: Shape) -> Rearrangement | None:
    if len(stored) != 5 or len(wanted) != 4:
        return None
    n, c1, h, w, c0 = stored
    # The original may be NCHW or NHWC; the sizes of the other axes show which.
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
    c1_h_w, n1, n0, c0 = stored
    _, _, h, w = wanted
    # The first axis is C1·H·W; a remainder means that the shapes do not belong together.
    if not h * w or c1_h_w % (h * w):
        return None
    c1 = c1_h_w // (h * w)
    return _checked(
        (c1, h, w, n1, n0, c0), (3, 4, 0, 5, 1, 2), (n1 * n0, c1 * c0, h, w), wanted, wanted
    )


def _from_plain(format_name: str, stored: Shape, wanted: Shape) -> Rearrangement | None:
    """Swap axes if that gives the wanted shape; otherwise reshape the same elements."""
    # A known swap that gives exactly the wanted sizes is more likely than a mere reshape.
    for (source, _), axes in _SWAPS.items():
        if source == format_name and len(stored) == len(axes):
            swapped = tuple(stored[axis] for axis in axes)
            if swapped == wanted:
                return Rearrangement(stored, axes, swapped, swapped, wanted)
    if math.prod(stored) == math.prod(wanted):
        return Rearrangement(stored, tuple(range(len(stored))), stored, stored, wanted)
    return None
