"""Which keys every query of an attention sees, and what a sink takes, solved for from its output.

With scores and values known, the output of a query is a weighted mean of the values that it sees.
Most masks let a query see the keys from one place to another: causal ones, windows, chunks, packed
texts, pads on a side. So each query's first and last key are looked for among all pairs; then
single keys are shown or hidden as long as that helps. A sink is one number of each head, and the
output is linear in it but for its own sum.
"""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import F64, Flags

MOST_TOKENS = 48
"""Most keys of which all pairs of a first and a last one are tried."""
_MOST_CHANNELS = 64
_FLIPS = 8
"""Most keys of one query that may lie outside the best run of keys, or be missing in it."""
_APART, _FIRST, _GIVEN_UP = 8, 6, 16.0
_WORTH = 0.5
"""A key is shown or hidden if that leaves at most this share of what a query's output is off by."""


def solved_mask(scores: F64, values: F64, target: F64, floor: float) -> Flags | None:
    """The keys that every query sees, [sequences, queries, keys].

    None if the first queries that are tried can be given no keys of which their output is made.
    Every second channel decides, so that the others can tell whether it is right.

    Args:
        scores: Before the softmax, nothing hidden, [sequences, heads, queries, keys].
        values: The values, [sequences, heads, keys, width].
        target: The output, [sequences, heads, queries, width].
        floor: Squared relative error of an output that is noise.
    """
    sequences, _, queries, keys = scores.shape
    seen = np.zeros((sequences, queries, keys), dtype=np.bool_)
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    every = max(2, -(-values.shape[1] * values.shape[3] // _MOST_CHANNELS))
    # Heads and widths are joined: the head of every channel has its weights.
    heads = np.repeat(np.arange(values.shape[1], dtype=np.intp), values.shape[3])[::every]
    for sequence in range(sequences):
        v = values[sequence].transpose(1, 0, 2).reshape(keys, -1)[:, ::every]
        wanted = target[sequence].transpose(1, 0, 2).reshape(queries, -1)[:, ::every]
        size = left = 0.0
        # From the last query on, which sees most; a few tell whether it is such a mean at all.
        for number, query in enumerate(
            np.argsort(-(np.arange(queries, dtype=np.intp) % _APART), kind="stable")
        ):
            weights = raised[sequence, heads, query].T
            own = float(wanted[query] @ wanted[query])
            seen[sequence, query], rest = _seen_by(weights, v, wanted[query], floor * own)
            size, left = size + own, left + rest
            if number == min(_FIRST, queries) - 1 and left > _GIVEN_UP * max(floor, 1e-5) * size:
                return None
    return seen


def _seen_by(weights: F64, v: F64, wanted: F64, enough: float) -> tuple[Flags, float]:
    """The keys that one query sees, and its squared error; all are [keys, channels]."""
    keys = len(v)
    sums = np.concatenate([np.zeros((1, v.shape[1])), np.cumsum(weights * v, axis=0)])
    totals = np.concatenate([np.zeros((1, v.shape[1])), np.cumsum(weights, axis=0)])
    first, last = np.triu_indices(keys + 1, 1)
    with np.errstate(all="ignore"):
        made = (sums[last] - sums[first]) / (totals[last] - totals[first])
        left = np.nan_to_num(np.sum((made - wanted) ** 2, axis=1), nan=np.inf)
    best = int(np.argmin(left))
    # Of equals, as where a key has hardly any weight, the longest: most masks hide little.
    alike = np.flatnonzero(left <= left[best] + 0.1 * enough)
    best = int(alike[np.argmax((last - first)[alike])])
    seen = np.zeros(keys, dtype=np.bool_)
    seen[first[best] : last[best]] = True
    rest = float(left[best])
    for _ in range(_FLIPS):
        if rest <= enough:
            break
        some = np.where(seen[:, None], weights, 0.0)
        total, up = some.sum(axis=0), (some * v).sum(axis=0)
        sign = np.where(seen, -1.0, 1.0)[:, None]
        with np.errstate(all="ignore"):
            made = (up + sign * weights * v) / (total + sign * weights)
            left = np.nan_to_num(np.sum((made - wanted) ** 2, axis=1), nan=np.inf)
        key = int(np.argmin(left))
        if left[key] > _WORTH * rest:
            break
        seen[key], rest = not seen[key], float(left[key])
    return seen, rest


def mask_words(right: Flags, wrong: Flags) -> str:
    """How two masks differ, in words."""
    more, fewer = wrong & ~right, right & ~wrong
    queries, keys = right.shape[-2:]
    places = np.arange(keys, dtype=np.intp)
    later = places[None] > places[keys - queries :, None]
    counts = [int(np.count_nonzero(x)) for x in (more, fewer, more & later)]
    parts: list[str] = []
    if counts[0]:
        late = f", {counts[2]} of them later ones," if counts[2] else ""
        parts.append(f"are shown {counts[0]} keys{late} that the reference hides")
    if counts[1]:
        parts.append(f"are not shown {counts[1]} keys that they should see")
    off = int(np.count_nonzero(np.any(more | fewer, axis=-1)))
    return f"of which {off} of {right[..., 0].size} queries {' and '.join(parts)}"


def solved_sinks(scores: F64, seen: Flags, values: F64, target: F64) -> F64:
    """What the sink of each head adds to its sum of exponentials, at least zero."""
    shown = np.where(seen[:, None], scores, -np.inf)
    most = np.where(np.isfinite(top := shown.max(axis=-1, keepdims=True)), top, 0.0)
    raised = np.exp(shown - most)
    short = np.matmul(raised, values) - raised.sum(axis=-1, keepdims=True) * target
    # Equations are weighed by the size of their sum, so that sharp rows do not count for nothing.
    slope = np.exp(np.clip(-most, -300.0, 300.0)) * target
    scale = 1.0 / raised.sum(axis=-1, keepdims=True)
    up = np.sum(slope * short * scale**2, axis=(0, 2, 3))
    down = np.sum((slope * scale) ** 2, axis=(0, 2, 3))
    return np.maximum(up / np.maximum(down, 1e-300), 0.0)
