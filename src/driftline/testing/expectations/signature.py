# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The signature of a model's output, one number per position, and limits on its change.

The signature of logits is the range (largest minus smallest) over the last axis at every position,
minus the smallest of these ranges; of outputs with fewer than three axes it is the values
themselves, minus the smallest. Ranges do not see a permuted vocabulary or a constant added to all
logits, so a sketch of all values is kept too. `measured` finds limits by flipping the last bits of
weights. Knows torch tensors, and nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline.comparison.tolerance.defaults import LIMITS
from driftline.errors import BadInput
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES

if TYPE_CHECKING:
    import torch


F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NOT_OUTPUT = frozenset({"past_key_values", "loss", "hidden_states", "attentions", "rope_deltas"})
"""Parts of a transformers output that are not part of the signature."""
DEFAULT_LENGTH = 16
"""A model called without inputs reads the tokens 0 … 15, as the documented signature does."""


class Seen(NamedTuple):
    """The signature of one output, and further figures.

    Attributes:
        signature: One number per position, in the precision the model computes in.
        shapes: Shape of every output tensor.
        dtype: Number format of the output (of the first tensor, if there are several).
        not_finite: How many values are NaN or infinite, at positions that are judged.
        rms: Root of the mean square of all values at judged positions.
        sketch: 64 numbers whose distance estimates the distance of all values.
    """

    signature: F64
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    not_finite: int
    rms: float
    sketch: tuple[float, ...]


