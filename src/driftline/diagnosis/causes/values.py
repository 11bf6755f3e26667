"""Wrong values everywhere: scales, offsets, other activation functions, saturation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from driftline.comparison.evidence.error_stats import rounded
from driftline.comparison.evidence.leaf_functions import ACTIVATIONS
from driftline.diagnosis.causes.case import F64, Case, Clue, Flags
from driftline.numerics.dtypes import DTYPES


def scale(case: Case) -> Clue | None:
    """`c = s r`, also with a bias that is not scaled, or with one s per channel."""
    r = np.where(case.finite, case.r, 0.0)
    projection = float(np.sum(case.e * r)) / max(case.size, 1e-300)
    if case.leaning:
        what = " (a wrong epsilon does this to a norm)" if case.is_norm else ""
        return Clue(
            "scale",
            0.85,
            f"the error leans along the output by {projection:+.2g} of it, less than noise{what}",
            "epsilon" if case.is_norm else "scale",
            measured=False,
        )
    clues = [
        _one_factor(case, projection),
        _without_bias(case, r),
        _by_channel(case, r),
        _by_row(case, r),
    ]
    return max((clue for clue in clues if clue is not None), key=lambda c: c.score, default=None)


def _one_factor(case: Case, projection: float) -> Clue | None:
    if abs(projection) < 0.25 * case.unit:
        return None  # a factor of nothing
    # Nearly everything is gone: it must still be the reference, made small, and not something else.
    if abs(1.0 + projection) < 0.02 and not _is_multiple(case, 1.0 + projection):
        return None
    score = case.fitted((1.0 + projection) * case.r)
    return Clue(
        "scale",
        score,
        f"the output is {1.0 + projection:.6g} times what it should be, everywhere alike",
        "scale",
    )


_NEARLY_ALL = 0.9


def _is_multiple(case: Case, factor: float) -> bool:
    left = np.where(case.finite, case.c - factor * case.r, 0.0)
    return float(np.sum(left * left)) < 1e-3 * factor * factor * case.size


def _by_row(case: Case, r: F64) -> Clue | None:
    """One factor per row, as where shares of a sum are not made to add up to one."""
    rows, e = case.rows(r), case.rows(case.e)
    if case.r.ndim < 2 or rows.shape[1] < 16 or len(rows) < 4:
        return None
    size = np.maximum(np.einsum("ij,ij->i", rows, rows), 1e-300)
    factors = np.einsum("ij,ij->i", rows, e) / size
    if float(np.abs(1.0 + factors).min()) < 0.02:
        return None  # a row that is gone is another fault
    # Rows that are as they should be tell that it is a matter of which rows, not of a factor.
    touched = np.abs(factors) > 3.0 * max(case.noise, case.unit)
    if float(touched.mean()) < _NEARLY_ALL:
        return None
    score = case.fitted((rows * (1.0 + factors[:, None])).reshape(case.r.shape))
    low, high = float(1.0 + factors.min()), float(1.0 + factors.max())
    what = f"each row is scaled by a factor of its own ({low:.4g} to {high:.4g})"
    return Clue("scale", max(0.0, min(score - 1.0 / rows.shape[1], 0.9)), what, "rows")


def by_slice(case: Case) -> Clue | None:
    """One factor and one constant per index of some axes: samples, channels before places, heads.

    The numbers are fitted on one half of the elements of every slice and judged on the other.
    """
    if case.ratio < 4.0 or case.r.size < 64:
        return None
    # Some samples are enough of a large tensor.
    few = max(1, _MOST_ELEMENTS * len(case.r) // case.r.size)
    if few < len(case.r):
        case = replace(case, r=case.r[:few], c=case.c[:few])
    if case.r.size > 2 * _MOST_ELEMENTS:
        return None
    best: Clue | None = None
    for shape, kept, name in _slices(case.r.shape):
        clue = _slice_factors(case, shape, kept, name)
        # Fewer slices come first, and more must explain clearly more.
        if clue is not None and (best is None or clue.score > best.score + 0.02):
            best = clue
    return best


_MOST_ELEMENTS = 1 << 19
_LEAST_IN_A_SLICE = 8
_HEADS = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 256)
"""Widths of heads; rows as a whole have a rule of their own."""


def _slices(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Shapes to look at, the axes along which numbers are fitted, and their name."""
    for axis in range(len(shape) - 1):
        yield shape, (axis,), f"index of axis {axis}"
    if len(shape) > 3:
        yield shape, (0, 1), "index of axes 0 and 1"
    for width in _HEADS:
        heads, rest = divmod(shape[-1] if len(shape) > 1 else 1, width)
        if heads > 1 and not rest:
            cut = (*shape[:-1], heads, width)
            yield cut, (len(shape) - 1,), f"block of {width} channels (a head)"
            yield cut, tuple(range(len(shape))), f"block of {width} channels (a head) of each token"


