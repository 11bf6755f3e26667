"""Where two models that run at the same time meet, output by output.

Each is captured into its own door. What the reference's layer gives waits until the candidate's
layer of the same name has given its own; the two are compared, and both are let go. The reference
waits when it is too far ahead, so memory holds some outputs, never all of either model. Knows no
metric and no model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.sink import JSON

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Met = Callable[[Pair, Bytes, Bytes], None]
"""Takes a pair and the flat bytes of both sides, which are gone when it returns."""
AHEAD = 256 << 20
"""Bytes of outputs the reference may be ahead by; more only where a single one is larger."""


class Event(NamedTuple):
    """Something capture has to say: a tensor it could not take, a model that is compiled."""

    side: str
    kind: str
    message: str
    site: str


class Meeting:
    """Two doors and what waits between them.

    Attributes:
        reference: What the reference is captured into; may be called from another thread.
        candidate: What the candidate is captured into. `met` is called in its thread.
        alone: Records that the other side did not have, of the calls that are over, by side.
        events: What capture had to say.
        most: The most bytes that waited at any time.
    """

    def __init__(self, met: Met, *, ahead: int = AHEAD) -> None:
        self.reference = _Door("reference", self._offer, self._event)
        self.candidate = _Door("candidate", self._take, self._event)
        self.alone: list[tuple[str, Record]] = []
        self.events: list[Event] = []
        self.most = 0
        self._met = met
        self._ahead = ahead
        self._waiting: dict[TensorKey, tuple[Record, Bytes]] = {}
        self._bytes = 0
        self._change = threading.Condition()
        self._hungry = self._reference_over = self._candidate_over = False
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """Both models are about to be called."""
        self._reference_over = self._candidate_over = False

    def over(self, side: str) -> None:
        """A model's call has returned, or will not: nobody must wait for it."""
        with self._change:
            if side == "reference":
                self._reference_over = True
            else:
                self._candidate_over = True
            self._change.notify_all()

    def end(self) -> None:
        """Both calls are over: what still waits has no partner.

        Raises:
            BaseException: Whatever went wrong while a pair was looked at.
        """
        self.alone += [("reference", record) for record, _ in self._waiting.values()]
        self._waiting.clear()
        self._bytes = 0
        if self._failure is not None:
            raise self._failure

    def _offer(self, record: Record, data: Bytes) -> None:
        """The reference gave something."""
        with self._change:
            self._change.wait_for(lambda: self._has_room(data.nbytes))
            if self._candidate_over:  # nobody will ask for it
                self.alone.append(("reference", record))
                return
            self._waiting[record.key] = record, data.copy()
            self._bytes += data.nbytes
            self.most = max(self.most, self._bytes)
            self._change.notify_all()

    def _has_room(self, size: int) -> bool:
        # A hungry candidate waits for something that is still to come: it must be let come.
        fits = not self._waiting or self._bytes + size <= self._ahead
        return fits or self._hungry or self._candidate_over

    def _take(self, record: Record, data: Bytes) -> None:
        """The candidate gave something."""
        with self._change:
            self._hungry = True
            self._change.notify_all()
            self._change.wait_for(lambda: record.key in self._waiting or self._reference_over)
            self._hungry = False
            found = self._waiting.pop(record.key, None)
            if found is None:
                self.alone.append(("candidate", record))
                return
            self._bytes -= found[1].nbytes
            self._change.notify_all()
        if self._failure is not None:
            return
        try:
            self._met(Pair(found[0], record), found[1], data)
        except BaseException as trouble:
            # Capture never raises into the program it watches: `end` says what happened.
            self._failure = trouble
            if not isinstance(trouble, Exception):
                raise

    def _event(self, side: str, kind: str, message: str, site: str) -> None:
        self.events.append(Event(side, kind, message, site))


class _Door:
    """A sink that hands everything on; see `Sink` for what the methods promise."""

    def __init__(
        self,
        side: str,
        put: Callable[[Record, Bytes], None],
        event: Callable[[str, str, str, str], None],
    ) -> None:
        self.side = side
        self._put = put
        self._event = event
        self.bytes_written = 0
        self.tensors_written = 0

    def put(self, record: Record, data: Bytes | None) -> None:
        record = record._replace(order=self.tensors_written)
        self.tensors_written += 1
        if data is None:
            data = np.empty(0, np.uint8)
        self.bytes_written += data.nbytes
        self._put(record, data)

    def event(self, kind: str, message: str, **details: JSON) -> None:
        self._event(self.side, kind, message, str(details.get("site", "")))

    def describe(self, **facts: JSON) -> None:
        """Where the outputs come from is known to whoever loaded the models."""

    def topology(self, tree: Mapping[str, JSON]) -> None:
        """Names say it all: both sides are the same model."""

    def step_done(self, step: int) -> None:
        """The caller makes the steps."""

    def flush(self) -> None:
        """There is nothing to write."""

    def close(self) -> None:
        """There is nothing to seal."""
