"""Mistakes inside an attention, found by recomputing it from the outputs of its parts.

Once the attention is identified (`attention_model`), each of its parameters (factor, cap, slopes,
mask, window, rotation, grouping) is changed separately. The change that gives the candidate's
output is the mistake.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from driftline.diagnosis.causes.attention_model import (
    CAPS,
    RECOMPUTED,
    Attention,
    Reader,
    Reading,
    Turn,
    best_window,
    near_keys,
    searched,
    with_distances,
    with_mask,
    with_scale,
    with_sinks,
    with_slopes,
)
from driftline.diagnosis.causes.case import F64, Case, Clue, Flags
from driftline.diagnosis.causes.families.attention_masks import MOST_TOKENS, mask_words
from driftline.diagnosis.causes.linear_solve import solve

# Two sequences of this many tokens show every mistake; the cost is quadratic in the tokens.
_SEQUENCES, _TOKENS = 2, 96
_EXPLAINS = 0.9
# Fewer are enough to identify the attention.
_SEQUENCES_READ, _TOKENS_READ = 1, 48


class _Mistake(NamedTuple):
    cause: str
    what: str
    made: Attention


def attention(case: Case) -> Clue | None:
    """The mistake that turns the correct attention into the candidate's."""
    # Small ratios are noise, which all mistakes fit equally well.
    if case.r.ndim != 3 or not case.parts or case.ratio < 1.5:
        return None
    # A few tokens tell an attention only if they see those of earlier calls.
    if case.r.shape[1] < 4 and not case.past:
        return None
    # Only tensors that both sides have are used, so that a reading means the same on both sides.
    paired = case.right_parts or case.parts
    parts = {name: values for name, values in case.parts.items() if name in paired}
    right_parts = {name: paired[name] for name in parts}
    reading = Reader(case, _SEQUENCES_READ, _TOKENS_READ, right_parts).read()
    if reading is None:
        return None
    # A mask that was solved for is that of the tokens which were read.
    is_solved = "seen" in reading.changed
    sequences = min(case.r.shape[0], _SEQUENCES_READ if is_solved else _SEQUENCES)
    tokens = min(case.r.shape[1], _TOKENS_READ if is_solved else _TOKENS)
    sides = parts, right_parts
    opened = _opened(case, reading, (sequences, tokens), sides)
    if opened is None:
        return None
    few, right = opened
    clues = [*_single_mistakes(few, right), *_fitted_mistakes(few, right), _dropped(few, right)]
    best = max((clue for clue in clues if clue is not None), key=lambda clue: clue.score)
    if best.score >= _EXPLAINS:
        return best
    if right.k.shape[1] > MOST_TOKENS:
        opened = _opened(case, reading, (_SEQUENCES_READ, _TOKENS_READ), sides) or opened
    return _other_mask(*opened) or _other_distances(few, right) or best


_Parts: TypeAlias = Mapping[str, F64]


def _opened(
    case: Case, reading: Reading, size: tuple[int, int], sides: tuple[_Parts, _Parts]
) -> tuple[Case, Attention] | None:
    """The first sequences and tokens of a case, and the right attention of its own parts.

    None if the reading does not apply to them, or if they have hardly any error.
    """
    right, exact = (reading.of(Reader(case, *size, parts)) for parts in sides)
    if right is None:
        return None
    r, c = (values[: size[0], : size[1]] for values in (case.r, case.c))
    # The correct output is the attention of the candidate's own parts. The error of recomputing,
    # which is measured on the reference's parts, is subtracted.
    if exact is not None:
        r = right.output() + r - exact.output()
    few = replace(case, r=r, c=c, inputs={})
    return None if few.ratio < 1.5 else (few, right)


# Mistakes.


def _other_mask(case: Case, right: Attention) -> Clue | None:
    """Queries that see other keys, whichever they are."""
    if right.k.shape[1] > MOST_TOKENS:
        return None
    base = right.output()
    made = with_mask(right, case.c - case.r + base, (2.0 * case.noise) ** 2)
    if made is None:
        return None
    shown = np.broadcast_to(right.seen, made.seen.shape)
    if np.array_equal(made.seen, shown):
        return None
    # The mask was read from every second channel; the others judge it.
    score = case.fitted(case.r + made.output() - base)
    what = f"it is the attention {mask_words(shown, made.seen)}"
    return Clue("mask", score, what, RECOMPUTED) if score >= _EXPLAINS else None


