"""Tokens that a router sent to other experts because two experts scored equally: arithmetic noise.

Rounding decides a choice between near equals. The token then differs widely without any fault, and
so does everything that reads it: that token in the same block, and the later tokens of its sequence
in later layers. A change that the router's own scores do not excuse is not listed here; it is left
to the diagnosis.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Plan
from driftline.comparison.evidence.error_stats import read_whole
from driftline.comparison.verdict.sites import ancestors, contains, parts_of
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record
from driftline.runs.run import Run

Flags = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]

_CHOICE = re.compile(r"(?i)router|topk|moe|experts|gating")
# No router chooses more experts per token than this; wider integer tensors are token ids or
# positions.
_MOST_CHOICES = 64
_NEAR = 0.1
"""Largest gap between scores that counts as a tie, relative to the size of the token's scores."""


class Flip(NamedTuple):
    """Tokens of one call of a router that were sent to other experts.

    Attributes:
        router: Site of the router.
        order: Execution order of its choice, in the reference.
        step: Step of the call.
        rank: Rank of the call.
        rows: One flag per token.
        length: Number of tokens in a sequence; 0 if unknown.
    """

    router: str
    order: int
    step: int
    rank: int
    rows: Flags
    length: int = 0


def sites_with_choices(candidate: Run) -> dict[str, int]:
    """Return sites that contain discrete choices, and the number of successive choices in each."""
    sites: set[str] = set()
    for record in candidate.records:
        if record.key.port != "output" or record.key.site in sites:
            continue
        dtype = DTYPES.get(record.dtype)
        # Integers with two axes or more are choices per token; a single row of integers is a shape
        # or a length.
        picks = dtype is not None and dtype.kind in ("int", "uint") and len(record.shape) > 1
        if picks or _CHOICE.search(record.class_name):
            sites.add(record.key.site)
    outermost = [site for site in sites if not any(outer in sites for outer in ancestors(site))]
    return {**dict.fromkeys(sites, 1), **parts_of(outermost)}


def flips(reference: Run, candidate: Run, plan: Plan) -> list[Flip]:
    """Return all routing choices that changed near a tie, by the reference's names."""
    routing_flips: list[Flip] = []
    partners = {pair.reference.key: pair for pair in plan.pairs}
    for pair in plan.pairs:
        reference_record, candidate_record = pair.reference, pair.candidate
        if (
            not _is_choice(reference_record)
            or not _is_choice(candidate_record)
            or reference_record.shape != candidate_record.shape
        ):
            continue
        # Equal digests mean equal choices, so they need not be read.
        if reference_record.digest and reference_record.digest == candidate_record.digest:
            continue
        a, b = _codes(reference, reference_record), _codes(candidate, candidate_record)
        if a is None or b is None:
            continue
        # The order of the chosen experts does not matter, only which ones were chosen.
        other = (np.sort(a, axis=1) != np.sort(b, axis=1)).any(axis=1)
        if not other.any():
            continue
        near = np.zeros(len(other), dtype=np.bool_)
        for key, scores in partners.items():
            chosen = reference_record.key
            if key.same_call(chosen) and key.port == chosen.port == "output":
                r = read_whole(reference, scores.reference)
                c = read_whole(candidate, scores.candidate)
                if r is not None and c is not None and r.shape == c.shape:
                    near |= _near(_by_token(r), _by_token(c), len(other), a.shape[1])
        if (other & near).any():
            key = reference_record.key
            length = _length(reference, key.step, len(other))
            routing_flips.append(
                Flip(key.site, reference_record.order, key.step, key.rank, other & near, length)
            )
    return routing_flips


def _length(run: Run, step: int, tokens: int) -> int:
    """Return the number of tokens of a sequence, by a tensor with axes for sequences and tokens."""
    for record in run.records:
        shape = record.shape
        if record.key.step == step and len(shape) == 3 and shape[0] * shape[1] == tokens:
            return shape[1]
    return 0


def rows_reached(
    routing_flips: Sequence[Flip], site: str, record: Record, shape: Sequence[int]
) -> Flags | None:
    """Return which rows a changed choice reaches; None if none, all rows if that is unknown."""
    rows = int(np.prod(shape[:-1])) if len(shape) > 1 else int(np.prod(shape))
    reached = np.zeros(rows, dtype=np.bool_)
    for flip in routing_flips:
        if (flip.step, flip.rank) != (record.key.step, record.key.rank):
            continue
        # A tensor computed before the router cannot depend on its choice.
        if record.order < flip.order:
            continue
        block = flip.router.rpartition(".")[0]
        inside = site == block or contains(block, site) if block else False
        if inside and rows == len(flip.rows):
            reached |= flip.rows
        elif inside:
            reached[:] = True  # tokens are sorted by expert, so another choice moves all rows
        else:
            reached |= _later(flip, shape, rows)
    return reached if reached.any() else None


def _later(flip: Flip, shape: Sequence[int], rows: int) -> Flags:
    """Return the flipped and later tokens of their sequences; all rows if the order is unknown."""
    tokens = len(flip.rows)
    if rows == tokens and flip.length:
        by_sequence = flip.rows.reshape(-1, flip.length)
        return np.logical_or.accumulate(by_sequence, axis=1).reshape(-1)
    if len(shape) > 3 and shape[0] and tokens % shape[0] == 0:
        sequences = flip.rows.reshape(shape[0], -1).any(axis=1)
        return np.repeat(sequences, rows // shape[0])
    return np.ones(rows, dtype=np.bool_)


def _is_choice(record: Record) -> bool:
    dtype = DTYPES.get(record.dtype)
    return (
        record.key.port == "output"
        and dtype is not None
        and dtype.kind in ("int", "uint")
        and dtype.bits >= 8
        and record.kept == "full"
        and len(record.shape) > 1
        and 0 < record.shape[-1] <= _MOST_CHOICES
        and 0 not in record.shape
    )


def _codes(run: Run, record: Record) -> Codes | None:
    try:
        values = np.asarray(run.raw(record), dtype=np.int64)
    except (DriftlineError, OSError, ValueError, TypeError):
        return None
    return values.reshape(-1, record.shape[-1])


def _by_token(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)


def _near(
    r: npt.NDArray[np.float64], c: npt.NDArray[np.float64], tokens: int, chosen: int
) -> Flags:
    """Return tokens whose gap between last chosen and first rejected score is within the errors."""
    if len(r) != tokens or r.shape[1] <= chosen:
        return np.zeros(tokens, dtype=np.bool_)
    best = -np.sort(-r, axis=1)
    gap = best[:, chosen - 1] - best[:, chosen]
    apart = np.abs(c - r).max(axis=1)
    size = np.sqrt((r * r).mean(axis=1))
    # Both scores may move towards each other, hence twice the largest difference.
    return np.asarray((gap <= 2.0 * apart) & (gap <= _NEAR * size), dtype=np.bool_)
