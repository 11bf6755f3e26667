"""Sums, means and other reductions: over which elements, along which axes, divided by what.

Which tokens are real is told by flags and lengths that the program hands to its modules. Where a
reduction can be read, the parameter in which two readings differ is the mistake. Where it cannot,
an error in those samples that have pads, and in no other, is a matter of the pads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue, Codes, Flags
from driftline.diagnosis.causes.gates import Member, compared

_MOST_ELEMENTS, _MOST_TENSORS, _MOST_MARKS = 1 << 18, 6, 4
_MOST_SAMPLES = 4096
_EVERYWHERE = "all elements"


def marks(case: Case, samples: int, tokens: int) -> dict[str, Flags]:
    """Which tokens of which samples a flag or a length marks, [samples, tokens]."""
    marked: dict[str, Flags] = {}
    for name, flags in case.flags.items():
        if flags.shape == (samples, tokens):
            marked[name] = flags != 0
        elif flags.shape == (samples,) and 0 < flags.min() < flags.max() <= tokens:
            marked[name] = np.arange(tokens) < flags[:, None]
    distinct: dict[str, Flags] = {}
    for name, flags in marked.items():
        is_told = bool(flags.any()) and not bool(flags.all())
        if is_told and not any(np.array_equal(flags, other) for other in distinct.values()):
            distinct[name] = flags
    return dict(list(distinct.items())[:_MOST_MARKS])


class _Over(NamedTuple):
    """What a reduction goes over.

    Attributes:
        axes: The axes that are reduced.
        use: Which elements count, in the tensor's shape but for axes of length one.
        words: The elements in words.
    """

    axes: tuple[int, ...]
    use: Flags
    words: str


def reduction(case: Case) -> Clue | None:
    """A sum, mean, largest or root that counts other elements, or is divided by another number."""
    if case.ratio < 4.0 or not 4 <= case.r.size <= _MOST_ELEMENTS or not case.finite.all():
        return None
    for rights, wrongs in case.sources:
        members = (_reductions(case, tensors) for tensors in (rights, wrongs))
        clue = compared(case, (case.r, case.r + case.e), *members)
        if clue is None:
            # A mean in place of a largest one differs in what is divided as well.
            members = (_by_kind(_reductions(case, tensors)) for tensors in (rights, wrongs))
            clue = compared(case, (case.r, case.r + case.e), *members)
        if clue is not None:
            return clue
    return None


def _by_kind(members: Iterator[Member]) -> Iterator[Member]:
    """Members of which the divisor belongs to what they are."""
    for member in members:
        what, where, over = (member.settings[cause] for cause in ("activation", "scale", "mask"))
        along, comma, divided = where.partition(",")
        kind = what if divided.startswith(" not") else f"{what}{comma}{divided}"
        if what in _KINDS or divided.startswith(f" {_BY_COUNT}"):
            yield member._replace(settings={"activation": kind, "scale": along, "mask": over})


_KINDS = ("the largest", "the smallest", "the logarithm of the sum of exponentials")
_BY_COUNT = "divided by how many they are"


def _reductions(case: Case, tensors: Mapping[str, F64]) -> Iterator[Member]:
    for name in list(tensors)[-_MOST_TENSORS:]:
        x = tensors[name]
        if not case.r.ndim <= x.ndim <= 4 or x.size > _MOST_ELEMENTS or not np.isfinite(x).all():
            continue
        for over in _all_over(case, x):
            for member in _of(x, over):
                values = member.values
                if values.size == case.r.size and _squeezed(values.shape) == _squeezed(
                    case.r.shape
                ):
                    where = f"of '{name}' {member.settings['scale']}"
                    yield member._replace(
                        values=values.reshape(case.r.shape),
                        settings={**member.settings, "scale": where},
                    )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length > 1)


def _all_over(case: Case, x: F64) -> Iterator[_Over]:
    wanted = case.r.size
    marked = marks(case, *x.shape[:2]) if x.ndim > 1 else {}
    for count in range(1, x.ndim + 1):
        for axes in itertools.combinations(range(x.ndim), count):
            count_of_each = math.prod(x.shape[axis] for axis in axes)
            if count_of_each < 2 or x.size // count_of_each != wanted:
                continue
            yield _Over(axes, np.ones((1,) * x.ndim, dtype=np.bool_), _EVERYWHERE)
            if 1 not in axes:
                continue
            # A first or last token may stand for the others, and should not be one of them.
            for use, words in _but_ends(x.shape[1]):
                shape = (1, x.shape[1], *(1,) * (x.ndim - 2))
                yield _Over(axes, use.reshape(shape), words)
            for name, flags in marked.items():
                shape = (*flags.shape, *(1,) * (x.ndim - 2))
                for use, words in ((flags, "marks"), (~flags, "leaves out")):
                    if use.any(axis=1).all():
                        yield _Over(axes, use.reshape(shape), f"what '{name}' {words}")


def _but_ends(length: int) -> Iterator[tuple[Flags, str]]:
    places = np.arange(length)
    if length > 3:
        yield places > 0, "all but the first"
        yield places < length - 1, "all but the last"
        yield (places > 0) & (places < length - 1), "all but the first and the last"


def _of(x: F64, over: _Over) -> Iterator[Member]:
    """Every reduction of a tensor over some elements."""
    axes, use = over.axes, np.broadcast_to(over.use, x.shape)
    count = use.sum(axis=axes).astype(np.float64)
    total = float(math.prod(x.shape[axis] for axis in axes))
    some = np.where(use, x, 0.0)
    sums = some.sum(axis=axes)
    middle = np.where(use, x - np.expand_dims(sums / np.maximum(count, 1.0), axes), 0.0)
    spread, squares = (middle * middle).sum(axis=axes), (some * some).sum(axis=axes)
    along = (
        f"along axis {axes[0]}" if len(axes) == 1 else f"along axes {' and '.join(map(str, axes))}"
    )
    divisors: dict[str, F64] = {
        "not divided": np.ones_like(count),
        _BY_COUNT: np.maximum(count, 1.0),
        "divided by one less than they are": np.maximum(count - 1.0, 1.0),
        "divided by the root of how many they are": np.sqrt(np.maximum(count, 1.0)),
    }
    if over.words != _EVERYWHERE:
        divisors["divided by how many all are"] = np.full_like(count, total)

    def member(what: str, divided: str, values: F64) -> Member:
        settings = {
            "activation": what,
            "scale": f"{along}, {divided},",
            "mask": f"over {over.words}",
        }
        return Member(settings, values)

    roots: dict[str, Callable[[F64], F64]] = {"": lambda y: y, "the root of ": np.sqrt}
    for divided, number in divisors.items():
        yield member("the sum", divided, sums / number)
        yield member("the sum of sizes", divided, np.abs(some).sum(axis=axes) / number)
        for root, function in roots.items():
            yield member(f"{root}the sum of squares", divided, function(squares / number))
            yield member(
                f"{root}the sum of squares around the mean", divided, function(spread / number)
            )
    hidden = np.where(use, x, -np.inf)
    largest = hidden.max(axis=axes)
    yield member("the largest", "not divided", largest)
    yield member("the smallest", "not divided", np.where(use, x, np.inf).min(axis=axes))
    with np.errstate(all="ignore"):
        raised = np.exp(hidden - np.expand_dims(largest, axes)).sum(axis=axes)
        soft = largest + np.log(raised)
        yield member("the logarithm of the sum of exponentials", "not divided", soft)
        yield member("the logarithm of the sum of exponentials", _BY_COUNT, soft - np.log(count))


# Numbers that are divided by a sum of themselves.


def divided(case: Case) -> Clue | None:
    """A tensor over a size of its own: which one, and over which axes."""
    if case.ratio < 4.0 or case.r.ndim < 2 or not _LEAST <= case.r.size <= _MOST_ELEMENTS:
        return None
    for rights, wrongs in case.sources:
        members = (_divided(tensors, case.r.shape) for tensors in (rights, wrongs))
        clue = compared(case, (case.r, case.r + case.e), *members)
        if clue is not None:
            return clue
    return None


_LEAST = 32


def _divided(tensors: Mapping[str, F64], shape: tuple[int, ...]) -> Iterator[Member]:
    for name in list(tensors)[-_MOST_TENSORS:]:
        x = tensors[name]
        if x.shape != shape or x.ndim > 4 or not np.isfinite(x).all():
            continue
        for count in range(1, x.ndim + 1):
            for axes in itertools.combinations(range(x.ndim), count):
                if math.prod(x.shape[axis] for axis in axes) < 2:
                    continue
                least = x.min(axis=axes, keepdims=True)
                sizes = {
                    "the sum": x.sum(axis=axes, keepdims=True),
                    "the sum of sizes": np.abs(x).sum(axis=axes, keepdims=True),
                    "the length": np.sqrt((x * x).sum(axis=axes, keepdims=True)),
                    "the root of the mean square": np.sqrt((x * x).mean(axis=axes, keepdims=True)),
                    "the largest size": np.abs(x).max(axis=axes, keepdims=True),
                    "the mean size": np.abs(x).mean(axis=axes, keepdims=True),
                }
                along = f"along axes {' and '.join(map(str, axes))}"
                for size, divisor in sizes.items():
                    with np.errstate(all="ignore"):
                        values = x / divisor
                    yield Member({"scale": f"'{name}' divided by {size} {along}"}, values)
                with np.errstate(all="ignore"):
                    values = (x - least) / (x - least).max(axis=axes, keepdims=True)
                yield Member({"scale": f"'{name}' from nothing to one {along}"}, values)
        yield Member({"scale": f"'{name}' as it is"}, x)


_ONE = 1e-4


def adding_up(case: Case) -> Clue | None:
    """One side is the other, made to add up to one along an axis, or to have a length of one."""
    if case.ratio < 4.0 or case.r.ndim < 2 or not case.finite.all():
        return None
    c = case.r + case.e
    sides = (
        (case.r, c, "it is not made to have {} of one along axis {}, as the reference is"),
        (c, case.r, "it is made to have {} of one along axis {}, which the reference is not"),
    )
    for made, plain, words in sides:
        for axis, length in enumerate(case.r.shape):
            for size, of in _SIZES.items():
                sums = of(made, axis)
                if length < 2 or float(np.abs(sums - 1.0).max()) > _ONE + 4.0 * case.noise:
                    continue
                own = of(plain, axis)
                if float(np.abs(own).min()) < 1e-12 or float(np.std(own)) < _ONE * float(
                    own.mean()
                ):
                    continue
                left = float(np.sum((plain / own - made) ** 2))
                enough = (1e-9 + (3.0 * case.noise) ** 2) * float(np.sum(made * made))
                if left <= enough:
                    return Clue("scale", 0.97, words.format(size, axis), "sums")
    return None


_SIZES: Mapping[str, Callable[[F64, int], F64]] = {
    "a sum": lambda x, axis: x.sum(axis=axis, keepdims=True),
    "a length": lambda x, axis: np.sqrt((x * x).sum(axis=axis, keepdims=True)),
}


# Samples that have pads.


def uneven(case: Case) -> Clue | None:
    """Only those samples are off that have pads: what is marked in them is counted, or is not."""
    if case.ratio < 4.0 or case.r.ndim < 2:
        return None
    for axis in range(min(case.r.ndim, 2)):
        off = _off_along(case, axis)
        if off is None:
            continue
        for name, flags in case.flags.items():
            if len(flags) != len(off) or flags.ndim not in (1, 2):
                continue
            if flags.ndim == 2:
                padded: Flags = np.any(flags != flags[:, :1], axis=1)
            else:
                padded = flags < flags.max()
            if np.array_equal(padded, off) and _is_length(case, flags):
                what = (
                    f"those {int(off.sum())} of {len(off)} samples are off that are not as long as "
                    f"the others, by '{name}': what is no part of them counts, or is not hidden"
                )
                return Clue("mask", 0.87, what, "samples", measured=False)
    return None


def _off_along(case: Case, axis: int) -> Flags | None:
    """Which samples are off; None if all are, or none is."""
    if not 2 <= case.r.shape[axis] <= _MOST_SAMPLES:
        return None
    axes = tuple(number for number in range(case.r.ndim) if number != axis)
    error: F64 = np.sum(case.e * case.e, axis=axes)
    size: F64 = np.sum(np.where(case.finite, case.r, 0.0) ** 2, axis=axes)
    level = (3.0 * max(case.noise, case.unit)) ** 2
    off: Flags = error > level * np.maximum(size, 0.01 * float(size.mean()))
    return None if off.all() or not off.any() else off


def _is_length(case: Case, flags: Codes) -> bool:
    """Whether numbers of samples can be lengths: of some tensor that the site was given."""
    if flags.ndim == 2:
        return True
    longest = int(flags.max())
    tensors = (case.r, *case.inputs.values(), *case.parts.values())
    lengths = {length for x in tensors for length in x.shape[1:]}
    return int(flags.min()) > 0 and any(longest <= length <= 2 * longest for length in lengths)