def _other_distances(case: Case, right: Attention) -> Clue | None:
    """Scores to which other amounts are added at some distances, whatever the amounts are."""
    base = right.output()
    made = with_distances(right, case.c - case.r + base)
    if made is None or made.by_distance is None:
        return None
    had = np.zeros_like(made.by_distance) if right.by_distance is None else right.by_distance
    # The softmax cancels an amount that is equal for all distances at which something is seen.
    apart = made.by_distance - had
    middle = (apart.shape[1] - 1) // 2
    queries, keys = right.seen.shape[1:]
    index = np.arange(keys, dtype=np.intp)
    places = index[None] - index[keys - queries :, None] + middle
    used = np.zeros(apart.shape[1], dtype=np.bool_)
    used[places[np.any(right.seen, axis=0)]] = True
    apart = np.where(used, apart - np.median(apart[:, used], axis=1, keepdims=True), 0.0)
    most = np.abs(apart).max(axis=0)
    places = np.flatnonzero(most > 0.02 * max(float(most.max()), 1e-300))
    if not places.size:
        return None
    off = places - middle
    score = case.fitted(case.r + made.output() - base)
    far = f"keys {int(off[0]):+d} to {int(off[-1]):+d} tokens away"
    # What has next to no weight in any head is hidden, and no matter of its distance; if that is
    # most of it, the rest has the amounts.
    amounts = apart[:, places]
    if bool(np.all(amounts < -_AS_HIDDEN)) or bool(np.all(amounts > _AS_HIDDEN)):
        what = f"it is the attention that hides keys at some distances, of {far}"
        return Clue("mask", score, what, RECOMPUTED)
    what = f"it is the attention whose scores are moved by other amounts for {far}"
    return Clue("positions", score, what, RECOMPUTED)


_AS_HIDDEN = 4.0
"""An amount by which a score must fall behind others to count as hidden."""


def _single_mistakes(case: Case, right: Attention) -> Iterator[Clue]:
    base = right.output()
    for mistake in _mistakes(right):
        # Adding the difference of two recomputed attentions to the reference cancels the error of
        # recomputing.
        score = case.explained(case.r + mistake.made.output() - base)
        yield Clue(mistake.cause, score, mistake.what, RECOMPUTED)


def _fitted_mistakes(case: Case, right: Attention) -> Iterator[Clue]:
    """Parameters that may have any value: factor, cap, slopes, window."""
    base = right.output()

    def left(made: Attention) -> float:
        # The score is not used here: it is limited to 1, so it would not guide a search.
        rest = np.where(case.finite, case.c - case.r - made.output() + base, 0.0)
        return float(np.sum(rest * rest))

    def clue(cause: str, made: Attention, what: str) -> Clue:
        return Clue(cause, case.explained(case.r + made.output() - base), what, RECOMPUTED)

    scaled = with_scale(right, left)
    if scaled is not None:
        factor = scaled.scale / right.scale
        what = f"it is the attention with its scores scaled by {factor:.4g} times the right factor"
        yield clue("scale", scaled, what)
    plain = clue(
        *("soft-cap", replace(right, cap=0.0)),
        f"it is the attention without its soft cap of {right.cap:.4g}",
    )
    if right.cap > 0.0:
        yield plain
    capped = searched(lambda cap: replace(right, cap=cap), CAPS, left, left(right))
    if capped is not None:
        where = f"of {right.cap:.4g}" if right.cap else "of none"
        what = f"it is the attention with a soft cap of {capped.cap:.4g} in place {where}"
        other = clue("soft-cap", capped, what)
        # A very large cap has no effect, so the attention without a cap is preferred.
        if other.score > plain.score + 0.005:
            yield other
    sunk = with_sinks(right, case.c - case.r + base)
    if sunk.sinks is not None:
        had = np.zeros_like(sunk.sinks) if right.sinks is None else right.sinks
        what = (
            f"it is the attention whose sinks add {_few(sunk.sinks)} to the sums of its heads, in "
            f"place of {_few(had) if had.any() else 'nothing'}"
        )
        yield clue("scale", sunk, what)
    if not right.seen.all():
        weak = _weakly_hidden(right, left)
        what = f"it is the attention whose hidden keys have a score of about {weak.hidden:.4g}"
        yield clue("mask", weak, what)
    shown = replace(right, seen=_unwindowed(right))
    width = best_window(shown, left)
    windowed = replace(
        shown, seen=shown.seen & near_keys(right.seen.shape[1], right.k.shape[1], width)
    )
    what = f"it is the attention with a window of {width} tokens in place of {_reach(right)}"
    yield clue("mask", windowed, what)
    slopes = with_slopes(
        replace(right, slopes=None),
        lambda made: made.by_head(case.c - case.r - made.output() + base),
    )
    if slopes is not None:
        had = "none" if right.slopes is None else _few(right.slopes)
        what = (
            f"it is the attention whose scores fall by {_few(slopes)} for each token of distance, "
            f"in place of {had}"
        )
        yield clue("positions", replace(right, slopes=slopes), what)


