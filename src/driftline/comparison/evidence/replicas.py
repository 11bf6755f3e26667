"""Findings about ranks from measured rows: which copy differs, which part is wrong, and how.

Copies of one tensor are compared with each other, not only with the other run. A gradient that one
rank holds differently is a finding, however close it is to the reference. Tensors that differ are
examined for a known reason: a missing all-reduce, a part cut along another axis, parts in another
order. This file judges nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.comparison.table.row import Column, Number, Row
from driftline.errors import DriftlineError
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

GAP = "replica_gap"
GAP_COLUMN = Column(GAP, "lower", "relative L2 distance to what the other ranks hold of it")
SAME: Mapping[str, float] = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative L2 up to which copies count as equal, because sums may be taken in another order. Copies
of other formats must agree bitwise."""

_AGREE, _FAR = 0.02, 1e-3
_LARGEST = 1 << 24


class _Copies(NamedTuple):
    """Rows of one tensor of one side, with the copies that the ranks of the other side hold."""

    rows: list[int]
    many: Run
    sources: list[Source]
    other_run: Run
    undivided: Source


def with_ranks(
    pairs: Sequence[Pair],
    rows: Sequence[Row],
    reference: Run,
    candidate: Run,
    places: Sequence[int] | None = None,
) -> list[Row]:
    """Return the rows of a plan's pairs, with findings about their ranks.

    Args:
        pairs: All pairs of the plan.
        rows: Measured rows, one for each pair, or for those at `places`.
        reference: The reference run.
        candidate: The candidate run.
        places: Indices of the pairs that the rows are about; all if None.
    """
    where = range(len(pairs)) if places is None else places
    by_place = dict(zip(where, rows, strict=True))
    # Copies come first: a difference between ranks explains a difference from the other run.
    for copies in _copies(pairs, reference, candidate):
        if not any(place in by_place for place in copies.rows):
            continue
        for place, gap, words in _disagreeing(copies):
            if (row := by_place.get(place)) is not None:
                metrics: dict[str, Number] = {**row.metrics, GAP: gap}
                by_place[place] = row._replace(metrics=metrics, reason=_and(row.reason, words))
    for place, row in by_place.items():
        # Smaller differences are only rounding, of sums in another order.
        far = row.metrics.get("relative_l2", 0.0) > _FAR and GAP not in row.metrics
        if far and (words := _wrong_parts(pairs[place], reference, candidate)):
            by_place[place] = row._replace(reason=_and(row.reason, words))
    return [by_place[place] for place in where]


def has_ranks(pairs: Sequence[Pair]) -> bool:
    """Return whether ranks were gathered: a tensor has partners, or parts, on several ranks."""
    candidate_ranks: dict[TensorKey, int] = {}
    reference_ranks: dict[TensorKey, int] = {}
    for pair in pairs:
        reference_key, candidate_key = pair.reference.key, pair.candidate.key
        # One tensor with partners on two ranks: the partners are copies.
        if candidate_ranks.setdefault(reference_key, candidate_key.rank) != candidate_key.rank:
            return True
        if reference_ranks.setdefault(candidate_key, reference_key.rank) != reference_key.rank:
            return True
        for recipe in (pair.reference_recipe, pair.candidate_recipe):
            if recipe is not None and len({record.key.rank for record in recipe.records}) > 1:
                return True
    return False


# --- copies


def _copies(pairs: Sequence[Pair], reference: Run, candidate: Run) -> Iterator[_Copies]:
    # Either side may be the one that holds copies on many ranks.
    for swapped in (False, True):
        groups: dict[TensorKey, dict[tuple[TensorKey, tuple[Step, ...]], list[int]]] = {}
        for index, pair in enumerate(pairs):
            single, many, how = pair.reference, pair.candidate, pair.reference_recipe
            if swapped:
                single, many, how = many, single, pair.candidate_recipe
            place = many.key._replace(rank=0, process=0)
            cut = () if how is None else how.steps  # other slices of one tensor are not copies
            groups.setdefault(place, {}).setdefault((single.key, cut), []).append(index)
        for by_key in groups.values():
            for members in by_key.values():
                held = [
                    pairs[index].reference if swapped else pairs[index].candidate
                    for index in members
                ]
                ranks = {record.key.rank for record in held}
                # Two pairs of one rank are two uses of a tensor, not two copies.
                if len(ranks) < 2 or len(ranks) != len(members):
                    continue
                sides = [_sources(pairs[index]) for index in members]
                sources = [side[0 if swapped else 1] for side in sides]
                undivided = sides[0][1 if swapped else 0]
                runs = (reference, candidate) if swapped else (candidate, reference)
                yield _Copies(members, runs[0], sources, runs[1], undivided)


