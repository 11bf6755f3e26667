"""Rows that a module's own code hands to a part in another order than the captured run did.

Code that sorts tokens by their expert may put those of one expert in any order, and does so
otherwise on another device. A part that works on each row by itself is then answered in the order
of the code that is repeated. Only rows that are the captured ones to within rounding are taken for
them: what is wrong stays where it is.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import torch
from torch import nn

from driftline.adapters.torch.replay_noise import some_rows

_ROUNDS = 12
_UNITS = 32.0
"""Units of roundoff that two rows may be apart, by their size; other rows are as far as they are
large."""


def works_by_row(module: nn.Module) -> bool:
    """Whether a part is a function of each row: it has no weights and no parts."""
    return not (module._modules or module._parameters or module._buffers)


def order_of(made: torch.Tensor, captured: torch.Tensor) -> torch.Tensor | None:
    """Which row of what was made is each captured row; None where they come in the same order.

    >>> rows = torch.eye(4) + 1
    >>> order_of(rows[[0, 3, 1, 2]], rows)
    tensor([0, 2, 3, 1])
    >>> order_of(rows + 1, rows) is None
    True
    """
    if made.dim() != 2 or made.shape != captured.shape or not made.numel():
        return None
    coarse = max((made.dtype, captured.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    most = _UNITS * torch.finfo(coarse).eps / 2.0
    if bool(_alike(some_rows(made).float(), some_rows(captured).float(), most).all()):
        return None
    ours, theirs = made.detach().float(), captured.float()
    there = torch.arange(len(ours), device=ours.device)
    apart = ~_alike(ours, theirs, most)
    order, left, free = there.clone(), there[apart], there[apart]
    chance = torch.Generator().manual_seed(0)
    for _ in range(_ROUNDS):
        along = torch.randn(ours.shape[1], generator=chance).to(ours.device)
        left = left[torch.argsort(theirs[left] @ along, stable=True)]
        free = free[torch.argsort(ours[free] @ along, stable=True)]
        same = _alike(ours[free], theirs[left], most)
        order[left[same]] = free[same]
        left, free = left[~same], free[~same]
        if not len(left):
            break
    if bool((order == there).all()):
        return None
    # What fits nowhere stays in place where it can, so that an error is seen where it is.
    stay = torch.isin(left, free)
    order[left[stay]] = left[stay]
    order[left[~stay]] = free[~torch.isin(free, left)]
    return order


def _alike(one: torch.Tensor, other: torch.Tensor, most: float) -> torch.Tensor:
    return (one - other).norm(dim=1) <= most * other.norm(dim=1)


def reordered(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Its rows in another order; itself where it has not as many."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor
    return rows[order].reshape(tensor.shape) if len(rows) == len(order) else tensor
