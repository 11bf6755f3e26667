"""Another activation function: the candidate is f(x) where the reference is g(x)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.reading import rounded

_erf = np.frompyfunc(math.erf, 1, 1)
_SAMPLE = 1 << 16


def _sigmoid(x: F64) -> F64:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _gelu(x: F64) -> F64:
    return 0.5 * x * (1.0 + np.asarray(_erf(x / math.sqrt(2.0)), dtype=np.float64))


def _gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


FUNCTIONS: dict[str, Callable[[F64], F64]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "gelu (tanh)": _gelu_tanh,
    "gelu (sigmoid)": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "relu squared": lambda x: np.maximum(x, 0.0) ** 2,
    "leaky relu": lambda x: np.where(x > 0.0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0))),
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0.0)),
    "hard swish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "no activation": lambda x: x,
}


COARSE = ("float16", "bfloat16")
_TELLING = 64
"""Elements at which two functions must give different numbers of the format to be told apart."""


def grid_share(right: F64, other: F64, candidate: F64, dtype: str) -> float:
    """Of the elements at which two functions, rounded once, differ: how many are the other's.

    Functions that differ by less than rounding still round to different numbers here and there, and
    a fused kernel gives exactly those. NaN where they hardly differ, or the format is a fine one.
    """
    if dtype not in COARSE:
        return math.nan
    a, b = rounded(right, dtype), rounded(other, dtype)
    apart = a != b
    if np.count_nonzero(apart) < _TELLING:
        return math.nan
    return float(np.count_nonzero(candidate[apart] == b[apart]) / np.count_nonzero(apart))


GRID = 0.9


def activation(case: Case) -> Clue | None:
    """Which function of an input each side is; both must be known ones, and different."""
    flat_r, flat_c = case.r.reshape(-1), case.c.reshape(-1)
    every = max(1, flat_r.size // _SAMPLE)
    r, c = flat_r[::every], flat_c[::every]
    use = np.isfinite(r) & np.isfinite(c)
    if np.count_nonzero(use) < 32:
        return None
    best: Clue | None = None
    for x in _arguments(case, every):
        clue = _fitted(case, x[use], r[use], c[use])
        if clue is not None and (best is None or clue.score > best.score):
            best = clue
    return best


def _arguments(case: Case, every: int) -> Iterator[F64]:
    """What the function may have been applied to: an input of the same size."""
    for x in case.inputs.values():
        if x.size == case.r.size:
            yield x.reshape(-1)[::every]


def _fitted(case: Case, x: F64, r: F64, c: F64) -> Clue | None:
    """The functions nearest to the two sides on one input."""
    if not np.isfinite(x).all():
        return None
    size = float(np.sum(r * r))
    slack = (3.0 * max(case.noise, case.unit)) ** 2
    made = {label: function(x) for label, function in FUNCTIONS.items()}
    right = min(made, key=lambda label: float(np.sum((made[label] - r) ** 2)))
    if float(np.sum((made[right] - r) ** 2)) > max(slack, 1e-6) * size:
        return None
    wrong = min(made, key=lambda label: float(np.sum((made[label] - c) ** 2)))
    if wrong == right:
        return None
    e, p = c - r, made[wrong] - made[right]
    power = float(np.sum(p * p))
    if power <= 0.0:
        return None
    times = float(np.sum(e * p)) / power
    rest = float(np.sum((e - p) ** 2))
    energy = float(np.sum(e * e))
    noise = case.noise**2 * size
    if grid_share(made[right], made[wrong], c, case.dtype) > GRID:
        times, score = 1.0, 0.95
    elif energy > 1.2 * noise:
        score = min(max((energy - rest) / (energy - noise), 0.0), 1.0)
        if rest > 0.05 * energy + 4.0 * noise:
            return None  # an activation is known exactly: what it leaves is noise
    else:
        # Below noise: the error must follow the difference of the two functions, at its full size.
        spread = math.sqrt(max(rest, 1e-300) / len(e) / power)
        score = 0.9 if abs(times - 1.0) < 0.15 and times > 8.0 * spread else 0.0
    if abs(times - 1.0) > 0.15:
        return None
    return Clue(
        "activation", score, f"it computes {wrong} where the reference computes {right}", wrong
    )
