"""One line of a run's index: what was captured, and where its bytes are.

These, keys and rows are named tuples: a frozen dataclass takes five times as long to make, and a
run may have a million records.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from driftline.numerics.summary import Summary
from driftline.runs.key import TensorKey

Kept = Literal["full", "sample", "summary", "digest", "describe"]


class Blob(NamedTuple):
    """Where bytes lie: `length` bytes of a shard, from `offset`, counted from its first byte."""

    shard: str
    offset: int
    length: int


class Record(NamedTuple):
    """What is known of one captured tensor.

    Attributes:
        key: Its address.
        order: Position in the execution order of its process; the only thing to sort by.
        dtype: A name of `numerics.dtypes.DTYPES`.
        shape: Logical shape (for packed 4-bit formats, of elements, not bytes).
        alias: Another name of the slot: the position of an argument that is known by name.
        class_name: Class of the module, or name of the operator, at the site.
        device: Where the tensor lived, as torch prints it.
        kept: How much of it was kept.
        digest: `algorithm:hex` of its bytes in C order.
        blob: Where its bytes are, for `full` and `sample`.
        sample_stride: For `sample`: every nth element of the flattened tensor was kept.
        summary: For `summary`, and wherever it was computed anyway.
        placement: How a sharded tensor lies over its ranks, in words; empty for a plain one.
        lost: Why its bytes are missing although they were to be kept: disk full, size limit.
    """

    key: TensorKey
    order: int
    dtype: str
    shape: tuple[int, ...]
    alias: str = ""
    class_name: str = ""
    device: str = ""
    kept: Kept = "full"
    digest: str = ""
    blob: Blob | None = None
    sample_stride: int = 1
    summary: Summary | None = None
    placement: str = ""
    lost: str = ""

    def placed(self, order: int, blob: Blob | None) -> Record:
        """The same at a place in a run; `_replace` would take three times as long."""
        return self._make((self[0], order, *self[2:9], blob, *self[10:]))
