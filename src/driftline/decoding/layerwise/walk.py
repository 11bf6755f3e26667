"""Run two decoders on the same text in lockstep and compare the outputs of every layer.

Both are captured while they run, the reference in its own thread. In `generate` mode the candidate
continues with the reference's tokens, so that both read the same text in every iteration. Only
statistics are kept: memory does not grow with layers, tokens or iterations.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
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

from driftline.comparison.measure.pair_rows import lone, paired
from driftline.comparison.metrics.catalogue import STANDARD, Metric
from driftline.comparison.table.row import NOT_RUN, Row
from driftline.decoding.files.names import ROOT
from driftline.decoding.layerwise.rendezvous import Event, Rendezvous
from driftline.decoding.layerwise.row_metrics import RowMetrics, Span, measure_rows, token_rows
from driftline.decoding.models.compilation import room_for_graphs
from driftline.decoding.models.decoder import DecoderModel, Forward
from driftline.decoding.prompts import Padded
from driftline.errors import BadInput, DriftlineError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from driftline.alignment.plan import Pair
    from driftline.decoding.layerwise.rendezvous import Bytes

Mode = Literal["generate", "model-forward"]
Take = Callable[[RowMetrics], None]
Progress = Callable[[int, int], None]

_SHOWN = ("relative_l2", "cosine", "max_abs_error", "mean_abs_error", "one_sided", "different")
TABLE_METRICS: tuple[Metric, ...] = tuple(metric for metric in STANDARD if metric.name in _SHOWN)
"""Of the whole of each output, for the table."""


class Walk(NamedTuple):
    """The result of a walk, besides the metrics that were passed to `take`.

    Attributes:
        rows: One per output and iteration, in the reference's order; then those of the candidate
            that the reference does not have.
        tokens: int64 [prompts, length + new]: what both read, and what the reference says next.
        events: What capture reported.
        most_waiting: The largest number of bytes of outputs that waited for a partner.
    """

    rows: tuple[Row, ...]
    tokens: torch.Tensor
    events: tuple[Event, ...]
    most_waiting: int


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
    """Run both models on one batch and compare the outputs of every module.

    Args:
        reference: The trusted model.
        candidate: The other; another object than the reference.
        batch: The prompts, padded.
        take: Called with the metrics of every output, in the candidate's order of execution.
        mode: `model-forward` is one call on the prompts that gives all logits, `generate` as many
            as there are new tokens.
        new_tokens: Iterations of `generate`.
        elements: Whether the metrics contain every element's difference.
        progress: Called with (module calls done, about how many there are).

    Raises:
        BadInput: No tokens are asked for, or both are one model.
        DriftlineError: A model failed while it ran, or capture did.
    """
    import torch

    from driftline.captures.torch.framework import capture

    if reference.module is candidate.module:
        raise BadInput(
            "reference and candidate are one and the same model object", hint="load the model twice"
        )
    if mode == "generate" and new_tokens < 1:
        raise BadInput(f"{new_tokens} new tokens cannot be generated: at least 1 is needed")
    count = new_tokens if mode == "generate" else 1
    # Both models get their inputs from one text, so neither can read another one.
    text = _Text(batch, count)
    measurement = _Measurement(
        _Take(take, elements, _Backends(reference, candidate)),
        progress,
        count * len(list(reference.module.modules())),
    )
    rendezvous = Rendezvous(measurement.take_pair)
    # Outputs only: inputs are other modules' outputs, and would be compared twice. Every iteration
    # with its values: of later steps capture keeps only summaries where none are named.
    watched = partial(capture, ports="output", steps="*", steps_by="call", model_facts=False)
    reference_thread = _Thread()
    caches: list[Any] = [None, None]
    try:
        with (
            _separate_modules(reference.module, candidate.module),
            room_for_graphs(),
            torch.inference_mode(),
            watched(reference.module, rendezvous.reference),
            watched(candidate.module, rendezvous.candidate),
        ):
            for step in range(count):
                call = text.call(step, caching=reference.caches)
                measurement.span = call.span
                every = mode == "model-forward"
                rendezvous.begin()
                # In its own thread, because it stops in the middle of a call and goes on later.
                reference_thread.begin(
                    partial(_run_reference, reference, call, caches[0], every, rendezvous)
                )
                try:
                    from_candidate = _call_model("candidate", candidate, call, caches[1], every)
                finally:
                    rendezvous.over("candidate")
                from_reference = reference_thread.result()
                rendezvous.end()
                caches = [from_reference.cache, from_candidate.cache]
                text.say(step, from_reference.logits.argmax(dim=-1).cpu())
                measurement.step_done(step + 1, count)
    finally:
        rendezvous.over("candidate")
        reference_thread.stop()
    # Capture never raises into the model it watches, so its own faults are raised here.
    faults = [event for event in rendezvous.events if event.kind == "capture-fault"]
    if faults:
        raise DriftlineError(
            f"{faults[0].site} of the {faults[0].side}: {faults[0].message}",
            hint="does the model run by itself on these prompts?",
        )
    rows = sorted(measurement.rows, key=lambda row: row.order)
    return Walk(
        (*_with_lone(rows, rendezvous), *_extra(rendezvous)),
        text.tokens,
        tuple(rendezvous.events),
        rendezvous.most,
    )


def _run_reference(
    model: DecoderModel, call: _Call, cache: Any, every: bool, rendezvous: Rendezvous
) -> Forward:
    try:
        rendezvous.await_turn()
        return _call_model("reference", model, call, cache, every)
    finally:
        rendezvous.over("reference")


def _call_model(side: str, model: DecoderModel, call: _Call, cache: Any, every: bool) -> Forward:
    """One call; an exception inside a model becomes one message."""
    try:
        return model.forward(*call.arguments, cache, every_position=every)
    except Exception as trouble:
        lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
        summary = f"{type(trouble).__name__}: {lines[0][:300]}" if lines else type(trouble).__name__
        raise DriftlineError(
            f"the {side} ({model.target}) failed while it ran: {summary}",
            hint="DRIFTLINE_DEBUG=1 shows where",
        ) from trouble


@contextmanager
def _separate_modules(reference: nn.Module, candidate: nn.Module) -> Generator[None]:
    """Give the candidate copies of modules that both models hold, while they run.

    Some libraries use one activation module for all models. Its hooks could not tell whose call it
    is, and the side that is stopped would be waited for.
    """
    shared = set(reference.modules())
    copies: dict[nn.Module, nn.Module] = {}
    places = [
        (parent, name, child)
        for parent in candidate.modules()
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
    """Ids, mask and positions of one call, and the tokens that count."""

    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    span: Span


class _Text:
    """The growing tokens of a batch, and the inputs of a model for each step."""

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
        # Without a cache the model reads the whole text again in every step.
        start = end - 1 if step and caching else 0
        mask = self.mask[:, :end]
        arguments = (self.tokens[:, start:end], mask, self.positions[:, start:end])
        return _Call(arguments, Span(np.asarray(mask), start, end - 1 if step else 0))

    def say(self, step: int, chosen: torch.Tensor) -> None:
        """Append the reference's choice, with which both sides continue."""
        end = self.width + step
        self.tokens[:, end] = chosen
        self.positions[:, end] = self.after + step


