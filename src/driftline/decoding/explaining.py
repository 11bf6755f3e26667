"""Which layer makes a token fail: both models read that very text again, layer by layer."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import math
from collections.abc import Callable

from driftline.comparison.table.table import Side, Table
from driftline.decoding.compiled_parts import compile_parts
from driftline.decoding.decoder import DecoderModel
from driftline.decoding.failing import FirstFailure
from driftline.decoding.job import Job
from driftline.decoding.layer_files import LayerFiles
from driftline.decoding.layer_names import ROOT
from driftline.decoding.layer_walk import METRICS, Walk, walk_layers
from driftline.decoding.prompts import Padded
from driftline.decoding.row_figures import Figures
from driftline.decoding.targets import Target
from driftline.decoding.validate_ask import ValidateAsk
from driftline.decoding.validation import Subjects, load_side

_LOGITS = ("logits", "0")
"""What transformers and ibm-fms call them among what a model gives."""


def explain(
    ask: ValidateAsk,
    first: FirstFailure,
    subjects: Subjects,
    *,
    files: LayerFiles | None = None,
) -> Table:
    """Compare every layer's outputs on the text before a failing token; rows are not judged yet.

    Args:
        ask: What was validated.
        first: The token.
        subjects: The loaded models. Of a compiled candidate, which shows its own ends only, the
            layers are those of one that is not, or where nothing else runs compiled block by block.
        files: Where figures of every token go, if they are wanted.

    Raises:
        DriftlineError: No layer could be compared.
    """
    import torch

    # Padding is what came before the prompt: the last tokens of the text, as many as are real.
    pool = subjects.pool(ask)
    prompts = pool.sample(ask.batch_size, ask.length, seed=first.seed)
    real = len(prompts[first.prompt].ids) + first.position
    ids = first.tokens[-real:].unsqueeze(0)
    batch = Padded(
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        torch.arange(ids.shape[1]).unsqueeze(0),
    )
    job = Job()
    candidate = subjects.candidate(ask, job)
    reference = subjects.reference(ask, job)
    take = _nothing if files is None else files.take
    walk = _walked(reference, candidate, batch, _nothing if ask.candidate.compile else take)
    notes: list[str] = []
    target = ask.candidate
    if target.compile:
        whole = _root(walk)
        target, other, how = _seen_inside(ask)
        walk = _walked(reference, other, batch, take)
        notes.append(
            f"the candidate is compiled as a whole ({ask.candidate.compile}) and shows nothing but "
            f"its ends, so these layers are of the same candidate {how[0]}; relative_l2 "
            f"of its logits is {whole:.4g} compiled and {_root(walk):.4g} so: what differs between "
            f"the two is the compiler's (driftline layer-metrics --compile_unit {how[1]} shows "
            "where)"
        )
    return Table(
        rows=walk.rows,
        columns=tuple(metric.column for metric in METRICS),
        reference=Side(f"{ask.model} ({ask.reference})"),
        candidate=Side(f"{ask.model} ({target})"),
        notes=tuple(notes),
    )


def _seen_inside(ask: ValidateAsk) -> tuple[Target, DecoderModel, tuple[str, str]]:
    """The candidate with its compiler out of the way, as far as the device allows; not kept."""
    if ask.candidate.device == "aiu":  # it runs nothing that is not compiled
        model = load_side(ask, candidate=True)
        compile_parts(model, "block")
        return ask.candidate, model, ("compiled block by block", "leaf")
    target = ask.candidate._replace(compile="")
    plain = load_side(ask._replace(candidate=target), candidate=True)
    return target, plain, ("without the compiler", "block")


def _walked(
    reference: DecoderModel,
    candidate: DecoderModel,
    batch: Padded,
    take: Callable[[Figures], None],
) -> Walk:
    return walk_layers(reference, candidate, batch, take=take, mode="model-forward")


def _root(walk: Walk) -> float:
    """How far the logits of the model as a whole are apart; NaN if that is not known."""
    found = [
        row.metrics.get("relative_l2")
        for row in walk.rows
        if row.site == ROOT and row.key.port == "output" and row.key.slot in _LOGITS
    ]
    return next((value for value in found if value is not None), math.nan)


def _nothing(figures: Figures) -> None:
    del figures