def _slice_factors(
    case: Case, shape: tuple[int, ...], kept: tuple[int, ...], name: str
) -> Clue | None:
    count = math.prod(shape[axis] for axis in kept)
    length = case.r.size // count
    if count < 2 or length < _LEAST_IN_A_SLICE:
        return None
    order = (*kept, *(axis for axis in range(len(shape)) if axis not in kept))
    r, e = (
        np.where(case.finite, values, 0.0).reshape(shape).transpose(order).reshape(count, length)
        for values in (case.r, case.e)
    )
    level = (3.0 * max(case.noise, case.unit)) ** 2
    touched: Flags = np.sum(e * e, axis=1) > level * np.sum(r * r, axis=1)
    if np.count_nonzero(touched) < _NEARLY_ALL * count:
        return None  # a matter of which slices, not of a factor
    fitted, judged = slice(0, None, 2), slice(1, None, 2)
    half = r[:, fitted], e[:, fitted]
    for centred in (False, True):
        middle, lean = (
            values.mean(axis=1, keepdims=True) if centred else np.zeros((count, 1))
            for values in half
        )
        a, b = half[0] - middle, half[1] - lean
        factors = np.sum(a * b, axis=1, keepdims=True)
        factors = factors / np.maximum(np.sum(a * a, axis=1, keepdims=True), 1e-300)
        made = factors * (r[:, judged] - middle) + lean
        part = replace(
            case,
            r=r[:, judged],
            c=r[:, judged] + e[:, judged],
            inputs={},
            parts={},
            right_parts={},
        )
        score = min(part.fitted(part.r + made), 0.98)
        if score < _NEARLY_ALL:
            continue
        moves = float(np.sum((factors * (r[:, judged] - middle)) ** 2))
        low, high = float(1.0 + factors.min()), float(1.0 + factors.max())
        if not np.any(r + e, axis=1).all():
            return None  # a slice that is gone is another fault
        if centred and moves < 0.01 * part.energy:
            what = f"a constant is added to each {name}"
            return Clue("offset", score, what, "slices")
        alike = high - low <= 0.01 * max(abs(low), abs(high))
        if alike and not centred:
            return None  # one factor for all of it
        more = " and moved by a constant" if centred else ""
        what = f"each {name} is scaled by a factor of its own ({low:.4g} to {high:.4g}){more}"
        return Clue("scale", score, what, "slices")
    return None


def _without_bias(case: Case, r: F64) -> Clue | None:
    """A scaled weight: what varies between tokens is scaled, what is constant need not be."""
    rows, e = case.rows(r), case.rows(case.e)
    if case.r.ndim < 2 or len(rows) < 8:
        return None
    middle, lean = rows - rows.mean(axis=0), e - e.mean(axis=0)
    size = float(np.sum(middle * middle))
    if not size > 0.0:
        return None
    factor = float(np.sum(middle * lean)) / size
    if abs(factor) < 0.25 * case.unit or abs(1.0 + factor) < 0.02:
        return None
    # The part that varies must follow the factor by itself; the constant would hide that.
    rest, energy = lean - factor * middle, float(np.sum(lean * lean))
    noise = case.noise**2 * size
    if energy <= 2.0 * noise or float(np.sum(rest * rest)) > 9.0 * noise + 0.01 * energy:
        return None
    predicted = rows + factor * middle + e.mean(axis=0)
    score = max(0.0, case.fitted(predicted.reshape(case.r.shape)) - 1.0 / len(rows))
    return Clue(
        "scale",
        min(score + 0.01, 1.0),
        f"what varies between tokens is {1.0 + factor:.6g} times what it should be, as with a "
        "scaled weight",
        "weight",
    )


