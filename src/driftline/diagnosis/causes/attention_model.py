"""The attention that a module computes, identified from tensors whose roles are not known.

The roles are found by trying: which tensors are queries, keys and values, how wide a head is, and
which two tensors are tables of a rotation (their squares add up to one). Such a choice of roles is
called a reading. A reading is accepted if its attention equals the reference's output. Names are
not used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Flags
from driftline.diagnosis.causes.families.attention_masks import (
    MOST_TOKENS,
    solved_mask,
    solved_sinks,
)

RECOMPUTED = "attention"
"""Detail of clues that were found by recomputing an attention."""
_FITS = 0.02
"""Relative error of the recomputed attention that still counts as the same."""
_WIDTHS = (64, 128, 32, 16, 8, 12, 24, 40, 48, 80, 96, 256, 4)
"""Widths of heads, the common ones first."""
_FACTORS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0, 10.0)
CAPS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0)
_SLOPES = (0.0, *(sign * 2.0**-power for power in range(9) for sign in (1.0, -1.0)))
_MOST_READINGS, _MOST_FITTED, _MOST_SOLVED = 96, 2, 12
_NEARER = 0.5
"""A search is worthwhile if the best of a few values leaves at most this share of the error."""
_STEPS, _FIRST_STEPS, _SLOW = 25, 5, 0.5
_ENOUGH = 3
"""Required number of output elements for each amount by distance."""
_HIDDEN = -1e4
"""Largest value of an additive mask that counts as hiding a key."""


class Turn(NamedTuple):
    """A rotation of heads by position.

    Attributes:
        cos: Cosines, [tokens, width]; the value of each pair of features occurs twice.
        sin: Sines, in the same form.
        pairs: Which features are rotated together: `halves`, `neighbours`, or `whole` if the halves
            of the whole head are paired although only a part of it is rotated.
        late: Number of tokens by which the keys' positions are late.
        sides: Which tensors are rotated: queries (`q`), keys (`k`), or both.
    """

    cos: F64
    sin: F64
    pairs: str = "halves"
    late: int = 0
    sides: str = "qk"

    def fits(self, q: F64, k: F64) -> bool:
        """Whether there are angles for every key, and for no more features than heads have."""
        return self.cos.shape[-1] <= q.shape[-1] and len(self.cos) >= k.shape[1]

    def of(self, x: F64, side: str, first: int) -> F64:
        """Rotated heads, [sequences, tokens, heads, width]; `first` is their first position."""
        if side not in self.sides:
            return x
        late = self.late if side == "k" else 0
        cos, sin = (np.roll(table, late, axis=0)[first:] for table in (self.cos, self.sin))
        cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
        size = cos.shape[-1]
        if self.pairs == "whole":
            rest = x.shape[-1] - size
            cos = np.concatenate([cos, np.ones((*cos.shape[:-1], rest))], axis=-1)
            sin = np.concatenate([sin, np.zeros((*sin.shape[:-1], rest))], axis=-1)
            size = x.shape[-1]
        head, tail = x[..., :size], x[..., size:]
        half = size // 2
        if self.pairs == "neighbours":
            partner = np.stack([-head[..., 1::2], head[..., 0::2]], axis=-1).reshape(head.shape)
            cos, sin = (np.repeat(table[..., :half], 2, axis=-1) for table in (cos, sin))
        else:
            partner = np.concatenate([-head[..., half:], head[..., :half]], axis=-1)
        return np.concatenate([head * cos + partner * sin, tail], axis=-1)


@dataclass(frozen=True)
class Attention:
    """One way to compute an attention; a mistake is a copy with one field changed.

    Attributes:
        q: Queries, [sequences, tokens, heads, width].
        k: Keys, with the same number of heads or fewer, and the same number of tokens or more.
        v: Values.
        scale: Factor of the scores.
        seen: Which keys each query may see, [sequences or 1, queries, keys].
        turn: Rotation by position; None without one.
        tiled: Whether query heads share key heads in turns rather than in blocks.
        cap: Largest score that a soft cap lets through; 0 without one.
        slopes: Amount subtracted from the scores of each head per token of distance.
        by_distance: Amounts added to the scores, [heads, distances].
        sinks: What each head adds to its sum of exponentials, for which no value stands.
        hidden: Score of the keys that are not seen.
    """

    q: F64
    k: F64
    v: F64
    scale: float
    seen: Flags
    turn: Turn | None = None
    tiled: bool = False
    cap: float = 0.0
    slopes: F64 | None = None
    by_distance: F64 | None = None
    sinks: F64 | None = None
    # A finite number, so that a row in which every key is hidden gives a mean and not NaN.
    hidden: float = -1e30

    def scores(self) -> F64:
        """What the softmax is taken of if every key is seen, [sequences, heads, queries, keys]."""
        q, k = self.q, self.k
        behind = k.shape[1] - q.shape[1]
        if self.turn is not None:
            q, k = self.turn.of(q, "q", behind), self.turn.of(k, "k", 0)
        k = self._shared(k)
        scores = np.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)) * self.scale
        if self.cap > 0.0:
            scores = self.cap * np.tanh(scores / self.cap)
        if self.slopes is not None:
            positions = np.arange(k.shape[1], dtype=np.float64)
            apart: F64 = np.abs(positions[None] - positions[behind:, None])
            scores = scores - self.slopes[:, None, None] * apart
        if self.by_distance is not None:
            scores = scores + at_distances(self.by_distance, q.shape[1], k.shape[1])
        return scores

    def weights(self) -> F64:
        """Attention weights after the softmax, [sequences, heads, queries, keys]."""
        scores = np.where(self.seen[:, None], self.scores(), self.hidden)
        most = scores.max(axis=-1, keepdims=True)
        raised = np.exp(scores - most)
        total = raised.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + self.sinks[:, None, None] * np.exp(np.minimum(-most, 700.0))
        return raised / total

    def split(self, made: F64) -> F64:
        """An output with its heads apart, [sequences, heads, queries, width]."""
        return made.reshape(*self.q.shape[:3], -1).transpose(0, 2, 1, 3)

    def values(self) -> F64:
        """The values of every head, [sequences, heads, keys, width]."""
        return self._shared(self.v).transpose(0, 2, 1, 3)

    def output(self) -> F64:
        """Output with the heads joined, [sequences, queries, heads x width]."""
        made = np.matmul(self.weights(), self.values())
        return made.transpose(0, 2, 1, 3).reshape(*self.q.shape[:2], -1)

    def _shared(self, x: F64) -> F64:
        groups = self.q.shape[2] // x.shape[2]
        if groups == 1:
            return x
        return np.concatenate([x] * groups, axis=2) if self.tiled else np.repeat(x, groups, axis=2)

    def by_head(self, left: F64) -> F64:
        """Sum of squares per head of an array that has the output's shape."""
        squares = (left * left).reshape(-1, *self.q.shape[2:])
        return squares.sum(axis=(0, 2))

    @property
    def is_causal(self) -> bool:
        shown: Flags = np.any(self.seen, axis=0)
        return not bool(shown[0, -1])


