"""What a detector is given (a case: the tensors of one guilty site) and what it answers (a clue).

A detector predicts what the candidate would have made if its bug were present, and is scored by how
much of the error beyond noise this prediction explains. Knows no particular bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.int64]

_TINY = 1e-300
# Share of the error that a prediction with fitted numbers may leave beyond noise.
_LEFT = 3e-4


@dataclass(frozen=True)
class Clue:
    """How well one kind of bug fits.

    Attributes:
        cause: Name of the cause in the registry.
        score: Share of the error beyond noise that it explains, from 0 to 1.
        sentence: The evidence in words.
        detail: The exact variant, if it can be told.
        measured: Whether the score is a share that was measured; otherwise it says how typical the
            error is of this bug, which is less.
    """

    cause: str
    score: float
    sentence: str
    detail: str = ""
    measured: bool = True


@dataclass(frozen=True)
class Case:
    """One guilty site, as its detectors see it.

    Attributes:
        r: What is right, in the tensor's own shape: the exact replay, or the reference.
        c: What the candidate has, in the same shape.
        noise: Relative error that it would have without a fault.
        unit: Unit roundoff of the candidate's format.
        dtype: The candidate's format.
        site: Its name.
        class_name: Its class.
        inputs: Floating tensors that the candidate's site was given, and tensors that were made
            shortly before, by name.
        parts: Of a container's own code: what its parts had made by then, by site, and what it was
            given, by slot.
        past: What the same parts and inputs were in earlier calls, joined along the tokens.
        right_parts: Parts and inputs as the reference has them, where they are known.
        spread: What parts gave that were handed some tokens of an input each, as experts are: at
            the rows of these tokens, zero elsewhere.
        codes: Integers that it was given, by slot.
        flags: Small integers and booleans, of one or two axes, that any module was given in the
            same step: what marks tokens, and how long samples are.
        calls: What was made in several calls of one step before: of parts their results, of what an
            optimizer is given the gradients of its backward passes; both sides, calls first.
        earlier: The same tensor of both sides in the call before.
        params: Its weights, by name, where they were captured.
        others: Reference tensors of the same shape made elsewhere in the same layer, by site.
        before: What the candidate had here at earlier calls.
        ranks: What other ranks of the candidate have here.
        repeats: What other executions of the same candidate have here.
        pads: Which tokens are padding, [sequences, tokens]; None when not known.
        leaning: Whether it was found by a projection that is smaller than noise.
        port: Where the tensor was captured.
    """

    r: F64
    c: F64
    noise: float
    unit: float
    dtype: str = "float32"
    site: str = ""
    class_name: str = ""
    inputs: Mapping[str, F64] = field(default_factory=dict[str, F64])
    params: Mapping[str, F64] = field(default_factory=dict[str, F64])
    others: Mapping[str, F64] = field(default_factory=dict[str, F64])
    before: tuple[F64, ...] = ()
    ranks: tuple[F64, ...] = ()
    repeats: tuple[F64, ...] = ()
    pads: Flags | None = None
    leaning: bool = False
    parts: Mapping[str, F64] = field(default_factory=dict[str, F64])
    past: Mapping[str, F64] = field(default_factory=dict[str, F64])
    right_parts: Mapping[str, F64] = field(default_factory=dict[str, F64])
    spread: Mapping[str, F64] = field(default_factory=dict[str, F64])
    codes: Mapping[str, Codes] = field(default_factory=dict[str, Codes])
    flags: Mapping[str, Codes] = field(default_factory=dict[str, Codes])
    calls: Mapping[str, tuple[F64, F64]] = field(default_factory=dict[str, "tuple[F64, F64]"])
    earlier: tuple[F64, F64] | None = None
    port: str = "output"

    # Sums are cached: every detector asks for them, and a case is never changed.
    @cached_property
    def finite(self) -> Flags:
        """Elements that are finite on both sides."""
        return np.isfinite(self.r) & np.isfinite(self.c)

    @cached_property
    def e(self) -> F64:
        """The error, 0 where a side is not finite."""
        with np.errstate(invalid="ignore"):
            return np.where(self.finite, self.c - self.r, 0.0)

    @cached_property
    def energy(self) -> float:
        """Of the error."""
        return float(np.sum(self.e * self.e))

    @cached_property
    def size(self) -> float:
        """Of the reference."""
        return float(np.sum(np.where(self.finite, self.r, 0.0) ** 2))

    @cached_property
    def noise_energy(self) -> float:
        """Of the error that would be there anyway."""
        return self.noise * self.noise * self.size

    @cached_property
    def ratio(self) -> float:
        """Relative error over noise."""
        error = math.sqrt(self.energy / max(self.size, _TINY))
        return error / self.noise if self.noise > 0.0 else math.inf

    def rows(self, values: F64) -> F64:
        """A tensor of this shape as [rows, channels]."""
        return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)

    def explained(self, predicted: F64, where: Flags | None = None) -> float:
        """Share of the error beyond noise that a prediction explains.

        Args:
            predicted: What the candidate would have made, in the tensor's shape.
            where: Elements that count; all if not given.
        """
        share, _ = self.explained_and_left(predicted, where)
        return share

    def explained_and_left(self, predicted: F64, where: Flags | None = None) -> tuple[float, float]:
        """That share, and what remains beyond noise, as a share of the error too.

        A prediction that fits leaves only noise. One with fitted numbers must: explaining most of
        the error is easy where the output itself is nearly constant.
        """
        use = self.finite if where is None else self.finite & where
        with np.errstate(invalid="ignore", over="ignore"):
            left = np.where(use, self.c - predicted, 0.0)
            rest = float(np.sum(left * left))
        e = np.where(use, self.e, 0.0)
        energy = float(np.sum(e * e))
        noise = self.noise**2 * float(np.sum(np.where(use, self.r, 0.0) ** 2))
        beyond = energy - noise
        # With hardly any error beyond noise every prediction would score 0/0.
        if not math.isfinite(rest) or beyond <= 0.1 * energy:
            return 0.0, 1.0
        share = min(max((energy - rest) / beyond, 0.0), 1.0)
        return share, max(rest - 3.0 * noise, 0.0) / energy

    def fitted(self, predicted: F64) -> float:
        """Score of a prediction with fitted numbers: it may leave almost nothing."""
        share, left = self.explained_and_left(predicted)
        return share if left <= _LEFT else min(share, 0.75)

    @cached_property
    def sources(self) -> tuple[tuple[Mapping[str, F64], Mapping[str, F64]], ...]:
        """What both sides were given and what parts gave; in a replay both are the candidate's."""
        own = {**self.inputs, **self.parts}
        return ((self.right_parts, own), (own, own)) if self.right_parts else ((own, own),)

    @cached_property
    def tokens(self) -> int | None:
        """Which axis the tokens are on; None for a tensor that has none."""
        if self.r.ndim < 2:
            return None
        # Three axes are (sequences, tokens, channels); with more, heads stand between and tokens
        # come last but one.
        return 1 if self.r.ndim == 3 else self.r.ndim - 2

    @cached_property
    def words(self) -> str:
        """Class and last part of the site's name, in small letters."""
        return f"{self.class_name} {self.site.rpartition('.')[2]}".lower()

    @property
    def is_norm(self) -> bool:
        """Whether it is a normalisation, by its names."""
        last = self.site.rpartition(".")[2].lower()
        # Names of GPT-2 style models have no "norm" in them, hence the short forms.
        return "norm" in self.words or last.startswith("ln_") or last in ("ln", "ln1", "ln2")

    @property
    def is_attention(self) -> bool:
        """Whether it is an attention, by its names."""
        return "attn" in self.words or "attention" in self.words or "softmax" in self.words


