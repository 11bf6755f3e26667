"""Sinks: where a capture writes tensors, and sinks that wrap another sink.

A sink may write to disk, keep everything in memory, or be a list in a test. The wrapping sinks
decide when the real sink is made (`Late`), and what happens at a size limit (`Limited`). This file
does not know how tensors are captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from driftline.runs.files.owned_file import print_to_stderr
from driftline.runs.records import Record
from driftline.units import size_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"


@runtime_checkable
class Sheets(Protocol):
    """A sink that also stores side tables: lists of calls, of kernels, of times."""

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        """Add text to the end of a file of this process; `anew` replaces its content."""
        ...


@runtime_checkable
class Begins(Protocol):
    """A sink that leaves a trace of this process before its first tensor."""

    def begin(self) -> None:
        """Called when the first watched call is about to be made."""
        ...


class Group(Protocol):
    """Several records without bytes, in order, that need not exist as objects."""

    def __len__(self) -> int: ...

    @property
    def dtypes(self) -> set[str]: ...

    def records(self) -> Iterator[Record]:
        """The records, one by one."""
        ...

    def lines(self, order: int) -> bytes:
        """The index lines of the records; the first has this order. Any thread may call this."""
        ...


@runtime_checkable
class TakesGroups(Protocol):
    """A sink that makes the index lines of a group when it writes them."""

    def put_group(self, group: Group) -> None:
        """Store the records of a group, under the sink's own rank and process."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Stores records and bytes. Any thread of the process may call its methods."""

    @property
    def bytes_written(self) -> int:
        """Number of bytes of tensors accepted so far, without repeats."""
        ...

    @property
    def tensors_written(self) -> int:
        """Number of records accepted so far."""
        ...

    def put(self, record: Record, data: Bytes | None) -> None:
        """Store one record and, for `full` and `sample`, its bytes.

        The sink assigns `order` and `blob`, and `digest` if the record has none and there are
        bytes. It replaces `rank` and `process` of the key by its own.

        Args:
            record: The captured tensor.
            data: The flat C-order bytes, in live memory. They are digested, and copied if new,
                before this returns, so that an in-place operation may follow at once. For `sample`,
                the bytes of the sampled elements. For `digest`, the bytes to digest, which are not
                kept.
        """
        ...

    def event(self, kind: str, message: str, **details: JSON) -> None:
        """Store a warning, finding or label, in words."""
        ...

    def describe(self, **facts: JSON) -> None:
        """Add provenance that is known only later: device names, seeds, framework versions."""
        ...

    def topology(self, tree: Mapping[str, JSON]) -> None:
        """Store the module tree of this process; a later call replaces it."""
        ...

    def step_done(self, step: int) -> None:
        """Record that the program has finished a step."""
        ...

    def flush(self) -> None:
        """Return when everything put so far would survive a kill of the process."""
        ...

    def close(self) -> None:
        """End the sink: no more records will follow. May be called twice."""
        ...


# Events before the first tensor; more of them come from a loop of warnings.
MOST_WAITING = 1000