def _weakly_hidden(right: Attention, left: Callable[[Attention], float]) -> Attention:
    """The attention with the best score of hidden keys: some that are seen may fall below it."""
    made = min((replace(right, hidden=score) for score in _SCORES), key=left)
    if not -100.0 < made.hidden < 0.0:
        return made
    near = searched(lambda size: replace(right, hidden=-size), (-made.hidden,), left, math.inf)
    return near or made


_SCORES = (0.0, -1.0, -3.0, -10.0, -30.0, -1e2, -1e3, -1e4, -65504.0, -1e5, -1e6)


def _few(slopes: F64) -> str:
    return ", ".join(f"{slope:.3g}" for slope in slopes[:4]) + (" ..." if len(slopes) > 4 else "")


def _unwindowed(right: Attention) -> Flags:
    queries, keys = right.seen.shape[1:]
    if not right.is_causal:
        return np.ones_like(right.seen)
    return np.tri(queries, keys, keys - queries, dtype=np.bool_)[None]


def _reach(made: Attention) -> int:
    """Number of tokens that the last query sees, counted back from itself, itself included."""
    row: Flags = np.any(made.seen, axis=0)[-1]
    return row.size - int(np.argmax(row))


def _mistakes(right: Attention) -> Iterator[_Mistake]:
    yield from _wrong_masks(right)
    behind = right.k.shape[1] - right.q.shape[1]
    if right.slopes is not None or right.by_distance is not None:
        yield _Mistake(
            "positions",
            "it is the attention whose scores do not depend on the distance of a key",
            replace(right, slopes=None, by_distance=None),
        )
    yield _Mistake(
        "shift",
        "it is the attention with keys and values of the token before",
        replace(right, k=np.roll(right.k, 1, axis=1), v=np.roll(right.v, 1, axis=1)),
    )
    if right.q.shape == right.k.shape:
        yield _Mistake(
            "permutation",
            "it is the attention with queries and keys exchanged",
            replace(right, q=right.k, k=right.q),
        )
        yield _Mistake(
            "permutation",
            "it is the attention with keys and values exchanged",
            replace(right, k=right.v, v=right.k),
        )
    elif right.k.shape[2] > 1:
        yield _Mistake(
            "permutation",
            "it is the attention with key heads shared in turns rather than in blocks",
            replace(right, tiled=not right.tiled),
        )
    if right.turn is not None and not behind:
        yield from _wrong_turns(right, right.turn)


