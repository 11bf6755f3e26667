"""FRACTAL_NZ: matrices that a device keeps in small tiles, put back into ordinary order.

A matrix of M rows and N columns is padded with zeros, cut into columns of C0 (16 as a rule, 32 for
bytes) and stored column block by column block. Two spellings of the same bytes are in use:
`(batch, N1, M, C0)`, ATB's, and `(…, N1, M1, 16, C0)`, the graph engine's, with M = 16 · M1.
Knows shapes and arrays, no files.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

AnyArray = np.ndarray[Any, np.dtype[Any]]
ROWS = 16
"""Rows of one tile in the graph engine's spelling."""


def nz_shape(dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape in ordinary order of tiles that are stored with these sizes, padding included.

    None when the sizes cannot be tiles. A single batch is left out: `(1, N1, M, C0)` is how a plain
    matrix is stored.

    >>> nz_shape((1, 2, 16, 16)), nz_shape((3, 2, 16, 16)), nz_shape((2, 5, 4, 16, 16))
    ((16, 32), (3, 16, 32), (2, 64, 80))
    """
    if len(dims) < 3:
        return None
    if len(dims) >= 5 and dims[-2] == ROWS:
        *batch, blocks, tiles, rows, width = dims
        return (*batch, tiles * rows, blocks * width)
    *batch, blocks, rows, width = dims
    if len(batch) == 1 and batch[0] == 1:
        batch = []
    return (*batch, rows, blocks * width)


def nz_to_nd(values: AnyArray, dims: tuple[int, ...], crop: tuple[int, ...] = ()) -> AnyArray:
    """Stored tiles → the tensor in C order.

    Args:
        values: The elements as stored.
        dims: Sizes as stored.
        crop: The true sizes of the last dimensions, where somebody knows them; padding is cut off.

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
    whole = tiles.swapaxes(1, 2).reshape(*batch, rows, columns)
    if crop:
        whole = whole[(..., *(slice(size) for size in crop))]
    return np.ascontiguousarray(whole)


def _graph_engine(dims: tuple[int, ...]) -> bool:
    return len(dims) >= 5 and dims[-2] == ROWS
