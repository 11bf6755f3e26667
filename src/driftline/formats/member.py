"""One tensor of somebody's file: its name, its type, its shape, and how to get at its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.runs.record import Kept

if TYPE_CHECKING:
    import numpy as np

    from driftline.numerics.summary import Summary


class Member(NamedTuple):
    """One tensor of a foreign file, not read yet.

    Attributes:
        name: As the file has it; empty for the only tensor of a file that has no names.
        dtype: A name of `numerics.dtypes.DTYPES`.
        shape: Logical shape.
        fetch: The values as a flat array of the dtype's storage type, C order; a view of the mapped
            file where that is possible.
        trouble: Why the values cannot be had although the file is sound; empty when they can.
        kept: What the file was meant to hold; with less than the values, `trouble` says so too.
        summary: The statistics that it holds instead of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray[Any, np.dtype[Any]]]
    trouble: str = ""
    kept: Kept = "full"
    summary: Summary | None = None