def _sources(pair: Pair) -> tuple[Source, Source]:
    return pair.reference_recipe or pair.reference, pair.candidate_recipe or pair.candidate


def _differing_values(copies: _Copies) -> tuple[list[Any], Any] | None:
    """Return copies that are not all equal, and the tensor of the other run; None if all are equal.

    The tensor is None if it cannot be read or has another shape.
    """
    names = [_digest(source) for source in copies.sources]
    if all(names) and len(set(names)) == 1:
        return None
    # If one copy has only a sketch, sketches of all are compared, so that values never meet an
    # estimate.
    sketched = any(record.kept == "summary" for source in copies.sources for record in _all(source))
    most = max(1, _LARGEST // 4 // len(copies.sources))  # all copies are in memory together
    read = _sketch if sketched else partial(_values, most=most)
    values = [read(copies.many, source) for source in copies.sources]
    if any(copy is None for copy in values) or len({copy.shape for copy in values}) != 1:
        return None
    # Bitwise equal, whatever their digests were computed from.
    if len(_clusters(values)) == 1:
        return None
    undivided = read(copies.other_run, copies.undivided)
    if undivided is not None and undivided.shape != values[0].shape:
        undivided = None
    return values, undivided


def _disagreeing(copies: _Copies) -> Iterator[tuple[int, float, str]]:
    """Yield rows whose copy differs from the others', with the distance and a sentence."""
    if (differing := _differing_values(copies)) is None:
        return
    values, undivided = differing
    clusters = _clusters(values)
    held = [_ranks_of(source) for source in copies.sources]
    most = _right_ones(clusters, values, undivided)
    allowed = SAME.get(_first(copies.sources[0]).dtype, 0.0)
    why = "" if undivided is None else _in_words(values, undivided)
    for n, place in enumerate(copies.rows):
        if most:
            if n in most:
                continue
            others, right = list(most), values[most[0]]
        else:
            others = [m for m in range(len(held)) if m != n]
            right = sum(values[m] for m in others) / len(others)
        gap = _distance(right, values[n])
        if gap > allowed:
            verb = "holds" if len(held[n]) == 1 else "together hold"
            who = f"{describe_ranks(held[n])} {verb} something else than {_others(held, others)}"
            yield place, gap, f"{who} (relative_l2 {gap:.3g}), though it is one tensor{why}"


def _others(held: Sequence[Sequence[int]], which: Sequence[int]) -> str:
    """Return the ranks whose copies the others are; copies from several ranks are listed singly."""
    if all(len(held[n]) == 1 for n in which):
        return describe_ranks([held[n][0] for n in which])
    return " or ".join(describe_ranks(held[n]) for n in which[:3]) + (
        " or others" if which[3:] else ""
    )


def _clusters(values: Sequence[Any]) -> list[list[int]]:
    clusters: dict[bytes, list[int]] = {}
    for n, copy in enumerate(values):
        clusters.setdefault(copy.tobytes(), []).append(n)
    return list(clusters.values())


def _right_ones(clusters: Sequence[list[int]], values: Sequence[Any], undivided: Any) -> list[int]:
    """Return the copies that serve as the standard for the others.

    They are the majority, or else those that clearly agree with the other run; empty if neither
    exists.
    """
    most = max(clusters, key=len)
    # A majority is assumed to be right.
    if 2 * len(most) > len(values):
        return most
    if undivided is None:
        return []
    errors = sorted((_distance(undivided, values[group[0]]), n) for n, group in enumerate(clusters))
    # They must be clearly nearer than the next ones, or nothing is concluded.
    near = errors[0][0] <= _FAR and errors[0][0] < errors[1][0] / 10
    return clusters[errors[0][1]] if near else []


def _in_words(values: Sequence[Any], undivided: Any) -> str:
    """Return what differing copies give together, in words."""
    total = sum(values)
    alone = min(_distance(undivided, copy) for copy in values)
    # Five times nearer than any single copy is no accident.
    if _distance(undivided, total) < min(_AGREE, alone / 5):
        return "; the sum over the ranks agrees with the other run: an all-reduce is missing"
    if _distance(undivided, total / len(values)) < min(_AGREE, alone / 5):
        return "; the mean over the ranks agrees with the other run: it was never averaged"
    return ""


# --- parts


def _wrong_parts(pair: Pair, reference: Run, candidate: Run) -> str:
    """Return which ranks' parts are off in a tensor that is joined from parts, in words."""
    for many, made, single, undivided in (
        (candidate, pair.candidate_recipe, reference, pair.reference_recipe or pair.reference),
        (reference, pair.reference_recipe, candidate, pair.candidate_recipe or pair.candidate),
    ):
        if made is None or len(made.steps) != 1 or made.steps[0].kind != "concat":
            continue
        parts = [source for source in made.sources if isinstance(source, Record)]
        if len(parts) != len(made.sources):
            if words := _wrong_places(made, many, _values(single, undivided)):
                return words
            continue
        if len({part.key.rank for part in parts}) < 2:
            continue
        right = _values(single, undivided)
        values = [_values(many, part) for part in parts]
        if right is not None and right.shape == made.shape and all(v is not None for v in values):
            return _about_parts(right, values, [p.key.rank for p in parts], made.steps[0].axis)
    return ""


def _wrong_places(made: Recipe, run: Run, right: Any) -> str:
    """Return the same for a tensor that is cut along several axes of a mesh."""
    places = _places(made)
    if right is None or right.shape != made.shape or len({part.key.rank for part, _ in places}) < 2:
        return ""
    off: list[tuple[int, float]] = []
    for part, where in places:
        values = _values(run, part)
        if values is None or values.shape != right[where].shape:
            return ""
        off.append((part.key.rank, _distance(right[where], values)))
    worst = max(error for _, error in off)
    wrong = sorted({rank for rank, error in off if error > max(_FAR, worst / 10)})
    if not wrong or len(wrong) == len({rank for rank, _ in off}):
        return ""
    verb = "is" if len(wrong) == 1 else "are"
    return f"the part of {describe_ranks(wrong)} {verb} off, those of the other ranks agree"


def _places(made: Recipe) -> list[tuple[Record, tuple[slice, ...]]]:
    """Return the stored parts of a tensor that is joined from parts, each with its slices.

    Empty if a part is transformed in any other way than by joining.
    """
    if len(made.steps) != 1 or made.steps[0].kind != "concat":
        return []
    axis = made.steps[0].axis
    offset = 0
    places: list[tuple[Record, tuple[slice, ...]]] = []
    for source in made.sources:
        full = tuple(slice(0, size) for size in source.shape)
        inner = _places(source) if isinstance(source, Recipe) else [(source, full)]
        if not inner:
            return []
        for record, where in inner:
            moved = slice(where[axis].start + offset, where[axis].stop + offset)
            places.append((record, (*where[:axis], moved, *where[axis + 1 :])))
        offset += source.shape[axis]
    return places


def _about_parts(right: Any, parts: Sequence[Any], ranks: Sequence[int], axis: int) -> str:
    import numpy as np

    ends = list(itertools.accumulate(part.shape[axis] for part in parts))
    slices = np.split(right, ends[:-1], axis=axis)
    off = [_distance(expected, part) for expected, part in zip(slices, parts, strict=True)]
    bad = [n for n, error in enumerate(off) if error > max(_FAR, max(off) / 10)]
    if not bad:
        return ""
    wrong = [ranks[n] for n in bad]
    # Cut along another axis: the elements are right but on the wrong ranks.
    for other in range(right.ndim):
        if other == axis or right.shape[other] % len(parts):
            continue
        cuts = np.split(right, len(parts), axis=other)
        if all(_fits(cuts[n], parts[n], axis, other) for n in bad):
            hold = "holds" if len(bad) == 1 else "hold"
            return (
                f"{describe_ranks(wrong)} {hold} a slice of axis {other}, not of axis {axis}: cut "
                "along the wrong dimension"
            )
    places = {n: _place_of(parts[n], slices) for n in bad}
    if all(place is not None for place in places.values()):
        swaps = [
            f"rank {ranks[n]} that of rank {ranks[owner]}"
            for n, owner in places.items()
            if owner is not None
        ]
        return f"the parts are in another order: {', '.join(swaps[:4])}"
    # If all parts are off, the fault is not one of single ranks.
    if len(bad) == len(parts):
        return f"the parts of all {len(parts)} ranks are off"
    verb = "is" if len(bad) == 1 else "are"
    return f"the part of {describe_ranks(wrong)} {verb} off, those of the other ranks agree"


def _fits(cut: Any, part: Any, axis: int, other: int) -> bool:
    if cut.size != part.size:
        return False
    ways = [cut.swapaxes(axis, other), cut.reshape(part.shape)]
    return any(way.shape == part.shape and _distance(way, part) < _AGREE for way in ways)


def _place_of(part: Any, slices: Sequence[Any]) -> int | None:
    fits = [
        n for n, s in enumerate(slices) if s.shape == part.shape and _distance(s, part) < _AGREE
    ]
    return fits[0] if len(fits) == 1 else None


# --- values


def _values(run: Run, source: Source, *, most: int | None = None) -> Any:
    """Return a source's values as float64 in its shape; None without values, or with too many.

    Args:
        run: The run that has the source.
        source: The source.
        most: If there are more elements, return every nth of them instead, flat.
    """
    from driftline.comparison.measure.recipes import apply_recipe
    from driftline.numerics.dtypes import to_float64

    many = math.prod(source.shape) > (_LARGEST if most is None else most)
    if many and most is None:
        return None
    try:
        made = apply_recipe(run, source if isinstance(source, Recipe) else start(source))
        if made.dtype.kind in ("complex", "bits") or (many and made.dtype.bits < 8):
            return None
        if many:
            # The same stride for all copies, so that they stay comparable.
            stride = -(-made.values.size // (most or 1))
            return to_float64(made.values[::stride].copy(), made.dtype)
        numbers: Any = to_float64(made.values, made.dtype, math.prod(made.shape))
        return numbers.reshape(made.shape)
    except (DriftlineError, OSError, ValueError):
        return None


def _sketch(run: Run, source: Source) -> Any:
    """Return the sketch of a source. Sketches are linear, so sums and distances can use them."""
    import numpy as np

    from driftline.comparison.measure.summaries import summary_of

    if isinstance(source, Recipe):
        return None  # sketches of parts do not give a sketch of the whole
    try:
        summary = summary_of(run, source)
    except (DriftlineError, OSError, ValueError):
        return None
    return np.array(summary.sketch) if summary is not None and summary.sketch else None


def _distance(right: Any, other: Any) -> float:
    from driftline.alignment.placements.join import distance

    return distance(right, other)


def _digest(source: Source) -> str:
    """Return a name for the bytes of a source; empty if it has no digest."""
    if isinstance(source, Recipe):
        inner = [_digest(inner_source) for inner_source in source.sources]
        steps = ",".join(step.text() for step in source.steps)
        return f"{steps} of {' '.join(inner)}" if all(inner) else ""
    return source.digest if source.kept == "full" else ""


def _first(source: Source) -> Record:
    return source.records[0] if isinstance(source, Recipe) else source


def _ranks_of(source: Source) -> list[int]:
    """Return the ranks from which a copy is made, in order."""
    return sorted({record.key.rank for record in _all(source)})


def _all(source: Source) -> Sequence[Record]:
    return source.records if isinstance(source, Recipe) else (source,)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> describe_ranks([2]), describe_ranks([0, 1, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second