Rule: TypeAlias = Callable[[Case], "Clue | None"]


_HIDDEN = -1e4
"""What a mask adds at most where nothing may be seen."""


def other_mask(r: F64, c: F64) -> str:
    """How two masks differ, in words; empty if they are equal, or no masks.

    A mask holds zeros and very negative numbers, which are added to scores.

    >>> other_mask(np.array([0.0, -np.inf]), np.zeros(2))
    '50.0% of the flags that say what may be seen are others: those of the candidate are all alike'
    """
    right, made = (values == 0.0 for values in (r, c))
    are_masks = all(bool((values[~(values == 0.0)] <= _HIDDEN).all()) for values in (r, c))
    if not r.ndim or r.shape != c.shape or not are_masks:
        return ""
    share = np.count_nonzero(right != made) / max(r.size, 1)
    if share == 0.0:
        return ""
    words = f"{share:.1%} of the flags that say what may be seen are others"
    if made.all() or right.all():
        return f"{words}: those of the {'candidate' if made.all() else 'reference'} are all alike"
    rows, made_rows = (
        np.unique(flags.reshape(-1, flags.shape[-1]), axis=0, return_counts=True)
        for flags in (right, made)
    )
    if r.ndim > 1 and all(map(np.array_equal, rows, made_rows)):
        words += ": the same rows stand in another order"
    return words


def by_chance(values: F64, empty: Flags) -> bool:
    """Whether zeros have nothing to do with what stands there.

    A function that gives zero does so for one sign, or for small numbers; dropout asks neither.
    """
    share = float(empty.mean())
    size = np.abs(values)
    for group in (values > 0.0, size > np.median(size)):
        count = int(np.count_nonzero(group))
        if not 0 < count < len(values):
            continue
        apart = abs(float(empty[group].mean()) - share)
        chance = np.sqrt(share * (1.0 - share) * (1.0 / count + 1.0 / len(values)))
        if apart > 0.1 * share + 5.0 * chance:
            return False
    return True