def see(output: Any, *, judged: Mask | None = None) -> Seen:
    """The signature of the output of a model.

    Args:
        output: A tensor, an array, a tuple or list of them, or an output of transformers.
        judged: True at the positions of axis 1 that are judged, which padding is not. The signature
            has all positions; the count of non-finite values and the sketch only the judged ones.

    Raises:
        BadInput: There is no floating-point tensor in the output.
    """
    import torch

    tensors = tensors_of(output)
    if not tensors:
        raise BadInput(
            f"the output ({type(output).__name__}) holds no floating-point tensor",
            hint="expect the logits or hidden states of the model",
        )
    shapes = tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)
    # Tensors of the same positions form one row per position.
    joinable = len({shape[:-1] for shape in shapes}) == 1 and all(shapes)
    joined = [torch.cat(tensors, dim=-1)] if joinable else tensors
    parts = [_numbers(tensor) for tensor in joined]
    values = [_judged_values(tensor, judged) for tensor in tensors]
    everything = np.concatenate(values) if len(values) > 1 else values[0]
    summary = kernel.summarize(everything, DTYPES[everything.dtype.name], count=everything.size)
    return Seen(
        np.concatenate(parts),
        shapes,
        str(tensors[0].dtype).removeprefix("torch."),
        int(summary.nan + summary.pos_inf + summary.neg_inf),
        summary.l2 / math.sqrt(max(summary.count, 1)),
        tuple(summary.sketch),
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of an output in its own order, without caches and losses."""
    import torch

    if isinstance(output, np.ndarray):
        output = torch.as_tensor(output)
    if isinstance(output, torch.Tensor):
        return [output.detach()] if output.is_floating_point() and output.numel() else []
    # Outputs of transformers are mappings; caches and losses in them are no answers.
    if isinstance(output, Mapping):
        named = cast("Mapping[Any, Any]", output)
        return [t for key, part in named.items() if key not in NOT_OUTPUT for t in tensors_of(part)]
    if isinstance(output, (tuple, list)):
        return [t for part in cast("Sequence[Any]", output) for t in tensors_of(part)]
    return []


def _numbers(tensor: torch.Tensor) -> F64:
    import torch

    # In the output's own precision: that is what the documented files hold.
    spread = tensor.amax(dim=-1) - tensor.amin(dim=-1) if tensor.ndim >= 3 else tensor
    finite = torch.isfinite(spread)
    if finite.any() and not finite.all():
        # Padding is NaN in some attentions. At a judged position, a NaN is counted and refused.
        spread = torch.where(finite, spread, spread[finite].min())
    anchored = spread - spread.min()
    return np.asarray(anchored.cpu().double().reshape(-1).numpy(), np.float64)


def _judged_values(tensor: torch.Tensor, judged: Mask | None) -> npt.NDArray[Any]:
    import torch

    if judged is not None and tensor.ndim >= 2 and tensor.shape[1] == judged.size:
        tensor = tensor[:, torch.from_numpy(judged).to(tensor.device)]
    # float32 holds every narrower format exactly.
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return np.ascontiguousarray(tensor.cpu().to(wide).reshape(-1).numpy())


class Distance(NamedTuple):
    """The distance of two signatures.

    Attributes:
        off: The distance at each position; zero at positions that are not judged.
        largest: The largest of them.
        rms: Root of their mean square over judged positions.
        moved: Estimated relative L2 distance of all values; nan where a sketch is missing.
    """

    off: F64
    largest: float
    rms: float
    moved: float


def judged_positions(size: int, judged: Mask | None) -> Mask:
    """The numbers of a signature that count: all, or those that are not padding in each tensor."""
    # A mask that does not fit is ignored; everything is judged.
    if judged is None or not judged.any() or size % judged.size:
        return np.ones(size, np.bool_)
    return np.resize(judged, size)


def distance(
    expected: F64, seen: F64, judged: Mask, *, sketches: tuple[Sequence[float], Sequence[float]]
) -> Distance:
    """The distance of a signature from the expected one; both have the same length.

    The smallest range, which is subtracted from every signature, may belong to padding, whose value
    means nothing. So the smallest judged number is subtracted from both first.
    """
    from driftline.numerics.definitions import estimate_l2, estimate_l2_distance

    off = np.zeros(expected.size)
    if judged.any():
        seen_values, expected_values = seen[judged], expected[judged]
        off[judged] = np.abs(
            (seen_values - seen_values.min()) - (expected_values - expected_values.min())
        )
    kept = off[judged]
    first, second = sketches
    moved = math.nan
    if first and len(first) == len(second):
        apart, size = estimate_l2_distance(first, second), estimate_l2(first)
        moved = apart / size if size else (0.0 if apart == 0.0 else math.inf)
    rms = float(np.sqrt(np.mean(kept * kept))) if kept.size else 0.0
    return Distance(off, float(kept.max()) if kept.size else 0.0, rms, moved)


def weight_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The keys of a model's state dict, sorted, and the shape behind each.

    The prefix of the wrapper of `torch.compile` is removed from the keys.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for key, value in module.state_dict().items():
        shape: Any = getattr(value, "shape", ())
        shapes[key.replace("_orig_mod.", "")] = tuple(int(size) for size in shape)
    return dict(sorted(shapes.items()))


@contextmanager
def quiet(module: Any, seed: int) -> Generator[None]:
    """Set evaluation mode, no gradients and a fixed seed; restore everything afterwards."""
    import torch

    parts = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    modes = [part.training for part in parts]
    # The test's own random numbers must not change because of a check.
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        if parts:
            parts[0].eval()
        try:
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode


def call(model: Any, inputs: Any) -> Any:
    """The model's output: a mapping is passed by name, a tuple or list by place."""
    import torch

    if inputs is None:
        device = torch.device("cpu")
        if isinstance(model, torch.nn.Module):
            device = next((p.device for p in model.parameters()), device)
        inputs = torch.arange(DEFAULT_LENGTH, device=device).unsqueeze(0)
    if isinstance(inputs, Mapping):
        return model(**cast("Mapping[str, Any]", inputs))
    if isinstance(inputs, (tuple, list)):
        return model(*cast("Sequence[Any]", inputs))
    return model(inputs)


# Limits: how far the output moves when the last bits of the weights change.


RUNS = 4
MARGIN = 2.0
"""The limit is this multiple of the largest measured change."""
_ROUNDINGS = 4
"""The smallest limit, in units of roundoff of the largest number."""


class Allowed(NamedTuple):
    """The limits on the distance of an output from the captured one.

    Attributes:
        largest: Largest distance at a position.
        rms: Root mean square over all positions.
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
    """Limits from flipped last bits; the defaults of the number format if these give no result.

    Args:
        module: The model whose weights are flipped; nothing else can be measured.
        base: Its output without flipped bits.
        again: Calls it once more.
        judged: See `signature.see`.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        return by_format(base)
    distances: list[Distance] = []
    positions = judged_positions(base.signature.size, judged)
    for seed in range(RUNS):
        with flipped(module, seed):
            seen = again()
        # Flipped bits broke the model, so they measure nothing.
        if seen.not_finite or seen.signature.size != base.signature.size:
            return by_format(base)
        sketches = (base.sketch, seen.sketch)
        distances.append(distance(base.signature, seen.signature, positions, sketches=sketches))
    worst = max(distances, key=lambda entry: entry.largest)
    if worst.largest == 0.0:
        return by_format(base)  # integer weights, or a compiler that has copied them
    # Four runs may by chance move less than rounding does.
    least = _ROUNDINGS * _roundoff(base) * float(base.signature.max(initial=0.0))
    return Allowed(
        max(MARGIN * worst.largest, least),
        max(MARGIN * max(entry.rms for entry in distances), least),
        max(MARGIN * max(entry.moved for entry in distances), _ROUNDINGS * _roundoff(base)),
        f"{MARGIN:g} times what flipping the last bit of half of the weights does ({RUNS} runs)",
    )


def by_format(base: Seen) -> Allowed:
    """The limits of the output's number format, if nothing could be measured."""
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

    # Same width as the weights, to reach their bits.
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
