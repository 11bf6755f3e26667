"""Slices of a tensor that carry most of the error: single tokens, heads, channels or rows.

An index of an axis stands out when the relative error of its slice is several times that of the
median slice, or when it holds values that are not finite on one side only. Diagnosis uses the same
rule to find tokens that a mask treats differently; here the tensor itself measures the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import coarser
from driftline.reporting.html.tensors.pair import BUDGET, F64, Flags, OpenedPair

# A page lists the worst few of an axis; the sentence gives the count of all.
_MOST = 10
# A slice must be clearly worse than the median one to stand out.
_TIMES = 3.0
_LEAST_SHARE = 0.2
"""Slices with less of the squared error than this are not worth a sentence."""
_BINS = 1 << 20
"""Longer axes are looked at in so many parts."""
_FLOOR = 0.01
"""A slice of next to nothing is measured against so much of the mean slice."""
_FULL = 0.9
"""A block of channels stands out as a whole when so many of it do."""
# Usual widths of attention heads, the widest first: a narrower one would fit inside it too.
_WIDTHS = (256, 128, 96, 80, 64, 48, 40, 32, 24, 16, 8)


class OutlierSlice(NamedTuple):
    """The worst slices of one axis.

    Attributes:
        axis: What the axis is.
        extent: How many slices it has.
        places: The worst ones, worst first.
        share: Of the whole squared error, for each of them.
        value: Relative L2 error of each slice.
        standing_out: How many stand out; 0 where the error is spread over the axis.
        sentence: The same in words.
    """

    axis: str
    extent: int
    places: tuple[int, ...]
    share: tuple[float, ...]
    value: tuple[float, ...]
    standing_out: int
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "extent": self.extent,
            "index": np.asarray(self.places, np.uint32),
            "share": np.asarray(self.share, np.float64),
            "value": np.asarray(self.value, np.float64),
            "sentence": self.sentence,
        }


class _Axis:
    """Energies of the slices of one axis, or of bins of them."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        # Rounded up, so that there are never more bins than allowed.
        self.bin = -(-size // _BINS)
        bins = -(-size // self.bin)
        self.error, self.reference, self.apart = np.zeros(bins), np.zeros(bins), np.zeros(bins)

    def add(self, places: npt.NDArray[np.intp], error: F64, reference: F64, apart: F64) -> None:
        bins = places // self.bin
        for into, what in (
            (self.error, error),
            (self.reference, reference),
            (self.apart, apart),
        ):
            into += np.bincount(bins, weights=what, minlength=len(into))


def outlier_slices(pair: OpenedPair, *, budget: int = BUDGET) -> list[OutlierSlice]:
    """The slices of each axis of a pair with unusually large errors, the clearest axis first.

    Rows that are made of several axes (batch x token) are an axis of their own. In an attention
    blocks of channels that are as wide as a head may be are called heads.
    """
    if not pair.elements:
        return []
    axes = [_Axis(name, size) for name, size in zip(pair.axes[:-1], pair.shape[:-1], strict=True)]
    rows = _Axis("row", pair.rows)
    channels = _Axis(pair.axes[-1], pair.columns)
    for piece in pair.pieces(pair.whole, bands=256, cells=256, budget=budget):
        window = piece.window
        with np.errstate(over="ignore"):
            # Squares may overflow to infinity, which still ranks as the worst.
            energy = window.error * window.error
            size = np.where(window.finite, window.reference, 0.0) ** 2
        sums = [values.sum(axis=1) for values in (energy, size, window.apart.astype(np.float64))]
        places = np.unravel_index(piece.rows, pair.shape[:-1]) if axes else ()
        for axis, positions in zip(axes, places, strict=True):
            axis.add(positions, *sums)
        rows.add(piece.rows, *sums)
        downwards = [
            values.sum(axis=0) for values in (energy, size, window.apart.astype(np.float64))
        ]
        channels.add(piece.columns, *downwards)
    # An axis of one element cannot have a slice that stands out.
    long = [axis for axis in axes if axis.size > 1]
    looked_at = [*long, *([rows] if len(long) > 1 else []), channels]
    unit = coarser(pair.reference.dtype, pair.candidate.dtype).unit_roundoff
    slices = [outlier for axis in looked_at if axis.size > 1 for outlier in _of(axis, pair, unit)]
    return sorted(slices, key=lambda outlier: (outlier.standing_out == 0, -_concentration(outlier)))


def _concentration(outlier: OutlierSlice) -> float:
    """How much of the error few slices explain: the fewer of the more, the better."""
    part = max(outlier.standing_out, 1) / outlier.extent
    return sum(outlier.share) - part


def _of(axis: _Axis, pair: OpenedPair, unit: float) -> list[OutlierSlice]:
    total = float(axis.error.sum())
    if not (total > 0.0 or axis.apart.any()):
        return []
    # A slice near zero would have a huge relative error for a tiny absolute one.
    floor = _FLOOR * float(axis.reference.sum()) / len(axis.reference)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        relative = np.sqrt(axis.error / np.maximum(axis.reference, floor))
        own = np.sqrt(axis.error / axis.reference)
    relative = np.where(np.isnan(relative), 0.0, relative)
    own = np.where(axis.error == 0.0, 0.0, own)
    # The median is the tensor's own noise; below rounding it means nothing.
    level = max(float(np.median(relative)), unit / 4.0)
    broken = axis.apart > 0.0
    out = broken | (relative > _TIMES * level)
    share = axis.error / total if 0.0 < total < math.inf else np.zeros_like(axis.error)
    many = int(out.sum())
    # If most slices stand out, none does.
    tells = 0 < many <= len(out) // 2 and (
        bool(broken.any()) or float(share[out].sum()) >= _LEAST_SHARE
    )
    order = np.lexsort((-relative, ~broken)) if tells else np.argsort(-share, kind="stable")
    worst = [int(index) for index in order[:_MOST] if out[index] or not tells]
    outlier = OutlierSlice(
        axis.name,
        axis.size,
        tuple(index * axis.bin for index in worst),
        tuple(float(share[index]) for index in worst),
        tuple(math.inf if broken[index] else float(own[index]) for index in worst),
        many if tells else 0,
        _sentence(axis, pair, out, share, broken) if tells else _spread(axis, share, worst),
    )
    # Heads are guessed only from channels of an attention that were looked at one by one.
    if not tells or axis.name != "channel" or axis.bin > 1 or not pair.attends:
        return [outlier]
    return [*_heads(axis, out, share, broken), outlier]


def _sentence(axis: _Axis, pair: OpenedPair, out: Flags, share: F64, broken: Flags) -> str:
    places = np.flatnonzero(out) * axis.bin
    many = len(places)
    if axis.name == "row":
        words = "; ".join(pair.row_name(int(index)) for index in places[:3])
        who = f"{many} of {axis.size} rows ({words}{'; …' if many > 3 else ''})"
    else:
        word = axis.name if many == 1 else _plural(axis)
        who = f"{word} {ranges(places.tolist())}"
        who += f" of {axis.size}" if many == 1 else f" ({many} of {axis.size})"
    verb = "holds" if many == 1 else "hold"
    if broken.any():
        values = "values that are not finite on one side only"
        if broken[out].all():
            return f"{who} {verb} {values}"
        return f"{who} {verb} {values}, or stand out"
    return f"{who} {verb} {_percent(float(share[out].sum()))} of the squared error"


def _plural(axis: _Axis) -> str:
    """`tokens`, `batches`; `axis 2` has a number and stays."""
    if axis.name.startswith("axis"):
        return axis.name
    return f"{axis.name}es" if axis.name.endswith(("ch", "s", "x")) else f"{axis.name}s"


def _spread(axis: _Axis, share: F64, worst: Sequence[int]) -> str:
    word = _plural(axis)
    top = float(share[worst[0]]) if worst else 0.0
    return f"the error is spread over the {word}; the worst holds {_percent(top)}"


def _heads(axis: _Axis, out: Flags, share: F64, broken: Flags) -> list[OutlierSlice]:
    """Channels that stand out and fill whole blocks as wide as a head may be."""
    for width in _WIDTHS:
        # Heads are of equal width, and there are at least two.
        if axis.size % width or axis.size // width < 2:
            continue
        filled = out.reshape(-1, width).mean(axis=1)
        full = filled >= _FULL
        if not full.any() or full.sum() * 2 > len(full) or (filled[~full] > 1.0 - _FULL).any():
            continue
        places = np.flatnonzero(full)
        shares = share.reshape(-1, width).sum(axis=1)
        energies = [
            energy.reshape(-1, width).sum(axis=1) for energy in (axis.error, axis.reference)
        ]
        with np.errstate(invalid="ignore", divide="ignore"):
            own = np.sqrt(energies[0] / energies[1])
        own[broken.reshape(-1, width).any(axis=1)] = math.inf
        worst = sorted(places.tolist(), key=lambda index: -float(shares[index]))[:_MOST]
        many = len(places)
        who = f"{'head' if many == 1 else 'heads'} {ranges(places.tolist())}"
        what = f"{who} of {len(full)}, if heads are {width} channels wide"
        verb = "holds" if many == 1 else "hold"
        sentence = f"{what}, {verb} {_percent(float(shares[full].sum()))} of the squared error"
        if broken.any():
            sentence = f"{what}, {verb} values that are not finite on one side only"
        return [
            OutlierSlice(
                "head",
                len(full),
                tuple(worst),
                tuple(float(shares[index]) for index in worst),
                tuple(float(own[index]) for index in worst),
                many,
                sentence,
            )
        ]
    return []


def ranges(places: Sequence[int], most: int = 6) -> str:
    """Numbers in few words.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1–3, 7, 9, 10'
    """
    words: list[str] = []
    start = 0
    while start < len(places):
        end = start
        while end + 1 < len(places) and places[end + 1] == places[end] + 1:
            end += 1
        if end - start >= 2:
            words.append(f"{places[start]}–{places[end]}")
        else:
            words += [str(place) for place in places[start : end + 1]]
        start = end + 1
    shown = ", ".join(words[:most])
    return f"{shown}, …" if len(words) > most else shown


def _percent(share: float) -> str:
    if share >= 0.9995:
        return "all"
    return f"{100.0 * share:.0f} %" if share >= 0.095 else f"{100.0 * share:.1g} %"