class _Backends:
    """The outputs of the two models that their backends did not compute."""

    def __init__(self, *models: DecoderModel) -> None:
        self._units = [{unit.site or ROOT: unit for unit in model.units} for model in models]

    def refusal(self, site: str) -> str:
        """Why an output was not computed by the backend; empty if it was."""
        for side, units in zip(("reference", "candidate"), self._units, strict=True):
            for place in _places_above(site) if units else ():
                unit = units.get(place)
                if unit is not None and unit.missed:
                    part = "" if place == site else f" '{place}', which it is part of"
                    return (
                        f"{NOT_RUN} of the {side}: torch.compile gave {unit.backend} no graph "
                        f"of it{part}"
                    )
        return ""


def _places_above(site: str) -> list[str]:
    """A site, everything that it is part of, and the model."""
    words = site.split(".")
    return [*(".".join(words[:count]) for count in range(len(words), 0, -1)), ROOT]


class _Take(NamedTuple):
    """The callback for metrics, whether it takes every element, and which outputs are measured."""

    metrics: Take
    elements: bool
    backends: _Backends


class _Measurement:
    """Measures the pairs as they meet."""

    def __init__(self, take: _Take, progress: Progress | None, total: int) -> None:
        self.span = Span(np.ones((1, 1), np.bool_))
        self.rows: list[Row] = []
        self._take = take
        self._progress = progress
        self._total = total
        self._done = 0
        self._before = ("", -1, -1)

    def take_pair(self, pair: Pair, reference: Bytes, candidate: Bytes) -> None:
        if why := self._take.backends.refusal(pair.candidate.key.site):
            self.rows.append(paired(pair)._replace(status="incomparable", reason=why))
            return
        counts = None
        if pair.reference.shape == pair.candidate.shape:
            counts = token_rows(pair.reference.shape, pair.reference.key.slot, self.span)
        metrics = measure_rows(
            pair, reference, candidate, counts, TABLE_METRICS, elements=self._take.elements
        )
        self.rows.append(metrics.row)
        self._take.metrics(metrics)
        key = pair.reference.key
        call = (key.site, key.step, key.visit)
        # An output may be a tuple: its parts are one call of the module.
        if call != self._before:
            self._before = call
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, max(self._total, self._done))

    def step_done(self, steps: int, count: int) -> None:
        """Set the total of module calls, which is known after the first iteration."""
        self._total = self._done * count // steps


def _with_lone(rows: list[Row], rendezvous: Rendezvous) -> list[Row]:
    missing = [
        lone(record, "missing", "only in the reference")
        for side, record in rendezvous.alone
        if side == "reference"
    ]
    return sorted([*rows, *missing], key=lambda row: row.order)


def _extra(rendezvous: Rendezvous) -> list[Row]:
    return [
        lone(record, "extra", "only in the candidate")
        for side, record in rendezvous.alone
        if side == "candidate"
    ]


class _Thread:
    """One thread for all calls of the reference: torch keeps a pool for every thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Forward] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Forward | BaseException] = queue.SimpleQueue()
        # Daemon: an interrupt need not wait for a long call of the reference.
        threading.Thread(target=self._work, name="driftline-reference", daemon=True).start()

    def begin(self, job: Callable[[], Forward]) -> None:
        self._jobs.put(job)

    def result(self) -> Forward:
        done = self._done.get()
        if isinstance(done, BaseException):
            raise done
        return done

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        import torch

        with suppress(SystemExit), torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                try:
                    self._done.put(job())
                except BaseException as trouble:  # raised in the thread that waits for the result
                    self._done.put(trouble)
