"""Whether a captured result is as good as the trusted one, though not the same to the bit.

Other kernels and other devices add in another order: some elements of 16 bits then fall to the
neighbouring value, either way. That is told from a fault on *all* elements: how large the
difference is as a whole and in its worst row, and which way it leans, each held far below what a
diagnosis would need to convict. The noise it is measured by comes from wide arithmetic on some
rows. In wide formats there is no such noise, and a diagnosis allows units of roundoff: there every
row must be so near that no choice of rows can come to its limits. Whoever is not near is looked at
in full; who is to blame is not known here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from driftline.adapters.torch.replay_noise import some_rows

_WHOLE, _ROW = 0.75, 1.4
"""Of the noise, and of that in its worst row: together with it less than the 1.35 times (of errors
independent of each other) and the 2.5 times (of errors that add up) that a diagnosis allows."""
_SIZE = 1.25
"""Times the noise of the trusted result: what the captured one may have on the sample."""
_LEAN, _OFFSET = 0.004, 0.02
"""Units of roundoff; a diagnosis allows 0.05 of the first, 0.3 of the other."""

_WIDE_ROW, _WIDE_WORST = 4.0, 8.0
"""Units of roundoff, of the size of each row and of the typical row. A diagnosis allows an error of
32, a lean of 8, an offset of 48 and 64 in the worst row; of rows that are each off by 4 of their
size at most, no choice has more than 4 of the first three."""
_SMALLEST = 1e-10
"""Rows below this size are not judged: squares of their differences are no numbers any more."""


class Some(NamedTuple):
    """Some rows and channels of a result.

    Attributes:
        exact: In wide arithmetic.
        captured: What the captured run has there.
        every: Each how many-th channel it is.
    """

    exact: torch.Tensor
    captured: torch.Tensor
    every: int


def nearness(captured: torch.Tensor, native: torch.Tensor, some: Some) -> float | None:
    """The difference of two results in units of noise; None where they are not near.

    Args:
        captured: What the captured run has, of 16 bits.
        native: What the trusted module gives in that format.
        some: Some of it, exactly.
    """
    if captured.dtype != native.dtype or captured.shape != native.shape or not captured.numel():
        return None
    if captured.element_size() != 2 or not captured.is_floating_point():
        return None
    trusted = some_rows(native)[:, :: some.every].to(some.exact.dtype) - some.exact
    noise = float(trusted.norm())
    if not float((some.captured.to(some.exact.dtype) - some.exact).norm()) <= _SIZE * noise:
        return None
    channels = native.shape[-1]
    at = _apart(captured, native)
    made = native.reshape(-1)[at].float()
    d = captured.reshape(-1)[at].float() - made
    size = float(torch.linalg.vector_norm(native.float())) ** 2
    rows = torch.zeros(native.numel() // channels, device=native.device)
    rows.index_add_(0, at // channels, d * d)
    typical = noise / math.sqrt(some.exact.numel())
    worst = float(trusted.square().sum(-1).max()) / some.exact.shape[-1]
    unit = torch.finfo(native.dtype).eps / 2.0
    whole = math.sqrt(float(rows.sum()) / native.numel()) / typical if typical else math.inf
    offset = abs(float(d.sum())) / math.sqrt(native.numel() * size) if size else math.inf
    lean = abs(float(d @ made)) / size if size else math.inf
    # Written so that what is no number is not near.
    near = (
        whole <= _WHOLE
        and float(rows.max()) / channels <= _ROW**2 * worst
        and lean <= _LEAN * unit
        and offset <= _OFFSET * unit
    )
    return whole if near else None


def wide_nearness(captured: torch.Tensor, made: torch.Tensor) -> float | None:
    """The difference of two wide results in its worst row, as a share of what is near.

    Args:
        captured: What the captured run has, of 32 or 64 bits.
        made: What the trusted module gives.

    Returns:
        None where they are not near.
    """
    if captured.dtype != made.dtype or captured.shape != made.shape or not captured.numel():
        return None
    if made.dtype not in (torch.float32, torch.float64) or made.dim() < 2:
        return None
    with torch.no_grad():
        unit = torch.finfo(made.dtype).eps / 2.0
        size = torch.linalg.vector_norm(made, dim=-1)
        apart = torch.linalg.vector_norm(captured - made, dim=-1)
        typical = torch.linalg.vector_norm(size) / math.sqrt(size.numel())
        allowed = unit * torch.minimum(_WIDE_ROW * size, _WIDE_WORST * typical)
        most, least, total = torch.stack(((apart / allowed).max(), size.min(), typical)).tolist()
    # Written so that what is no number is not near.
    near = most <= 1.0 and least >= _SMALLEST and math.isfinite(total)
    return most if near else None


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Places of a flat tensor of 16 bits where two are not the same to the bit."""
    here, there = (t.detach().contiguous().reshape(-1).view(torch.int16) for t in (one, other))
    if not one.is_cpu:
        return (here != there).nonzero().reshape(-1)
    # torch takes several times as long for elements of 16 bits.
    return torch.from_numpy(np.flatnonzero(here.numpy() != there.numpy()))
