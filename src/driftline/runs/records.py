"""Keys and records: the address of a tensor inside a run, and one line of the run's index.

Pure data, without files or values. The execution order is the record's `order`; a key has none.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from driftline.numerics.fields import Summary

Port = Literal[
    "input", "output", "grad_input", "grad_output", "param", "param_grad", "optimizer_grad"
]
Phase = Literal["forward", "backward", "recompute"]
Moment = Literal["before", "after"]

PORTS: tuple[Port, ...] = (
    "input",
    "output",
    "grad_input",
    "grad_output",
    "param",
    "param_grad",  # the contribution of one backward pass, before accumulation
    "optimizer_grad",  # the gradient that the optimizer uses: accumulated, reduced, clipped
)

# Omitted from texts and index lines, because nearly every tensor has these values.
_USUAL: dict[str, tuple[Phase, Moment]] = {
    "input": ("forward", "before"),
    "param": ("forward", "before"),
    "grad_input": ("backward", "after"),
    "grad_output": ("backward", "after"),
    "param_grad": ("backward", "after"),
}
_ELSE: tuple[Phase, Moment] = ("forward", "after")


def usual(port: str) -> tuple[Phase, Moment]:
    """Phase and moment at which a port is normally captured."""
    return _USUAL.get(port, _ELSE)


def usual_phase(port: str) -> Phase:
    return usual(port)[0]


def usual_moment(port: str) -> Moment:
    return usual(port)[1]


_MOST_ELEMENTS = 1 << 58
"""Limit for the product of a shape's non-zero sizes.

numpy refuses an array, even an empty one, if this product exceeds 2**63 bytes; the widest element
has 16 bytes.
"""


def shape_trouble(shape: tuple[int, ...]) -> str:
    """Why no array can have a shape that a file claims; empty for a possible shape.

    >>> shape_trouble((0, 4)), shape_trouble((0, 2**63 - 1))
    ('', 'claims the shape (0, 9223372036854775807), which no array can have')
    """
    span = 1
    for extent in shape:
        span *= extent or 1
    if span < _MOST_ELEMENTS and len(shape) <= 64:
        return ""
    return f"claims the shape {str(shape)[:120]}, which no array can have"


class TensorKey(NamedTuple):
    """The address of one tensor inside one run. The execution order is the record's, not the key's.

    Attributes:
        site: Place in the model: module path, graph node or op call.
        port: What the tensor is to the site: input, output, parameter or gradient.
        slot: Which tensor of that port: the name of an argument, a position, or a path through
            nested containers.
        step: Training step or generated token.
        visit: Number of the call of the site within the step.
        rank: Rank of the process in its distributed job.
        process: Number of the process within its rank (a launcher script may start several).
        phase: forward, backward, or recompute for gradient checkpointing's second forward.
        moment: Whether it was captured before or after the call.
    """

    site: str
    port: Port
    slot: str
    step: int = 0
    visit: int = 0
    rank: int = 0
    process: int = 0
    phase: Phase = "forward"
    moment: Moment = "after"

    @classmethod
    def of(
        cls, site: str, port: Port, slot: str = "0", *, step: int = 0, visit: int = 0, rank: int = 0
    ) -> Self:
        """A key with the usual phase and moment of its port."""
        return cls(site, port, slot, step, visit, rank, 0, *usual(port))

    def same_call(self, other: TensorKey) -> bool:
        """Whether two tensors, of any ports, belong to one call of one site."""
        # site; step, visit, rank and process
        return self[0] == other[0] and self[3:7] == other[3:7]

    def __str__(self) -> str:
        """`rank0/step0/model.layers.0.mlp#1/output/0`; usual values are omitted.

        >>> str(TensorKey.of("mlp", "input", "x", visit=2))
        'rank0/step0/mlp#2/input/x'
        """
        rank = f"rank{self.rank}" + (f".p{self.process}" if self.process else "")
        return f"{rank}/{self.within_rank}"

    @property
    def within_rank(self) -> str:
        """The text of the key, without the rank and the process."""
        site, port, slot, step, visit, _, _, phase, moment = self
        nth = f"#{visit}" if visit else ""
        text = f"step{step}/{site}{nth}/{port}/{slot}"
        phase_then, moment_then = usual(port)
        if phase != phase_then:
            text += f"@{phase}"
        if moment != moment_then:
            text += f"@{moment}"
        return text

    def with_slot(self, slot: str) -> Self:
        return self._replace(slot=slot)


Kept = Literal["full", "sample", "summary", "digest", "describe"]


class Blob(NamedTuple):
    """Location of bytes: `length` bytes of a shard from `offset`, counted from its first byte."""

    shard: str
    offset: int
    length: int


class Record(NamedTuple):
    """One captured tensor: its address, type, shape, and how much of it was kept.

    Attributes:
        key: Address of the tensor.
        order: Position in the execution order of its process; sort records only by this.
        dtype: A name of `numerics.dtypes.DTYPES`.
        shape: Logical shape (of packed 4-bit formats: in elements, not bytes).
        alias: Another name of the slot: the position of an argument whose slot is its name.
        class_name: Class of the module, or name of the operator, at the site.
        device: Device of the tensor, as torch prints it.
        kept: How much of it was kept.
        digest: `algorithm:hex` of its bytes in C order.
        blob: Location of its bytes, for `full` and `sample`.
        sample_stride: For `sample`: every nth element of the flattened tensor was kept.
        summary: For `summary`, and whenever it was computed anyway.
        placement: How the tensor is distributed over its ranks, in words; empty for a plain one.
        lost: Why bytes that should be stored are missing: disk full, size limit.
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
        """The record with an order and a blob; `_replace` would take three times as long."""
        return self._make((self[0], order, *self[2:9], blob, *self[10:]))