# The attention that the reference computes.


class Reading(NamedTuple):
    """Roles of tensors and parameters of an attention; applicable to other tensors of its kind.

    Attributes:
        number: Index of its queries, keys and values in `Reader.heads`.
        turn: Number of its rotation in `Reader.turns`, from 1; 0 for none.
        mask: Name of its mask in `Reader.masks`.
        changed: Parameters that differ from the usual ones, by name.
    """

    number: int
    turn: int
    mask: str
    changed: Mapping[str, Any]

    def of(self, reader: Reader) -> Attention | None:
        """The attention of a reader's tensors; None if the reader lacks one that it needs."""
        try:
            q, k, v = next(itertools.islice(reader.heads(), self.number, None))
            turn = [None, *reader.turns()][self.turn]
            seen = reader.masks(k.shape[1])[self.mask]
        except (IndexError, KeyError, StopIteration):
            return None
        changed = dict(self.changed)
        window = changed.pop("window", 0)
        if window:
            seen = seen & near_keys(seen.shape[1], k.shape[1], window)
        seen = changed.pop("seen", seen)
        if seen.shape[1:] != (q.shape[1], k.shape[1]):
            return None
        scale = changed.pop("scale", 1.0) / math.sqrt(q.shape[-1])
        return Attention(q, k, v, scale, seen, turn, **changed)


