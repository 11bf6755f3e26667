"""Two decoders read the same text, layer by layer in turn, and every layer's outputs are compared.

Both are captured while they run, the reference in a thread of its own; in `generate` mode the
candidate goes on with the reference's tokens, so that both read the same text at every iteration.
Nothing is kept but figures: memory does not grow with layers, tokens or iterations.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from driftline.comparison.measure.pair_rows import lone
from driftline.comparison.metrics.catalogue import STANDARD, Metric
from driftline.comparison.table.row import Row
from driftline.decoding.compiled_parts import room_for_graphs
from driftline.decoding.counted_rows import Span, counting_rows
from driftline.decoding.decoder import DecoderModel, Forward
from driftline.decoding.meeting import Event, Meeting
from driftline.decoding.prompts import Padded
from driftline.decoding.row_figures import Figures, figures_of
from driftline.errors import BadInput, DriftlineError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from driftline.alignment.plan import Pair
    from driftline.decoding.meeting import Bytes

Mode = Literal["generate", "model-forward"]
Take = Callable[[Figures], None]
Progress = Callable[[int, int], None]

_SHOWN = ("relative_l2", "cosine", "max_abs_error", "mean_abs_error", "one_sided", "different")
METRICS: tuple[Metric, ...] = tuple(metric for metric in STANDARD if metric.name in _SHOWN)
"""Of the whole of each output, for the table."""


class Walk(NamedTuple):
    """What was found besides the figures that were handed out.

    Attributes:
        rows: One per output and iteration, in the reference's order; then those of the candidate
            that the reference does not have.
        tokens: int64 [prompts, length + new]: what both read, and what the reference says next.
        events: What capture had to say.
        most_aside: Bytes of outputs that had to be put aside at once, at most.
    """

    rows: tuple[Row, ...]
    tokens: torch.Tensor
    events: tuple[Event, ...]
    most_aside: int


def walk_layers(
    reference: DecoderModel,
    candidate: DecoderModel,
    batch: Padded,
    *,
    take: Take,
    mode: Mode = "generate",
    new_tokens: int = 1,
    elements: bool = False,
    progress: Progress | None = None,
) -> Walk:
    """Run both models on one batch and compare what every module of them gives.

    Args:
        reference: The trusted model.
        candidate: The other; another object than the reference.
        batch: The prompts, padded.
        take: Is handed the figures of every output, in the candidate's order of execution.
        mode: `model-forward` is one call on the prompts that gives all logits, `generate` as many
            as there are new tokens.
        new_tokens: Iterations of `generate`.
        elements: Whether the figures shall hold every element's difference.
        progress: Called with (module calls done, about how many there are).

    Raises:
        BadInput: No tokens are asked for, or both are one model.
        DriftlineError: A model failed while it ran, or capture did.
    """
    import torch

    from driftline.captures.torch.framework import capture

    if reference.module is candidate.module:
        raise BadInput("reference and candidate are one and the same model object")
    if mode == "generate" and new_tokens < 1:
        raise BadInput(f"{new_tokens} new tokens cannot be generated: at least 1 is needed")
    count = new_tokens if mode == "generate" else 1
    text = _Text(batch, count)
    look = _Look(take, elements, progress, count * len(list(reference.module.modules())))
    meeting = Meeting(look.met)
    own = _Thread()
    caches: list[Any] = [None, None]
    try:
        with (
            _apart(reference.module, candidate.module),
            room_for_graphs(),
            torch.inference_mode(),
            capture(reference.module, meeting.reference, ports="output", steps_by="call"),
            capture(candidate.module, meeting.candidate, ports="output", steps_by="call"),
        ):
            for step in range(count):
                call = text.call(step, caching=reference.caches)
                look.span = call.span
                every = mode == "model-forward"
                meeting.begin()
                own.begin(partial(_ours, reference, call, caches[0], every, meeting))
                try:
                    theirs = _called("candidate", candidate, call, caches[1], every)
                finally:
                    meeting.over("candidate")
                ours = own.result()
                meeting.end()
                caches = [ours.cache, theirs.cache]
                text.say(step, ours.logits.argmax(dim=-1).cpu())
                look.step_done(step + 1, count)
    finally:
        meeting.over("candidate")
        own.stop()
    faults = [event for event in meeting.events if event.kind == "capture-fault"]
    if faults:
        raise DriftlineError(f"{faults[0].site} of the {faults[0].side}: {faults[0].message}")
    rows = sorted(look.rows, key=lambda row: row.order)
    return Walk(
        (*_with_lone(rows, meeting), *_extra(meeting)),
        text.tokens,
        tuple(meeting.events),
        meeting.most,
    )


def _ours(model: DecoderModel, call: _Call, cache: Any, every: bool, meeting: Meeting) -> Forward:
    try:
        meeting.await_turn()
        return _called("reference", model, call, cache, every)
    finally:
        meeting.over("reference")


def _called(side: str, model: DecoderModel, call: _Call, cache: Any, every: bool) -> Forward:
    """One call; what goes wrong inside a model is said, never made up for."""
    try:
        return model.forward(*call.words, cache, every_position=every)
    except Exception as trouble:
        lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
        said = f"{type(trouble).__name__}: {lines[0][:300]}" if lines else type(trouble).__name__
        raise DriftlineError(
            f"the {side} ({model.target}) failed while it ran: {said}",
            hint="DRIFTLINE_DEBUG=1 shows where",
        ) from trouble


@contextmanager
def _apart(ours: nn.Module, theirs: nn.Module) -> Generator[None]:
    """Give the candidate copies of modules that both models hold, while they run.

    Some libraries keep one activation for all models. Whose call it is could not be told, and the
    side that stands still would be asked for its output.
    """
    shared = set(ours.modules())
    copies: dict[nn.Module, nn.Module] = {}
    places = [
        (parent, name, child)
        for parent in theirs.modules()
        if parent not in shared
        for name, child in parent.named_children()
        if child in shared
    ]
    for parent, name, child in places:
        if child not in copies:
            copies[child] = copy.deepcopy(child)
        setattr(parent, name, copies[child])
    try:
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


class _Call(NamedTuple):
    words: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    span: Span


class _Text:
    """The tokens of a batch as they grow, and what a model is given of them."""

    def __init__(self, batch: Padded, new: int) -> None:
        import torch

        rows, self.width = batch.ids.shape
        size = (rows, self.width + new)
        self.tokens = torch.zeros(size, dtype=torch.int64)
        self.mask = torch.ones(size, dtype=torch.bool)
        self.positions = torch.zeros(size, dtype=torch.int64)
        self.tokens[:, : self.width] = batch.ids
        self.mask[:, : self.width] = batch.mask
        self.positions[:, : self.width] = batch.position_ids
        self.after = batch.mask.sum(dim=1)

    def call(self, step: int, *, caching: bool) -> _Call:
        end = self.width + step
        start = end - 1 if step and caching else 0
        mask = self.mask[:, :end]
        words = (self.tokens[:, start:end], mask, self.positions[:, start:end])
        return _Call(words, Span(np.asarray(mask), start, end - 1 if step else 0))

    def say(self, step: int, chosen: torch.Tensor) -> None:
        """Both go on with the reference's choice."""
        end = self.width + step
        self.tokens[:, end] = chosen
        self.positions[:, end] = self.after + step


