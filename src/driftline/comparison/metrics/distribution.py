"""Distribution: how different are two tensors when they are read as logits?

Takes finite float64 arrays, `reference` first. Needs every value at once, so it is not part of the
kernel's one pass and is measured only on request.
"""

from __future__ import annotations

import numpy as np

from driftline.comparison.metrics.difference import F64


def kl(reference: F64, candidate: F64) -> float:
    """Kullback-Leibler divergence `sum p ln(p / q)`, p and q the softmax of the flattened tensors.

    In nats, never negative; 0 for empty tensors. Blind to a constant added to every logit.

    >>> kl(np.array([1.0, 2.0]), np.array([2.0, 3.0]))
    0.0
    >>> round(kl(np.log([0.5, 0.5]), np.log([0.25, 0.75])), 6)
    0.143841
    """
    if not reference.size:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        log_p, log_q = _log_softmax(reference.reshape(-1)), _log_softmax(candidate.reshape(-1))
        nats = float(np.sum(np.exp(log_p) * (log_p - log_q)))
    return 0.0 if nats < 0.0 else nats  # max(0.0, nan) would be 0.0


def _log_softmax(logits: F64) -> F64:
    shifted = logits - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))
