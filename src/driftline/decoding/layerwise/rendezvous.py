"""Compares two models that run alternately, output by output.

Each model is captured into its own sink. The candidate runs until one of its layers has produced an
output; then the reference runs until the layer of the same name has, the two are compared, and both
continue. So memory holds one output of each side plus outputs that came in another order, never all
of either model. One of the two is always stopped, because torch cannot trace one model for
compilation while hooks of the other run. Knows neither metrics nor models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.decoding.files.names import ROOT
from driftline.runs.records import Record, TensorKey
from driftline.runs.sinks import JSON

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Met = Callable[[Pair, Bytes, Bytes], None]
"""Takes a pair and the flat bytes of both sides, which are valid only during the call."""


class Event(NamedTuple):
    """Something capture reports: a tensor it could not take, a model that is compiled."""

    side: str
    kind: str
    message: str
    site: str


class Rendezvous:
    """Two sinks, and the outputs that wait between them.

    Attributes:
        reference: The sink of the reference, which runs in its own thread.
        candidate: The sink of the candidate. `met` is called in its thread.
        alone: Records of finished calls that the other side did not have, by side.
        events: Events of the capture.
        most: The largest number of bytes of outputs that waited at the same time.
    """

    def __init__(self, met: Met) -> None:
        self.reference = _Sink("reference", self._offer, self._event)
        self.candidate = _Sink("candidate", self._take, self._event)
        self.alone: list[tuple[str, Record]] = []
        self.events: list[Event] = []
        self.most = 0
        self._met = met
        self._waiting: dict[TensorKey, tuple[Record, Bytes]] = {}
        self._shown: tuple[Record, Bytes] | None = None  # in the reference's own memory
        self._waiting_bytes = 0
        self._change = threading.Condition()
        self._wanted: TensorKey | None = None  # what the candidate waits for, standing still
        self._reference_over = self._candidate_over = False
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """Prepare for a call of both models."""
        self._reference_over = self._candidate_over = False

    def await_turn(self) -> None:
        """Wait, in the reference's thread, until the candidate needs its first output."""
        with self._change:
            self._change.wait_for(self._reference_may_run)

    def over(self, side: str) -> None:
        """Note that a model's call is over, so that the other does not wait for it."""
        with self._change:
            if side == "reference":
                self._reference_over = True
            else:
                self._candidate_over = True
            self._change.notify_all()

    def end(self) -> None:
        """Finish after both calls: outputs that still wait have no partner.

        Raises:
            BaseException: The error that occurred while a pair was measured.
        """
        self.alone += [("reference", record) for record, _ in self._waiting.values()]
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._failure is not None:
            raise self._failure

    def _reference_may_run(self) -> bool:
        return self._wanted is not None or self._candidate_over

    def _offer(self, record: Record, data: Bytes) -> None:
        """Take an output of the reference, which then waits until the candidate needs another."""
        with self._change:
            self._change.wait_for(self._reference_may_run)
            wanted = self._wanted
            if wanted is None or _inside(record.key, wanted):
                # The outer module has given its output already: the inner ones never will.
                self.alone.append(("reference", record))
            elif record.key == wanted:
                # No copy is needed: the reference waits until the pair is measured.
                self._shown = record, data
                self._wanted = None
                self._change.notify_all()
                self._change.wait_for(lambda: self._shown is None or self._candidate_over)
                self._shown = None
                self._change.wait_for(self._reference_may_run)
            else:
                # A copy: the reference goes on and may reuse the memory.
                self._waiting[record.key] = record, data.copy()
                self._waiting_bytes += data.nbytes
                self.most = max(self.most, self._waiting_bytes)

    def _take(self, record: Record, data: Bytes) -> None:
        """Take an output of the candidate, which then waits for that of the reference."""
        with self._change:
            partner = self._waiting.pop(record.key, None)
            if partner is not None:
                self._waiting_bytes -= partner[1].nbytes
            else:
                self._wanted = record.key
                self._change.notify_all()
                self._change.wait_for(lambda: self._shown is not None or self._reference_over)
                self._wanted = None
                partner = self._shown
        if partner is None:
            self.alone.append(("candidate", record))
            return
        try:
            if self._failure is None:
                self._met(Pair(partner[0], record), partner[1], data)
        except BaseException as trouble:
            # Capture never raises into the program it watches: `end` says what happened.
            self._failure = trouble
            if not isinstance(trouble, Exception):
                raise
        finally:
            with self._change:
                self._shown = None
                self._change.notify_all()

    def _event(self, side: str, kind: str, message: str, site: str) -> None:
        self.events.append(Event(side, kind, message, site))


def _inside(key: TensorKey, outer: TensorKey) -> bool:
    """Whether a module is inside another that has returned, in the same call of the model."""
    if key.step != outer.step or key.site == outer.site:
        return False
    return outer.site == ROOT or key.site.startswith(f"{outer.site}.")


class _Sink:
    """A sink that passes everything on to callbacks; `Sink` documents the methods."""

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
        """Do nothing: the caller knows the models."""

    def topology(self, tree: Mapping[str, JSON]) -> None:
        """Do nothing: both sides are the same model, so names are enough."""

    def step_done(self, step: int) -> None:
        """Do nothing: the caller counts steps."""

    def flush(self) -> None:
        """Do nothing: no file is written."""

    def close(self) -> None:
        """Do nothing: no file is written."""
