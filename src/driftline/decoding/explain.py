"""Which layer makes a token fail: both models read the text before it again, layer by layer.

A validation compares the output of a model; this module compares the outputs of its layers.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from driftline.comparison.table.table import Side, Table
from driftline.decoding.failures import FirstFailure
from driftline.decoding.files.layer_files import LayerFiles
from driftline.decoding.files.names import ROOT
from driftline.decoding.layerwise.row_metrics import RowMetrics
from driftline.decoding.layerwise.walk import TABLE_METRICS, Walk, walk_layers
from driftline.decoding.models.compilation import Unit
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.targets import Target
from driftline.decoding.options import ValidateOptions
from driftline.decoding.pipeline import Session, load_side
from driftline.decoding.prompts import Padded
from driftline.errors import DriftlineError

_LOGITS = ("logits", "0")
"""Names of the logits among the outputs of models of transformers and ibm-fms."""


def explain(
    options: ValidateOptions,
    first: FirstFailure,
    session: Session,
    *,
    files: LayerFiles | None = None,
) -> Table:
    """Compare every layer's outputs on the text before a failing token; rows are not judged yet.

    Args:
        options: The options of the validation.
        first: The failing token.
        session: The loaded models. A compiled candidate shows only its inputs and outputs, so its
            layers are those of the same candidate without the compiler, or, on a device that runs
            nothing else, compiled block by block.
        files: Takes the metrics of every token, if they are wanted.

    Raises:
        DriftlineError: No layer could be compared.
    """
    batch = _text_before(options, first, session)
    candidate = session.model(options, "candidate")
    reference = session.model(options, "reference")
    # Numbers of every token are needed only if they are written.
    take = _discard if files is None else files.take
    if not options.candidate.compile:
        walk = walk_layers(reference, candidate, batch, take=take, mode="model-forward")
        return _table(options, options.candidate, walk)
    compiled = walk_layers(reference, candidate, batch, take=_discard, mode="model-forward")
    visible = _visible_candidate(options)
    walk = walk_layers(reference, visible.model, batch, take=take, mode="model-forward")
    note = (
        f"the candidate is compiled as a whole ({options.candidate.compile}), which hides its "
        f"layers, so these layers are of the same candidate {visible.how}; relative_l2 "
        f"of its logits is {_logits_error(compiled):.4g} compiled and {_logits_error(walk):.4g} "
        "so: the difference of the two comes from the compiler (driftline layer-metrics "
        f"--compile_unit {visible.unit} shows where)"
    )
    return _table(options, visible.model.target, walk, note, *_graph_notes(visible.model))


def _graph_notes(model: DecoderModel) -> Iterator[str]:
    """Notes about the graphs that reached the backend, and the parts that did not reach it."""
    if not model.units:
        return
    count = model.graphs
    yield count.text
    if count.missed:
        sites = ", ".join(site or ROOT for site in count.missed[:3])
        yield (
            f"{len(count.missed)} of these parts never reached {count.backend} ({sites}), so "
            "nothing is concluded from them, nor from layers that follow them being equal"
        )


def write_layers(
    options: ValidateOptions, first: FirstFailure, session: Session, folder: Path
) -> Table:
    """Compare all layers on the text before a failing token, and save a number per token of each.

    Returns:
        The comparison, which the caller judges and writes.

    Raises:
        DriftlineError: No layer could be compared, or nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".driftline-", dir=folder) as drafts:
            files = LayerFiles(Path(drafts), options.library)
            table = explain(options, first, session, files=files)
            files.finish(folder, options.prefix)
    except OSError as trouble:
        raise DriftlineError(
            f"the layers cannot be written to {folder}: {trouble.strerror}",
            hint="give another folder with --output",
        ) from None
    return table


def _text_before(options: ValidateOptions, first: FirstFailure, session: Session) -> Padded:
    """The text as one prompt without padding."""
    import torch

    prompts = session.prompts(options, first.seed)
    # Padding comes before the prompt: the real tokens are the last ones.
    real = len(prompts[first.prompt].ids) + first.position
    ids = first.tokens[-real:].unsqueeze(0)
    return Padded(
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        torch.arange(ids.shape[1]).unsqueeze(0),
    )


class _VisibleCandidate(NamedTuple):
    """A candidate whose layers can be seen, and how it differs from the compiled one."""

    model: DecoderModel
    how: str
    unit: Unit


def _visible_candidate(options: ValidateOptions) -> _VisibleCandidate:
    """The candidate without its compiler, or, on the AIU, compiled block by block; not cached."""
    if options.candidate.device == "aiu":  # it runs only compiled code
        model = load_side(replace(options, compiled="block"), options.candidate)
        return _VisibleCandidate(model, "compiled block by block", "leaf")
    plain = load_side(options, options.candidate._replace(compile=""))
    return _VisibleCandidate(plain, "without the compiler", "block")


def _table(options: ValidateOptions, candidate: Target, walk: Walk, *notes: str) -> Table:
    return Table(
        rows=walk.rows,
        columns=tuple(metric.column for metric in TABLE_METRICS),
        reference=Side(f"{options.model} ({options.reference})"),
        candidate=Side(f"{options.model} ({candidate})"),
        notes=notes,
    )


def _logits_error(walk: Walk) -> float:
    """relative_l2 of the model's logits; NaN if they were not compared."""
    errors = [
        row.metrics.get("relative_l2")
        for row in walk.rows
        if row.site == ROOT and row.key.port == "output" and row.key.slot in _LOGITS
    ]
    return next((error for error in errors if error is not None), math.nan)


def _discard(metrics: RowMetrics) -> None:
    del metrics