class _Look:
    """Measures the pairs as they meet."""

    def __init__(self, take: Take, elements: bool, progress: Progress | None, total: int) -> None:
        self.span = Span(np.ones((1, 1), np.bool_))
        self.rows: list[Row] = []
        self._take = take
        self._elements = elements
        self._progress = progress
        self._total = total
        self._done = 0
        self._before = ("", -1, -1)

    def met(self, pair: Pair, ours: Bytes, theirs: Bytes) -> None:
        counts = None
        if pair.reference.shape == pair.candidate.shape:
            counts = counting_rows(pair.reference.shape, pair.reference.key.slot, self.span)
        found = figures_of(pair, ours, theirs, counts, METRICS, elements=self._elements)
        self.rows.append(found.row)
        self._take(found)
        key = pair.reference.key
        call = (key.site, key.step, key.visit)
        if call != self._before:
            self._before = call
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, max(self._total, self._done))

    def step_done(self, steps: int, count: int) -> None:
        """After the first iteration it is known how many module calls one has."""
        self._total = self._done * count // steps


def _with_lone(rows: list[Row], meeting: Meeting) -> list[Row]:
    missing = [
        lone(record, "missing", "only in the reference")
        for side, record in meeting.alone
        if side == "reference"
    ]
    return sorted([*rows, *missing], key=lambda row: row.order)


def _extra(meeting: Meeting) -> list[Row]:
    return [
        lone(record, "extra", "only in the candidate")
        for side, record in meeting.alone
        if side == "candidate"
    ]


class _Thread:
    """One thread that does one thing after another: torch keeps a pool of threads for each.

    It ends with the process, so that an interrupt need not wait for a long call of the reference.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Forward] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Forward | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="driftline-reference", daemon=True).start()

    def begin(self, job: Callable[[], Forward]) -> None:
        self._asked.put(job)

    def result(self) -> Forward:
        done = self._done.get()
        if isinstance(done, BaseException):
            raise done
        return done

    def stop(self) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        import torch

        with suppress(SystemExit), torch.inference_mode():
            while (job := self._asked.get()) is not None:
                try:
                    self._done.put(job())
                except BaseException as trouble:  # raised in the thread that asked
                    self._done.put(trouble)