def _by_channel(case: Case, r: F64) -> Clue | None:
    """One factor per channel, with what is constant in the channel left free."""
    rows, e = case.rows(r), case.rows(case.e)
    if case.r.ndim < 2 or len(rows) < 16 or rows.shape[1] < 2:
        return None
    middle, lean = rows - rows.mean(axis=0), e - e.mean(axis=0)
    size = np.maximum(np.einsum("ij,ij->j", middle, middle), 1e-300)
    factors = np.einsum("ij,ij->j", middle, lean) / size
    if float(np.abs(1.0 + factors).min()) < 0.02:
        return None  # a channel that is gone is another fault
    rest, energy = lean - factors * middle, float(np.sum(lean * lean))
    noise = case.noise**2 * float(size.sum())
    if energy <= 4.0 * noise or float(np.sum(rest * rest)) > 3.0 * noise + 1e-3 * energy:
        return None
    predicted = rows + factors * middle + e.mean(axis=0)
    # Two numbers per channel are fitted: with few rows they explain any error, which the deduction
    # allows for.
    score = case.fitted(predicted.reshape(case.r.shape)) - 2.0 / len(rows)
    low, high = float(1.0 + factors.min()), float(1.0 + factors.max())
    what = f"each channel is scaled by a factor of its own ({low:.4g} to {high:.4g})"
    return Clue("scale", max(0.0, min(score, 0.9)), what, "channels")


# Offsets: the same amount added everywhere, or in each channel.


def offset(case: Case) -> Clue | None:
    """`c = r + b` with one b per channel."""
    if case.r.ndim < 2:
        return None
    rows = case.rows(case.e)
    if len(rows) < 4:
        return None  # with so few tokens any error is one constant per channel
    b: F64 = rows.mean(axis=0)
    share = case.fitted(case.r + b)
    # Means of few rows take some of any error with them.
    share = max(0.0, share - 1.0 / len(rows))
    if not np.any(b):
        return None
    if _may_be_scaled(rows, b, case.rows(np.where(case.finite, case.r, 0.0))):
        share = min(share, 0.75)
    bias = case.params.get("bias")
    detail, what = "", "one constant per channel is added to every token"
    if bias is not None and bias.shape == b.shape:
        detail, what = _against(bias, b, what)
    elif float(np.std(b)) < 0.05 * abs(float(np.mean(b))):
        detail, what = "constant", f"the constant {float(np.mean(b)):.4g} is added everywhere"
    return Clue("offset", share, what, detail)


def _may_be_scaled(e: F64, b: F64, r: F64) -> bool:
    """Whether the constants are a small share of what every token has anyway: perhaps a scale.

    A factor would also move what differs between tokens; where that clearly stays as it is, it is
    no factor.
    """
    middle = r.mean(axis=0)
    size = float(middle @ middle)
    projection = float(b @ middle)
    alike = abs(projection) / max(math.sqrt(size * float(b @ b)), 1e-300)
    if alike <= 0.5 or abs(projection) >= 0.3 * size:
        return False
    varying = (projection / size) * (r - middle)
    power = float(np.sum(varying * varying))
    if not power > 0.0:
        return True
    moved = np.einsum("ij,ij->i", e - b, varying)
    times = float(moved.sum()) / power
    left = moved - times * np.einsum("ij,ij->i", varying, varying)
    return times + 5.0 * math.sqrt(float(left @ left)) / power > _STILL


_STILL = 0.3
"""Share of what a factor would move; below this it is no factor."""


def _against(bias: F64, b: F64, otherwise: str) -> tuple[str, str]:
    """What the constants are, compared with the bias that belongs there."""
    size = float(np.sum(bias * bias))
    if size <= 0.0:
        return "", otherwise
    for times, detail, what in (
        (-1.0, "missing", "what is missing from every token is the bias itself"),
        (1.0, "doubled", "the bias is added twice"),
        (-2.0, "negated", "the bias is subtracted instead of added"),
    ):
        left = b - times * bias
        if float(np.sum(left * left)) < 0.02 * size:
            return detail, what
    return "", otherwise


# Activations: the candidate is f(x) where the reference is g(x).


_SAMPLE = 1 << 16


COARSE = ("float16", "bfloat16")
_TELLING = 64
"""Elements at which two functions must round to different numbers to be told apart."""


