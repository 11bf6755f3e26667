"""What a capture adapter writes to. The disk, memory, or a test's list may stand behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from driftline.runs.record import Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"


@runtime_checkable
class Sheets(Protocol):
    """A sink that also keeps text beside the tensors: lists of calls, of kernels, of times."""

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        """Adds text to the end of a file of this process; `anew` replaces what is in it."""
        ...


class Group(Protocol):
    """Several records without bytes, in their order, that need not exist one by one."""

    def __len__(self) -> int: ...

    @property
    def dtypes(self) -> set[str]: ...

    def records(self) -> Iterator[Record]:
        """The records, one by one."""
        ...

    def lines(self, order: int) -> bytes:
        """Their index lines, the first with this order; may be called from any thread."""
        ...


@runtime_checkable
class TakesGroups(Protocol):
    """A sink that writes the lines of a group itself, when it comes to it."""

    def put_group(self, group: Group) -> None:
        """Takes the records of a group; their ranks and processes are the sink's."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Takes records and bytes; may be called from any thread of the process."""

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors taken over, repeats not counted."""
        ...

    @property
    def tensors_written(self) -> int:
        """Records taken over."""
        ...

    def put(self, record: Record, data: Bytes | None) -> None:
        """Takes one record and, for `full` and `sample`, its bytes.

        `order` is assigned here, `blob` too, and `digest` if the record has none and there are
        bytes. `rank` and `process` of the key become the sink's own.

        Args:
            record: What was captured.
            data: The flat C-order bytes, in live memory; digested, and copied where new, before
                this returns, so that an in-place operation may follow at once. For `sample`, the
                bytes of the sampled elements. For `digest`, what is to be digested and not kept.
        """
        ...

    def event(self, kind: str, message: str, **details: JSON) -> None:
        """A warning, finding or label, in words."""
        ...

    def describe(self, **facts: JSON) -> None:
        """Adds provenance known only later: device names, seeds, framework versions."""
        ...

    def topology(self, tree: Mapping[str, JSON]) -> None:
        """The module tree of this process; a later call replaces it."""
        ...

    def step_done(self, step: int) -> None:
        """The program went past the end of a step."""
        ...

    def flush(self) -> None:
        """Returns when everything put so far would outlive a kill of the process."""
        ...

    def close(self) -> None:
        """Nothing more will come; may be called twice."""
        ...
