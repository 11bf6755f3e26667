"""How much of a difference is arithmetic: what a model does when its weights' last bits change.

Another kernel, another order of summation or another device rounds elsewhere. Nobody can tell by
how much a model answers to that without trying it: so the last mantissa bit of a random half of all
weights is flipped, a few times, and the answers are kept. Flipping twice restores the weights, so
nothing is copied. Measured on a 2-layer Llama, the largest change of a signature is 0.02 to 0.06 in
float16 where eager against SDPA attention is 0.008 and another model library 0.008 to 0.016.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.gating.signature import Distance, Mask, Seen, distance, judged_positions
from driftline.numerics.dtypes import DTYPES
from driftline.tolerance.defaults import LIMITS

if TYPE_CHECKING:
    import torch

RUNS = 4
MARGIN = 2.0
"""The limit is so many times the largest that was measured."""
_ROUNDINGS = 4
"""At least so many units of roundoff of the largest number, however still a model is."""


class Allowed(NamedTuple):
    """How far an output may be from the captured one.

    Attributes:
        largest: At any position.
        rms: Over all positions.
        moved: Relative L2 distance of all values behind the signature, by their sketches.
        why: Where the limits come from, as a clause.
    """

    largest: float
    rms: float
    moved: float
    why: str


def measured(
    module: Any, base: Seen, again: Callable[[], Seen], *, judged: Mask | None = None
) -> Allowed:
    """Limits from flipped last bits; the defaults of the number format where that says nothing.

    Args:
        module: The model whose weights are flipped; anything else cannot be measured.
        base: What it gave as it is.
        again: Calls it once more.
        judged: See `signature.see`.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        return by_format(base)
    found: list[Distance] = []
    positions = judged_positions(base.signature.size, judged)
    for seed in range(RUNS):
        with flipped(module, seed):
            seen = again()
        if seen.not_finite or seen.signature.size != base.signature.size:
            return by_format(base)
        sketches = (base.sketch, seen.sketch)
        found.append(distance(base.signature, seen.signature, positions, sketches=sketches))
    worst = max(found, key=lambda one: one.largest)
    if worst.largest == 0.0:
        return by_format(base)  # integer weights, or a compiler that has copied them
    least = _ROUNDINGS * _roundoff(base) * float(base.signature.max(initial=0.0))
    return Allowed(
        max(MARGIN * worst.largest, least),
        max(MARGIN * max(one.rms for one in found), least),
        max(MARGIN * max(one.moved for one in found), _ROUNDINGS * _roundoff(base)),
        f"{MARGIN:g} times what flipping the last bit of half of the weights does ({RUNS} runs)",
    )


def by_format(base: Seen) -> Allowed:
    """Limits where nothing could be measured: those of the output's number format."""
    limit = LIMITS.get(base.dtype, LIMITS["float32"])
    return by_relative_l2(base, limit, f"a relative L2 of {limit:g}, the default of {base.dtype}")


def by_relative_l2(base: Seen, limit: float, why: str) -> Allowed:
    """Limits from one on the relative L2 distance of all values.

    A range is the difference of two values, so its error is √2 times theirs; the largest of some
    thousand positions is about four times that.
    """
    error = math.sqrt(2.0) * limit * base.rms
    return Allowed(4.0 * error, error, limit, why)


def _roundoff(base: Seen) -> float:
    dtype = DTYPES.get(base.dtype)
    return dtype.unit_roundoff if dtype is not None else math.ldexp(1.0, -24)


@contextmanager
def flipped(module: torch.nn.Module, seed: int) -> Generator[None]:
    """The last mantissa bit of a random half of all floating-point weights, flipped inside."""
    _flip(module, seed)
    try:
        yield
    finally:
        _flip(module, seed)


def _flip(module: torch.nn.Module, seed: int) -> None:
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            plain = weight.detach()
            if type(plain) is not torch.Tensor or plain.is_meta or not plain.is_floating_point():
                continue  # sharded and packed weights have no bits of their own
            bits = plain.view(integers[plain.element_size()])
            coin = torch.randint(0, 2, plain.shape, generator=dice, dtype=torch.uint8)
            bits.bitwise_xor_(coin.to(plain.device).to(bits.dtype))