def grid_share(right: F64, other: F64, candidate: F64, dtype: str) -> float:
    """Of the elements at which two functions, rounded once, differ: the share that has the other's.

    Functions that differ by less than rounding still round to different numbers here and there, and
    a fused kernel gives exactly those. NaN if they hardly differ, or if the format is fine.
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
    """Which function of an input each side is; both must be known functions, and different."""
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
    """Possible arguments of the function: inputs of the same size."""
    for x in case.inputs.values():
        if x.size == case.r.size:
            yield x.reshape(-1)[::every]


def _fitted(case: Case, x: F64, r: F64, c: F64) -> Clue | None:
    """The functions nearest to both sides on one input."""
    if not np.isfinite(x).all():
        return None
    size = float(np.sum(r * r))
    slack = (3.0 * max(case.noise, case.unit)) ** 2
    made = {label: function(x) for label, function in ACTIVATIONS.items()}
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


# A soft cap: `cap * tanh(x / cap)`.


_CAPS = tuple(10.0 ** (power / 4.0) for power in range(2, 13))


def soft_cap(case: Case) -> Clue | None:
    """One side is the other, softly capped."""
    if case.ratio < 4.0 or not case.finite.all() or case.r.size < 64:
        return None
    for capped, plain, which in (
        (case.c, case.r, "it is softly capped at {:.4g}, which the reference is not"),
        (case.r, case.c, "it lacks the soft cap of {:.4g} that the reference has"),
    ):
        if not np.abs(capped).max() < np.abs(plain).max():
            continue

        every = max(1, plain.size // _SAMPLE)
        some, limited = plain.reshape(-1)[::every], capped.reshape(-1)[::every]

        def left(cap: float, limited: F64 = limited, some: F64 = some) -> float:
            rest = limited - cap * np.tanh(some / cap)
            return float(np.sum(rest * rest))

        best = min(_CAPS, key=left)
        low, high = best / 2.0, best * 2.0
        for _ in range(30):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (a, high) if left(a) > left(b) else (low, b)
        cap = (low + high) / 2.0
        apart = float(np.sum((limited - some) ** 2))
        size = float(np.sum(limited * limited))
        # A cap passes on no more than the relative error that it is given.
        noise = case.noise**2 * size
        # Where one side is much larger, any small tensor is near its capped values: a cap must give
        # the tensor itself, and say more than a factor and a constant do.
        enough = min(0.01 * min(apart, size) + 9.0 * noise, 0.25 * _left_by_a_line(some, limited))
        if apart > 4.0 * noise and left(cap) <= enough:
            score = min(max((apart - left(cap)) / (apart - noise), 0.0), 1.0)
            # A cap far above all values is a factor of little.
            return Clue("soft-cap", score, which.format(cap), "cap")
    return None


def _left_by_a_line(values: F64, wanted: F64) -> float:
    """What the best factor and constant leave of a tensor, as a sum of squares."""
    x, y = values - values.mean(), wanted - wanted.mean()
    size = float(np.sum(x * x))
    slope = float(np.sum(x * y)) / size if size > 0.0 else 0.0
    return float(np.sum((y - slope * x) ** 2))


# Saturation: values stop at a largest one, or overflow to infinity.


# Largest numbers of fp8 and fp16 formats and of int8; a bound that equals one of them names the
# format.
_LARGEST = (448.0, 240.0, 57344.0, 65504.0, 127.0, 128.0)


def saturation(case: Case) -> Clue | None:
    """`c = clip(r)` at values that occur several times, or Inf where r is too large."""
    over = np.isinf(case.c) & np.isfinite(case.r)
    if over.any():
        largest = min(abs(DTYPES[case.dtype].lowest) or np.inf, 3.4e38)
        limit = 65504.0 if largest > 65504.0 else largest
        beyond = float(np.abs(case.r[over]).min())
        if beyond >= 0.98 * limit:
            return Clue(
                "saturation",
                0.95,
                f"values of {beyond:.4g} and more became infinite: beyond {limit:g}",
                "overflow",
            )
        return None
    if case.ratio < 2.0 or case.c.size < 16:
        return None
    high, low = float(np.max(case.c)), float(np.min(case.c))
    at_high = int(np.count_nonzero(case.c == high))
    at_low = int(np.count_nonzero(case.c == low))
    # What stops at zero is a function that has no other sign (ReLU), not a format that is full.
    top = high if high and at_high >= 3 and float(np.max(case.r)) > 1.01 * abs(high) else np.inf
    bottom = low if low and at_low >= 3 and float(np.min(case.r)) < -1.01 * abs(low) else -np.inf
    if high == low or (not np.isfinite(top) and not np.isfinite(bottom)):
        return None
    # Nothing is fitted but bounds that are there: what they leave is noise.
    share = case.fitted(np.clip(case.r, bottom, top))
    bounds = " and ".join(f"{value:.5g}" for value in (bottom, top) if np.isfinite(value))
    format_limit = next(
        (value for value in _LARGEST if abs(high) == value or abs(low) == value), None
    )
    of = f", the largest of its kind ({format_limit:g})" if format_limit else ""
    many = (at_high if np.isfinite(top) else 0) + (at_low if np.isfinite(bottom) else 0)
    return Clue("saturation", share, f"{many} values stop at {bounds}{of}", "clipped")
