"""Whether two masks say the same: booleans what may be seen, floats what is added to a score.

A program's eager attention is given floats where another one is given booleans. Where both let the
same be seen, either may stand for the other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import torch

_HIDDEN = -1e4
"""What is added to a score so that nothing of it is left; a bias is nearer to zero."""


def other_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether one is of booleans and the other of floats."""
    return (one is torch.bool and other.is_floating_point) or (
        other is torch.bool and one.is_floating_point
    )


def same_seen(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two masks let the same be seen, and every row sees something.

    What a row is given that sees nothing is nobody's duty: nothing, or the mean of everything.

    >>> floats = torch.tensor([[0.0, -3.4e38], [0.0, 0.0]])
    >>> same_seen(floats == 0, floats), same_seen(floats != 0, floats)
    (True, False)
    >>> same_seen(floats == 0, floats - 1.0)
    False
    """
    sides = [_seen(tensor) for tensor in (one, other)]
    if sides[0] is None or sides[1] is None:
        return False
    try:
        ours, theirs = torch.broadcast_tensors(sides[0], sides[1])
    except RuntimeError:
        return False
    return bool(torch.equal(ours, theirs)) and bool(torch.all(torch.any(ours, -1)))


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """What a mask lets be seen; None where it is no mask, but adds a bias."""
    if mask.dim() == 0 or not mask.numel():
        return None
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= _HIDDEN)).all()) else None