class Forwarding:
    """A sink that passes everything to another sink."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner

    @property
    def bytes_written(self) -> int:
        return self.inner.bytes_written

    @property
    def tensors_written(self) -> int:
        return self.inner.tensors_written

    def put(self, record: Record, data: Bytes | None) -> None:
        self.inner.put(record, data)

    def event(self, kind: str, message: str, **details: JSON) -> None:
        self.inner.event(kind, message, **details)

    def describe(self, **facts: JSON) -> None:
        self.inner.describe(**facts)

    def topology(self, tree: Mapping[str, JSON]) -> None:
        self.inner.topology(tree)

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        if isinstance(self.inner, Sheets):
            self.inner.sheet(name, text, anew=anew)

    def begin(self) -> None:
        if isinstance(self.inner, Begins):
            self.inner.begin()

    def step_done(self, step: int) -> None:
        self.inner.step_done(step)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


class Late:
    """Makes the real sink at the first watched call or tensor, when the rank is known.

    A forked child makes its own sink.

    Attributes:
        tree_is_enough: Make the sink for a module tree too, and let no tensor through.
    """

    def __init__(self, make: Callable[[], Sink], *, tree_is_enough: bool = False) -> None:
        self._make = make
        self.tree_is_enough = tree_is_enough
        self.forget()

    def forget(self) -> None:
        """Forget the parent's sink, in a forked child."""
        self._lock = threading.RLock()
        self._inner: Sink | None = None
        self._tree: Mapping[str, JSON] | None = None
        self._facts: dict[str, JSON] = {}
        self._events: list[tuple[str, str, dict[str, JSON]]] = []

    @property
    def waiting_events(self) -> list[tuple[str, str]]:
        """Kind and message of events that are not on disk yet, because no tensor came."""
        return [(kind, message) for kind, message, _ in self._events]

    @property
    def bytes_written(self) -> int:
        return self._inner.bytes_written if self._inner is not None else 0

    @property
    def tensors_written(self) -> int:
        return self._inner.tensors_written if self._inner is not None else 0

    @property
    def failure(self) -> str:
        """Why the sink stores nothing more; empty if it does, or gives no reason."""
        inner = self._inner.inner if isinstance(self._inner, Forwarding) else self._inner
        return str(getattr(inner, "failure", ""))

    def put(self, record: Record, data: Bytes | None) -> None:
        if not self.tree_is_enough:
            inner = self._inner if self._inner is not None else self._made()
            inner.put(record, data)

    def event(self, kind: str, message: str, **details: JSON) -> None:
        with self._lock:
            # Checked again under the lock, because another thread may be making the sink.
            if self._inner is None:
                if len(self._events) < MOST_WAITING:
                    self._events.append((kind, message, details))
                return
        self._inner.event(kind, message, **details)

    def describe(self, **facts: JSON) -> None:
        if self._inner is None:
            self._facts.update(facts)
        else:
            self._inner.describe(**facts)

    def topology(self, tree: Mapping[str, JSON]) -> None:
        self._tree = tree
        if self._inner is not None:
            self._inner.topology(tree)
        elif self.tree_is_enough:
            self._made()

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        inner = self._inner if self._inner is not None else self._made()
        if isinstance(inner, Sheets):
            inner.sheet(name, text, anew=anew)

    def begin(self) -> None:
        # A dump of trees has no tensors; its sink is made for the tree.
        if not self.tree_is_enough:
            inner = self._inner if self._inner is not None else self._made()
            if isinstance(inner, Begins):
                inner.begin()

    def step_done(self, step: int) -> None:
        if self._inner is not None:
            self._inner.step_done(step)

    def flush(self) -> None:
        if self._inner is not None:
            self._inner.flush()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _made(self) -> Sink:
        with self._lock:
            if self._inner is None:
                inner = self._make()
                # In the order of their arrival: facts and tree before the events.
                if self._facts:
                    inner.describe(**self._facts)
                if self._tree is not None:
                    inner.topology(self._tree)
                for kind, message, details in self._events:
                    inner.event(kind, message, **details)
                self._events.clear()
                self._inner = inner
            return self._inner


class Nowhere:
    """Discards everything: for a process whose rank is not captured."""

    bytes_written = 0
    tensors_written = 0

    def put(self, record: Record, data: Bytes | None) -> None:
        return

    def event(self, kind: str, message: str, **details: JSON) -> None:
        return

    def describe(self, **facts: JSON) -> None:
        return

    def topology(self, tree: Mapping[str, JSON]) -> None:
        return

    def step_done(self, step: int) -> None:
        return

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


class Limited(Forwarding):
    """For `--max-bytes`: estimates the size after the first step, and stops after the step that
    reached the limit.

    The inner sink enforces the limit on values, but lists the tensors that do not fit; that list
    alone would outgrow any limit if the capture did not stop.
    """

    def __init__(
        self, inner: Sink, *, limit: int, say: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(inner)
        self._limit = limit
        self._say = say or print_to_stderr
        self._last_step: int | None = None
        self._noted = False

    def put(self, record: Record, data: Bytes | None) -> None:
        size = 0 if data is None else data.nbytes
        if self._last_step is None:
            # Computed before the tensor is put, because the inner sink then counts it.
            beyond = bool(size) and self.inner.bytes_written + size > self._limit
            self.inner.put(record, data)
            # Repeated bytes, such as parameters after a step, take no room.
            if beyond and getattr(self.inner, "over_limit", True):
                self._last_step = record.key.step
            return
        # The step that reached the limit is still listed to its end, so that it is complete.
        if record.key.step > self._last_step:
            if not self._noted:
                self._noted = True
                self.inner.event(
                    "limit", f"nothing of the steps after step {self._last_step} is captured"
                )
            return
        self.inner.put(record, data)

    def event(self, kind: str, message: str, **details: JSON) -> None:
        self.inner.event(kind, message, **details)
        if kind == "estimate":
            self._say(self._estimate(details.get("steps"), details.get("once")))

    def _estimate(self, steps: JSON, once: JSON) -> str:
        first_step = max(1, self.inner.bytes_written)
        weights = once if isinstance(once, int) else 0
        # Weights are stored once, and take no room in later steps.
        later_step = max(1, first_step - weights)
        if self._last_step is not None:
            return f"the first step does not fit into the limit of {size_text(self._limit)}"
        text = (
            f"the first step takes {size_text(first_step)} of the limit of {size_text(self._limit)}"
        )
        if isinstance(steps, int) and steps > 1:
            total = weights + later_step * steps
            text += f"; all {steps} selected steps would take about {size_text(total)}"
        fitting = max(1, (self._limit - weights) // later_step)
        return text + f"; the limit holds about {fitting} step{'s' if fitting > 1 else ''}"