def _wrong_masks(right: Attention) -> Iterator[_Mistake]:
    queries, keys = right.seen.shape[1:]
    behind = keys - queries
    if right.is_causal:
        yield _Mistake(
            "mask",
            "it is the attention without its causal mask: tokens see what comes after them",
            replace(right, seen=np.ones_like(right.seen)),
        )
        late = np.tri(queries, keys, behind - 1, dtype=np.bool_)
        late[0, 0] = True
        yield _Mistake(
            "shift",
            "it is the attention one key late: tokens do not see themselves",
            replace(right, seen=late[None]),
        )
        yield _Mistake(
            "mask",
            "it is the attention with a mask off by one: tokens see the next one",
            replace(right, seen=np.tri(queries, keys, behind + 1, dtype=np.bool_)[None]),
        )
        if behind:
            yield _Mistake(
                "mask",
                "it is the attention whose mask begins at the first key it has kept, not at the "
                "first query",
                replace(right, seen=np.tri(queries, keys, dtype=np.bool_)[None]),
            )
    else:
        yield _Mistake(
            "mask",
            "it is the attention with a causal mask that does not belong there",
            replace(right, seen=np.tri(queries, keys, behind, dtype=np.bool_)[None] & right.seen),
        )
    shown = _unwindowed(right)
    if not np.array_equal(np.broadcast_to(shown, right.seen.shape), right.seen):
        yield _Mistake(
            "mask",
            "it is the attention that sees padding, or all of what its mask hides",
            replace(right, seen=shown),
        )


def _wrong_turns(right: Attention, turn: Turn) -> Iterator[_Mistake]:
    other = "neighbours" if turn.pairs == "halves" else "halves"
    yield _Mistake(
        "permutation",
        f"it is the attention whose rotation pairs {other} in place of {turn.pairs}",
        replace(right, turn=turn._replace(pairs=other)),
    )
    if turn.cos.shape[-1] < right.q.shape[-1]:
        yield _Mistake(
            "permutation",
            "it is the attention whose rotation pairs features over the whole head, of which only "
            "a part turns",
            replace(right, turn=turn._replace(pairs="whole")),
        )
    for late in (1, -1):
        side = "before" if late > 0 else "after"
        yield _Mistake(
            "shift",
            f"it is the attention whose keys are rotated to the position {side}",
            replace(right, turn=turn._replace(late=late)),
        )
    yield _Mistake(
        "positions",
        "it is the attention whose rotation turns the other way",
        replace(right, turn=turn._replace(sin=-turn.sin)),
    )
    yield _Mistake("positions", "it is the attention without rotation", replace(right, turn=None))
    for sides, lacking in (("q", "keys"), ("k", "queries")):
        yield _Mistake(
            "positions",
            f"it is the attention whose {lacking} are not rotated",
            replace(right, turn=turn._replace(sides=sides)),
        )


# Dropout of weights. The weights are solved from the output of tokens that see at most half as many
# keys as a head has channels.


def _dropped(case: Case, right: Attention) -> Clue | None:
    """Attention weights of which some are zero and all others larger by one factor."""
    if right.k.shape[1] != right.q.shape[1]:
        return None
    weights, heads = right.weights(), right.q.shape[2]
    width = right.v.shape[-1]
    made = case.c.reshape(*case.c.shape[:2], heads, width)
    values = np.repeat(right.v, heads // right.v.shape[2], axis=2)
    parts: list[F64] = []
    for sequence, head in itertools.product(range(len(made)), range(heads)):
        for token in range(2, min(made.shape[1], width // 2)):
            seen = right.seen[min(sequence, len(right.seen) - 1), token]
            if np.count_nonzero(seen) > width // 2:
                continue
            solved = solve(values[sequence, seen, head].T, made[sequence, token, head])
            usual = weights[sequence, head, token, seen]
            parts.append((solved / np.maximum(usual, 1e-300))[usual > 0.02])
    if not parts:
        return None
    measured = np.concatenate(parts)
    if len(measured) < 32:
        return None
    kept = measured[np.abs(measured) > 0.3]
    share = 1.0 - len(kept) / len(measured)
    if not 0.01 < share < 0.9 or not len(kept):
        return None
    factor = float(np.median(kept))
    alike = np.abs(kept - factor) < 0.1 * factor
    none = np.abs(measured[np.abs(measured) <= 0.3]) < 0.1
    agree = float((np.count_nonzero(alike) + np.count_nonzero(none)) / len(measured))
    # Dropout scales the remaining weights by 1 / (1 - share).
    if abs(factor * (1.0 - share) - 1.0) > 0.1:
        return None
    what = (
        f"{share:.0%} of the attention's weights are zero and the others {factor:.3g} times as "
        f"large: dropout of {1.0 - 1.0 / factor:.2g} is left on"
    )
    return Clue("dropout", agree, what, RECOMPUTED)
