"""Which layer makes a token fail: both models read that very text again, layer by layer."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from driftline.comparison.table import Side, Table
from driftline.decoding.failing import FirstFailure
from driftline.decoding.job import Job
from driftline.decoding.layer_walk import METRICS, walk_layers
from driftline.decoding.prompts import Padded
from driftline.decoding.row_figures import Figures
from driftline.decoding.validate_ask import ValidateAsk
from driftline.decoding.validation import Subjects


def explain(ask: ValidateAsk, first: FirstFailure, subjects: Subjects) -> Table:
    """Compare every layer's outputs on the text before a failing token; rows are not judged yet.

    Args:
        ask: What was validated.
        first: The token.
        subjects: The loaded models. A compiled candidate shows its own ends only.

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
    walk = walk_layers(reference, candidate, batch, take=_nothing, mode="model-forward")
    notes: list[str] = []
    if ask.candidate.compile:
        notes.append(
            "the candidate is compiled as a whole: what lies inside it cannot be seen; "
            "driftline layer-metrics --compile_unit leaf shows it"
        )
    return Table(
        rows=walk.rows,
        columns=tuple(metric.column for metric in METRICS),
        reference=Side(f"{ask.model} ({ask.reference})"),
        candidate=Side(f"{ask.model} ({ask.candidate})"),
        notes=tuple(notes),
    )


def _nothing(figures: Figures) -> None:
    del figures
