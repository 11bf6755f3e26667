"""Where values are taken from: borders, steps along two axes, points between places, boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue, Codes, Flags

_MOST_ELEMENTS = 1 << 20
_LARGEST_BORDER = 0.25
_OFF_IN_BORDER = 0.7
_FARTHEST = 8


# Borders.


def border(case: Case) -> Clue | None:
    """The error lies at the ends of one axis or two, and the middle is right."""
    if case.ratio < 4.0 or case.r.ndim < 3 or case.r.size > 1 << 24:
        return None
    mean = case.size / case.r.size
    level = (4.0 * max(case.noise, case.unit)) ** 2 * mean
    for count in (1, 2):
        for axes in itertools.combinations(range(1, case.r.ndim), count):
            others = tuple(number for number in range(case.r.ndim) if number not in axes)
            error: F64 = np.mean(case.e * case.e, axis=others)
            ends = _ends(error > level)
            if ends is None:
                continue
            where = " and ".join(
                f"the first {first} and last {last} places of axis {axis}"
                for axis, (first, last) in zip(axes, ends, strict=True)
            )
            what = f"only {where} are off: what lies beyond the ends is another, or counts"
            return Clue("mask", 0.86, what, "border", measured=False)
    return None


def _ends(off: Flags) -> list[tuple[int, int]] | None:
    """How many places are off at both ends of every axis; None if others are, or all ends agree."""
    if not off.any() or min(off.shape) < 5:
        return None
    inner: list[tuple[int, int]] = []
    frame: Flags = np.zeros(off.shape, dtype=np.bool_)
    for axis in range(off.ndim):
        along = off.mean(axis=tuple(number for number in range(off.ndim) if number != axis))
        outer = along >= _OFF_IN_BORDER
        first, last = (_leading(side) for side in (outer, outer[::-1]))
        if max(first, last) > _LARGEST_BORDER * len(outer):
            return None
        place = [slice(None)] * off.ndim
        for side in (slice(0, first), slice(len(outer) - last, None)):
            place[axis] = side
            frame[tuple(place)] = True
        inner.append((first, last))
    if not all(sum(ends) for ends in inner) or np.any(off & ~frame):
        return None
    return inner


def _leading(flags: Flags) -> int:
    return int(np.argmin(flags)) if not flags.all() else len(flags)


# Steps along two axes.


def two_steps(case: Case) -> Clue | None:
    """Every place has what belongs to another one, some steps away along two axes."""
    if case.ratio < 4.0 or case.r.ndim < 3 or not 64 <= case.r.size <= _MOST_ELEMENTS:
        return None
    c = case.r + case.e
    pairs = {(case.r.ndim - 2, case.r.ndim - 1), (1, 2)}
    for axes in sorted(pairs):
        lengths = [case.r.shape[axis] for axis in axes]
        if min(lengths) < 6:
            continue
        # The distance at which both sides are most alike, by all channels together.
        others = tuple(number for number in range(case.r.ndim) if number not in axes)
        spectra = [np.fft.fft2(x - x.mean(), axes=axes) for x in (c, case.r)]
        alike = np.fft.ifft2((spectra[0] * spectra[1].conj()).sum(axis=others)).real
        best = np.unravel_index(int(np.argmax(alike)), alike.shape)
        steps = [
            int(place) if 2 * place <= length else int(place) - length
            for place, length in zip(best, lengths, strict=True)
        ]
        if 0 in steps or max(map(abs, steps)) > min(_FARTHEST, min(lengths) // 3):
            continue
        inside = [slice(None)] * case.r.ndim
        for axis, by in zip(axes, steps, strict=True):
            inside[axis] = slice(abs(by), case.r.shape[axis] - abs(by))
        where = np.zeros(case.r.shape, dtype=np.bool_)
        where[tuple(inside)] = True
        score = case.explained(np.roll(case.r, steps, axis=axes), where)
        if score >= 0.9:
            what = (
                f"every place has what belongs to another one, {steps[0]:+d} and {steps[1]:+d} "
                f"steps away along axes {axes[0]} and {axes[1]}"
            )
            return Clue("shift", score, what, "steps")
    return None


# Points between places.


_MOST_CELLS, _MOST_POINTS, _LEAST_CHANNELS = 512, 48, 6
_MOST_CHANNELS, _MOST_SAMPLES, _STEPS = 32, 4, 5


def points(case: Case) -> Clue | None:
    """Both sides are weighted means of neighbouring places of an input, at other points.

    A point is read from all channels: four numbers give as many equations as there are channels.
    """
    if case.ratio < 4.0 or case.r.ndim != 4 or not case.finite.all():
        return None
    channels = case.r.shape[1]
    for x in case.inputs.values():
        if x.ndim != 4 or x.shape[1] != channels or channels < _LEAST_CHANNELS:
            continue
        if len(x) not in (1, len(case.r)) or math.prod(x.shape[2:]) > _MOST_CELLS:
            continue
        if min(x.shape[2:]) < 3 or x.shape == case.r.shape or not np.isfinite(x).all():
            continue
        clue = _between(case, x)
        if clue is not None:
            return clue
    return None


def _between(case: Case, x: F64) -> Clue | None:
    count, channels = min(len(case.r), _MOST_SAMPLES), case.r.shape[1]
    every = max(1, math.prod(case.r.shape[2:]) // _MOST_POINTS)
    some = slice(0, None, max(1, channels // _MOST_CHANNELS))
    apart: list[F64] = []
    energy = left = 0.0
    for number in range(count):
        source = x[number if len(x) > 1 else 0][some]
        sides = [
            side[number].reshape(channels, -1)[some, ::every] for side in (case.r, case.r + case.e)
        ]
        read = [_points(source, side) for side in sides]
        size = sum(float(np.sum(side * side)) for side in sides)
        energy += float(np.sum((sides[1] - sides[0]) ** 2))
        rest = [float(rest.sum()) for _, rest in read]
        if rest[0] > (1e-6 + (4.0 * case.noise) ** 2) * size:
            return None
        left += rest[1]
        apart.append(read[1][0] - read[0][0])
    if not energy > 0.0 or left > 0.1 * energy:
        return None
    moved = np.concatenate(apart)
    by, scatter = np.median(moved, axis=0), np.abs(moved - np.median(moved, axis=0))
    if float(np.abs(moved).max()) < 1e-3:
        return None
    score = min(1.0 - left / energy, 0.98)
    if float(np.median(scatter)) < 0.1 * float(np.abs(by).max()):
        what = f"it takes values {by[0]:+.3g} and {by[1]:+.3g} places from where they should be"
        return Clue("shift", score, f"{what}, of its input's last two axes", "points")
    what = "it takes values at other points of its input's last two axes, between its places"
    return Clue("positions", score, what, "points")


def _points(source: F64, wanted: F64) -> tuple[F64, F64]:
    """Where in the last two axes values were taken, [points, 2], and what that leaves of each."""
    height, width = source.shape[1:]
    # Between four places: the value in their first corner, what it grows by along each axis, and
    # along both.
    a, b, c, d = (
        source[:, row : height - 1 + row, column : width - 1 + column].reshape(len(source), -1).T
        for row, column in itertools.product((0, 1), (0, 1))
    )
    down_by, across_by, both_by = (y[..., None] for y in (c - a, b - a, a - b - c + d))
    rest = wanted[None] - a[..., None]
    down = across = np.full((len(a), wanted.shape[1]), 0.5)
    for _ in range(_STEPS):
        slopes = down_by + both_by * across[:, None], across_by + both_by * down[:, None]
        miss = rest - down_by * down[:, None] - slopes[1] * across[:, None]
        aa, bb, ab, ya, yb = (
            np.sum(x * y, axis=1)
            for x, y in (
                (slopes[0], slopes[0]),
                (slopes[1], slopes[1]),
                slopes,
                (slopes[0], miss),
                (slopes[1], miss),
            )
        )
        area = np.maximum(aa * bb - ab * ab, 1e-300)
        down = np.clip(down + (bb * ya - ab * yb) / area, 0.0, 1.0)
        across = np.clip(across + (aa * yb - ab * ya) / area, 0.0, 1.0)
    made = down_by * down[:, None] + (across_by + both_by * down[:, None]) * across[:, None]
    left: F64 = np.sum((rest - made) ** 2, axis=1)
    cell = np.argmin(left, axis=0)
    point = np.arange(wanted.shape[1], dtype=np.intp)
    rows, columns = np.divmod(cell, width - 1)
    places = np.stack([rows + down[cell, point], columns + across[cell, point]], axis=1)
    return places, left[cell, point]


# Boxes.


_MOST_BOXES, _MOST_PICTURES, _LEAST_PICTURES, _LONGEST = 1 << 14, 24, 6, 64


def boxes(case: Case) -> Clue | None:
    """Every output is the mean, the sum or the largest of a box of an input, and boxes are others.

    A box is read from many channels and samples at once: its ends are all that is not known, and
    all pictures must agree on them.
    """
    if case.ratio < 4.0 or case.r.ndim not in (3, 4) or not case.finite.all():
        return None
    outer, shape = case.r.shape[:2], case.r.shape[2:]
    if math.prod(outer) < _LEAST_PICTURES:
        return None
    for x in case.inputs.values():
        if x.shape[:2] != outer or x.ndim != case.r.ndim or not np.isfinite(x).all():
            continue
        lengths = x.shape[2:]
        smaller = all(a <= b for a, b in zip(shape, lengths, strict=True)) and shape != lengths
        count = math.prod(length * (length + 1) // 2 for length in lengths)
        if not smaller or count > _MOST_BOXES or max(lengths) > _LONGEST:
            continue
        every = max(1, math.prod(outer) // _MOST_PICTURES)
        pictures, right, wrong = (
            values.reshape(math.prod(outer), -1)[::every] for values in (x, case.r, case.c)
        )
        clue = _other_boxes(case, pictures.reshape(-1, *lengths), right, wrong)
        if clue is not None:
            return clue
    return None


def _other_boxes(case: Case, pictures: F64, right: F64, wrong: F64) -> Clue | None:
    for kind, values, ends in _all_boxes(pictures):
        near = [_nearest_box(values, side) for side in (right, wrong)]
        made = [values[:, place] for place in near]
        left = [float(np.sum((a - b) ** 2)) for a, b in zip(made, (right, wrong), strict=True)]
        enough = (1e-8 + (4.0 * case.noise) ** 2) * float(np.sum(right**2))
        energy = float(np.sum((wrong - right) ** 2))
        if max(left) > enough or left[1] > 0.1 * energy:
            continue
        moved = ends[near[1]] - ends[near[0]]
        off = np.any(moved != 0, axis=1)
        if not off.any():
            continue
        # Boxes of the same size that lie elsewhere are moved; others count more, or fewer.
        first, last = moved[off][:, ::2], moved[off][:, 1::2]
        is_moved = bool(np.all(first == last))
        what = (
            f"{int(off.sum())} of {len(off)} outputs are the {kind} of another part of the input: "
            f"first places are {int(first.min()):+d} to {int(first.max()):+d}, ends "
            f"{int(last.min()):+d} to {int(last.max()):+d} from where they should be"
        )
        return Clue("shift" if is_moved else "mask", min(1.0 - left[1] / energy, 0.98), what, "box")
    return None


def _all_boxes(pictures: F64) -> Iterator[tuple[str, F64, Codes]]:
    """What all boxes of pictures give, [pictures, boxes], with first places and ends of each."""
    sums, largest = pictures, pictures
    ends: Codes = np.zeros((1, 0), dtype=np.int64)
    sizes = np.ones(1)
    for length in pictures.shape[1:]:
        first, last = np.triu_indices(length + 1, 1)
        # The first axis that is not joined yet comes behind the boxes of those before.
        own = sums.reshape(len(pictures), len(sizes), length, -1)
        total = np.concatenate([np.zeros_like(own[:, :, :1]), np.cumsum(own, axis=2)], axis=2)
        sums = (total[:, :, last] - total[:, :, first]).reshape(
            len(pictures), len(sizes) * len(first), -1
        )
        tops = largest.reshape(len(pictures), len(sizes), length, -1)
        tops = np.stack(
            [tops[:, :, a:b].max(axis=2) for a, b in zip(first, last, strict=True)], axis=2
        )
        largest = tops.reshape(len(pictures), len(sizes) * len(first), -1)
        parts = np.stack([first, last], axis=1)
        ends = np.concatenate(
            [np.repeat(ends, len(first), axis=0), np.tile(parts, (len(sizes), 1))], axis=1
        )
        sizes = (sizes[:, None] * (last - first)).reshape(-1)
    yield "mean", sums[..., 0] / sizes, ends
    yield "largest", largest[..., 0], ends
    yield "sum", sums[..., 0], ends


def _nearest_box(values: F64, side: F64) -> Codes:
    """The number of the box that is nearest to every output, over all pictures."""
    apart = np.sum(values**2, axis=0)[:, None] - 2.0 * (values.T @ side)
    return np.argmin(apart, axis=0)