class Reader:
    """Finds the attention that tensors of unknown roles describe.

    Args:
        case: The case whose reference output the attention must give.
        sequences: Largest number of sequences that are used.
        tokens: Largest number of tokens that are used.
        parts: The tensors, by name.
    """

    def __init__(self, case: Case, sequences: int, tokens: int, parts: Mapping[str, F64]) -> None:
        self.case = case
        self.parts = parts
        self.sequences = min(case.r.shape[0], sequences)
        self.tokens = min(case.r.shape[1], tokens)
        self.width = case.r.shape[2]
        self.r = case.r[: self.sequences, : self.tokens]
        self.enough = max(_FITS, 3.0 * case.noise) ** 2 * float(np.sum(self.r**2))

    def read(self) -> Reading | None:
        """The first reading that gives the reference's output; None if there is none."""
        turns = [None, *self.turns()]
        rated: list[tuple[float, Reading]] = []
        for (number, (q, k, v)), (which, turn) in itertools.product(
            enumerate(self.heads()), enumerate(turns)
        ):
            if (
                self._contradicts(v)
                or self._copies(v)
                or (turn is not None and not turn.fits(q, k))
            ):
                continue
            for mask in self.masks(k.shape[1]):
                reading = Reading(number, which, mask, {})
                left = self._left(reading)
                if left <= self.enough:
                    return reading
                rated.append((left, reading))
        rated.sort(key=lambda entry: entry[0])
        # No reading with the usual parameters fits: the nearest ones are tried with other factors,
        # caps, windows and slopes.
        for changes, count in ((self._changes, _MOST_FITTED), (self._other_sums, _MOST_SOLVED)):
            for _, reading in rated[:count]:
                for changed in changes(reading):
                    other = reading._replace(changed=changed)
                    if self._left(other) <= self.enough:
                        return other
        return None

    def _other_sums(self, reading: Reading) -> Iterator[Mapping[str, Any]]:
        """Sinks, and masks that no input holds."""
        plain = reading.of(self)
        if plain is None:
            return
        sunk = with_sinks(plain, self.r)
        yield {"sinks": sunk.sinks}
        if reading.mask == "everything" and plain.k.shape[1] <= MOST_TOKENS:
            masked = with_mask(plain, self.r, (_FITS / 4.0) ** 2)
            if masked is not None:
                yield {"seen": masked.seen}

    def _changes(self, reading: Reading) -> Iterator[Mapping[str, Any]]:
        plain = reading.of(self)
        if plain is None:
            return
        usual = 1.0 / math.sqrt(plain.q.shape[-1])
        scaled = with_scale(plain, self._rest)
        if scaled is not None:
            yield {"scale": scaled.scale / usual}
        capped = _with_cap(plain, self._rest)
        if capped is not None:
            yield {"scale": capped.scale / usual, "cap": capped.cap}
        yield {"window": best_window(plain, self._rest)}
        sloped = with_slopes(plain, self._rests)
        if sloped is not None:
            yield {"slopes": sloped}
        for made in (plain, replace(plain, scale=1.0)):
            by_distance = with_distances(made, self.r)
            if by_distance is not None:
                yield {"scale": made.scale / usual, "by_distance": by_distance.by_distance}

    def _left(self, reading: Reading) -> float:
        made = reading.of(self)
        return math.inf if made is None else self._rest(made)

    def _rest(self, made: Attention) -> float:
        return float(self._rests(made).sum())

    def _rests(self, made: Attention) -> F64:
        """Squared error against the reference, per head."""
        left = made.output() - self.r
        if self.case.pads is not None:
            # Outputs of padding tokens are not used and differ between implementations.
            pads = self.case.pads[: self.sequences, : self.tokens]
            left = np.where(pads[..., None], 0.0, left)
        return made.by_head(left)

    def heads(self) -> Iterator[tuple[F64, F64, F64]]:
        """Candidates for queries, keys and values, split into heads."""
        count = 0
        for q, k, v in self._projections():
            # Of earlier calls there may be less of one than of the other.
            if k.shape[1] != v.shape[1]:
                continue
            for width in _WIDTHS:
                if any(tensor.shape[-1] % width for tensor in (q, k, v)):
                    continue
                split = [x.reshape(*x.shape[:2], -1, width) for x in (q, k, v)]
                if split[0].shape[2] % split[1].shape[2]:
                    continue
                count += 1
                yield split[0], split[1], split[2]
                if count >= _MOST_READINGS:
                    return

    def _contradicts(self, v: F64) -> bool:
        """Whether the first token's output is too large to be made of these values.

        In a causal attention the first token has its own value; in one that sees everything it has
        a mean of the values, which is no larger than the largest.
        """
        first = self.r[:, 0].reshape(self.sequences, -1, v.shape[-1])
        return float(np.abs(first).max()) > 1.05 * float(np.abs(v).max()) + 1e-6

    def _copies(self, v: F64) -> bool:
        """Whether the reference's output equals these values, so that no attention is needed."""
        last = v[:, -self.tokens :].reshape(*self.r.shape[:2], -1)
        if last.shape != self.r.shape:
            return False
        return float(np.sum((last - self.r) ** 2)) <= self.enough

    def _projections(self) -> Iterator[tuple[F64, F64, F64]]:
        rows = [
            (name, joined)
            for name, values in self.parts.items()
            if (joined := self._as_rows(values)) is not None
        ]
        # What its parts gave before what it was given: a cache may hold a tensor of every call.
        rows.sort(key=lambda row: not row[0].startswith(f"{self.case.site}."))
        for (_, q), (second, k), (third, v) in itertools.combinations(rows, 3):
            if q.shape[-1] == self.width and k.shape[-1] == v.shape[-1] <= self.width:
                yield q, self._with_past(second, k), self._with_past(third, v)
        for name, joined in rows:
            rest = joined.shape[-1] - self.width
            if rest <= 0 or rest % 2:
                continue
            ends = (self.width, self.width + rest // 2)
            everything = self._with_past(name, joined)
            q, k, v = (
                joined[..., : ends[0]],
                everything[..., ends[0] : ends[1]],
                everything[..., ends[1] :],
            )
            yield q, k, v
            # Another order: queries, keys and values of the first head, then those of the second.
            for width in _WIDTHS:
                if rest == 2 * self.width and self.width % width == 0:
                    parts = [
                        x.reshape(*x.shape[:2], -1, 3, width)[..., number, :].reshape(
                            *x.shape[:2], -1
                        )
                        for number, x in enumerate((joined, everything, everything))
                    ]
                    yield parts[0], parts[1], parts[2]

    def _as_rows(self, values: F64) -> F64 | None:
        """A tensor as [sequences, tokens, channels], heads joined; None if it has another shape."""
        # Shapes are compared with the whole case, so that every reader counts the same tensors.
        sequences, tokens = self.case.r.shape[:2]
        # The axis of heads may precede that of tokens. If both have the same size, tokens are
        # assumed to come first.
        if values.ndim == 4 and values.shape[1] != tokens == values.shape[2]:
            values = values.transpose(0, 2, 1, 3)
        if values.ndim == 4:
            values = values.reshape(*values.shape[:2], -1)
        if values.ndim != 3 or values.shape[:2] != (sequences, tokens):
            return None
        return values[: self.sequences, : self.tokens]

    def _with_past(self, name: str, values: F64) -> F64:
        """Keys or values, preceded by those of earlier calls if a cache holds them."""
        past = self.case.past.get(name)
        if past is None or past.ndim != 3 or past.shape[0] < self.sequences:
            return values
        return np.concatenate([past[: self.sequences], values], axis=1)

    def masks(self, keys: int) -> dict[str, Flags]:
        """Possible masks by name: an input's, a causal one, or all keys; the last two hide pads."""
        behind = keys - self.tokens
        pads = np.zeros((1, 1, keys), dtype=np.bool_)
        if self.case.pads is not None and not behind:
            pads = self.case.pads[: self.sequences, None, : self.tokens]
        masks = {
            "causal": np.tri(self.tokens, keys, behind, dtype=np.bool_)[None] & ~pads,
            "everything": np.ones((1, self.tokens, keys), dtype=np.bool_) & ~pads,
        }
        supplied = self._supplied_mask(keys)
        return masks if supplied is None else {"supplied": supplied, **masks}

    def _supplied_mask(self, keys: int) -> Flags | None:
        """The mask that an input of zeros and very negative numbers describes; None without one."""
        # The reference's inputs are used, because the candidate's mask may be the fault.
        for values in (self.case.right_parts or self.parts).values():
            if values.ndim < 2 or values.shape[-2:] != (self.tokens, keys):
                continue
            hidden = ~(values > _HIDDEN)
            if hidden.any() and not np.any(values[~hidden]):
                flat = ~hidden.reshape(-1, self.tokens, keys)
                return flat[: self.sequences] if len(flat) >= self.sequences else flat[:1]
        return None

    def turns(self) -> Iterator[Turn]:
        tables = list(_tables(self.parts, self.tokens))
        past = list(_tables(self.case.past, 1)) if self.case.past else []
        for number, (cos, sin) in enumerate(tables):
            if number < len(past):
                cos = np.concatenate([past[number][0], cos])
                sin = np.concatenate([past[number][1], sin])
            for pairs in ("halves", "neighbours"):
                yield Turn(cos, sin, pairs)


def _tables(parts: Mapping[str, F64], tokens: int) -> Iterator[tuple[F64, F64]]:
    """Yield cosines and sines of positions.

    They are two tensors of one shape whose squares add up to one, or one tensor that holds both as
    pairs, as complex numbers and their views do.
    """
    for values in parts.values():
        pairs = _on_the_circle(values, tokens)
        if pairs is not None:
            yield _doubled(pairs[..., 0], pairs[..., 1])
    tables = [x for x in parts.values() if x.ndim >= 2 and x.shape[-2] >= tokens]
    for first, second in itertools.combinations(tables, 2):
        if first.shape != second.shape or first.shape[-1] > 512:
            continue
        if not np.allclose(first**2 + second**2, 1.0, atol=0.02):
            continue
        a, b = (x.reshape(-1, *x.shape[-2:])[0] for x in (first, second))
        a, b = (x if tokens == 1 else x[:tokens] for x in (a, b))
        # Angles begin near zero or change slowly in some feature; cosines are near one there, so
        # the table with the larger mean magnitude has the cosines.
        cos, sin = (a, b) if np.abs(a).mean() >= np.abs(b).mean() else (b, a)
        yield _doubled(cos, sin)


def _on_the_circle(values: F64, tokens: int) -> F64 | None:
    """A tensor of pairs of length one as [tokens, features, 2]; None for any other tensor."""
    shape = [size for size in values.shape if size > 1]
    if shape and shape[-1] != 2:
        shape[-1:] = [shape[-1] // 2, 2] if shape[-1] % 2 == 0 else []
    if len(shape) < 3 or shape[-3] < tokens or not 1 < shape[-2] <= 256:
        return None
    pairs = values.reshape(-1, *shape[-3:])[0]
    if not np.allclose(np.sum(pairs**2, axis=-1), 1.0, atol=0.02):
        return None
    return pairs if tokens == 1 else pairs[:tokens]


def _doubled(cos: F64, sin: F64) -> tuple[F64, F64]:
    """Tables in which the value of each pair of features occurs once in each half."""
    width = cos.shape[-1]
    if width % 2 == 0 and np.array_equal(cos[:, : width // 2], cos[:, width // 2 :]):
        return cos, sin
    # Some tables hold each value twice in succession, others only once.
    step = 2 if width % 2 == 0 and np.array_equal(cos[:, ::2], cos[:, 1::2]) else 1
    return np.tile(cos[:, ::step], 2), np.tile(sin[:, ::step], 2)


Left = Callable[[Attention], float]


def with_scale(reading: Attention, left: Left, *, sure: bool = False) -> Attention | None:
    """The attention with the best factor of the scores.

    None if the factor helps little; with `sure`, it is returned in any case.
    """
    return searched(
        lambda factor: replace(reading, scale=reading.scale * factor),
        (1.0, *_FACTORS, math.sqrt(reading.q.shape[-1])),
        left,
        math.inf if sure else left(reading),
    )


def _with_cap(reading: Attention, left: Left) -> Attention | None:
    """Search a soft cap and a factor in turns, each with the other one held fixed."""
    made = reading
    for _ in range(3):
        capped = searched(lambda cap, made=made: replace(made, cap=cap), CAPS, left, math.inf)
        made = made if capped is None else capped
        made = with_scale(made, left, sure=True) or made
    return made if left(made) <= _NEARER * left(reading) else None


def with_slopes(reading: Attention, rests: Callable[[Attention], F64]) -> F64 | None:
    """The best slope of each head; None if all are zero.

    Heads do not depend on each other, so all are searched at once.

    Args:
        reading: The attention without slopes.
        rests: Function that returns an attention's squared error per head.
    """
    heads = reading.q.shape[2]

    def left(slopes: F64) -> F64:
        return rests(replace(reading, slopes=slopes))

    starts: list[F64] = [np.full(heads, slope, dtype=np.float64) for slope in _SLOPES]
    tried = np.stack([left(slopes) for slopes in starts])
    best: F64 = np.asarray(_SLOPES, dtype=np.float64)[np.argmin(tried, axis=0)]
    low: F64 = best - np.abs(best) / 2.0
    high: F64 = best + np.abs(best) / 2.0
    for _ in range(20):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        worse = left(a) > left(b)
        low, high = np.where(worse, a, low), np.where(worse, high, b)
    slopes: F64 = (low + high) / 2
    return slopes if np.any(slopes) else None


def with_distances(reading: Attention, wanted: F64) -> Attention | None:
    """The attention whose amounts by distance bring its output nearest to `wanted`.

    None if they cannot be solved for.
    """
    sequences, queries, heads, width = reading.q.shape
    table = reading.by_distance
    if table is None:
        table = np.zeros((heads, 2 * reading.k.shape[1] - 1))
    if table.shape[1] != 2 * reading.k.shape[1] - 1:
        return None
    values = np.repeat(reading.v, heads // reading.v.shape[2], axis=2).transpose(0, 2, 1, 3)
    target = wanted.reshape(sequences, queries, heads, width).transpose(0, 2, 1, 3)

    def weigh(amounts: F64) -> F64:
        return replace(reading, by_distance=amounts).weights()

    solved = solved_distances(weigh, values, target, table)
    return None if solved is None else replace(reading, by_distance=solved)


def with_sinks(reading: Attention, wanted: F64) -> Attention:
    """The attention whose sinks bring its output nearest to `wanted`."""
    sinks = solved_sinks(reading.scores(), reading.seen, reading.values(), reading.split(wanted))
    return replace(reading, sinks=sinks)


def with_mask(reading: Attention, wanted: F64, floor: float) -> Attention | None:
    """The attention whose queries see what brings its output nearest to `wanted`.

    None if no mask does.
    """
    seen = solved_mask(reading.scores(), reading.values(), reading.split(wanted), floor)
    return None if seen is None else replace(reading, seen=seen)


def best_window(reading: Attention, left: Left) -> int:
    """The window with the smallest error: the number of tokens a query sees, itself included."""
    queries, keys = reading.seen.shape[1], reading.k.shape[1]

    def rest(width: int) -> float:
        return left(replace(reading, seen=reading.seen & near_keys(queries, keys, width)))

    return min(range(1, keys + 1), key=rest)


def near_keys(queries: int, keys: int, width: int) -> Flags:
    distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)[None]
    return (distance < width)[None]


def searched(
    made: Callable[[float], Attention],
    starts: Sequence[float],
    left: Left,
    unchanged: float,
) -> Attention | None:
    """The attention with the best value of a parameter, refined by a ternary search.

    Args:
        made: Function that returns the attention for a value of the parameter.
        starts: Values that are tried first.
        left: Function that returns an attention's squared error.
        unchanged: Squared error of the unchanged attention. If the parameter hardly reduces it,
            None is returned.
    """
    rest = {value: left(made(value)) for value in starts}
    best = min(rest, key=lambda value: rest[value])
    if rest[best] > _NEARER * unchanged:
        return None
    low, high = sorted((best / 1.5, best * 1.5))
    for _ in range(12):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if left(made(a)) > left(made(b)):
            low = a
        else:
            high = b
    return made((low + high) / 2)


# Amounts added to the scores by distance (learned tables, buckets, slopes). They can be solved for,
# because an attention is smooth in them and there are many more outputs than distances. An amount
# added to all scores of a head makes no difference.


def at_distances(table: F64, queries: int, keys: int) -> F64:
    """Amounts by distance expanded to [heads, queries, keys].

    The table's middle column holds the amount of distance zero.
    """
    middle = (table.shape[1] - 1) // 2
    apart = np.arange(keys)[None] - np.arange(keys - queries, keys)[:, None]
    return table[:, np.clip(apart + middle, 0, table.shape[1] - 1)]


def solved_distances(
    weigh: Callable[[F64], F64], values: F64, target: F64, table: F64
) -> F64 | None:
    """The amounts by distance that bring an attention nearest to an output.

    None if there are too few outputs, or if the first steps hardly reduce the error.

    Args:
        weigh: Function that returns the attention's weights for some amounts,
            [sequences, heads, queries, keys].
        values: The values, [sequences, heads, keys, width].
        target: The output, [sequences, heads, queries, width].
        table: The first estimate, [heads, distances].
    """
    if target[:, 0].size < _ENOUGH * table.shape[1]:
        return None

    def off(amounts: F64) -> tuple[F64, F64, F64]:
        """Weights, their residual against the target, and its sum of squares per head."""
        weights = weigh(amounts)
        left = target - np.matmul(weights, values)
        return weights, left, np.sum(left * left, axis=(0, 2, 3))

    damping = np.full(len(table), 1e-3)
    weights, left, rest = off(table)
    begun = float(rest.sum())
    for number in range(_STEPS):
        if number == _FIRST_STEPS and float(rest.sum()) > _SLOW * begun:
            return None
        proposed = table + _step(weights, values, left, damping)
        others = off(proposed)
        better = others[2] < rest
        damping = np.where(better, damping / 5.0, damping * 8.0)
        chosen = better[None, :, None, None]
        table = np.where(better[:, None], proposed, table)
        weights, left = (
            np.where(chosen, b, a) for a, b in zip((weights, left), others[:2], strict=True)
        )
        rest = np.where(better, others[2], rest)
        if float(rest.sum()) <= 1e-14 * float(np.sum(target * target)):
            break
    return table


def _step(weights: F64, values: F64, left: F64, damping: F64) -> F64:
    """The damped Gauss-Newton step of each head's amounts."""
    sequences, heads, queries, keys = weights.shape
    middle, count = keys - 1, 2 * keys - 1
    changes = np.zeros((heads, count))
    made = np.matmul(weights, values)
    for head in range(heads):
        slopes = np.zeros((sequences, queries, values.shape[-1], count))
        for query in range(queries):
            places = np.arange(keys, dtype=np.intp) - query - keys + queries + middle
            apart = values[:, head] - made[:, head, query, None]
            moves = weights[:, head, query, :, None] * apart
            slopes[:, query][:, :, places] = moves.transpose(0, 2, 1)
        flat = slopes.reshape(-1, count)
        squares = flat.T @ flat
        most = float(np.trace(squares)) / count
        squares[np.diag_indices(count)] += damping[head] * np.diag(squares) + 1e-9 * most + 1e-300
        changes[head] = np.linalg.solve(squares, flat.T @ left[:, head].reshape(-1))
    return np.clip(changes, -3.0, 3.0)
