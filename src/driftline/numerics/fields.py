"""The schema of figures: what is computed for a tensor (`Summary`) and for a pair (`PairMoments`).

A field's annotation gives its type and how two consecutive blocks are merged. Everything else is
derived from it: the list of `Field`, the layout of the C structs (`csrc/generate_tables.py` writes
them into a header), the formats that unpack them, and the merging of blocks. `definitions.py`
defines each figure. Standard library only: the build reads this file before numpy is installed.
"""

import enum
import math
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

SKETCH_BUCKETS = 64


class Merge(enum.Enum):
    """How a figure of a tensor is computed from the figures of its consecutive blocks."""

    SUM = "sum"
    LEAST = "least"  # NaN means that there is none
    GREATEST = "greatest"
    MEAN = "mean"  # of the finite elements, weighted by their number in each block
    STD = "std"
    NORM = "norm"
    FIRST = "first"  # the first position; -1 means that there is none
    AT_GREATEST = "at greatest"  # the position that belongs to the preceding field
    BUCKETS = "buckets"  # sums, bucket by bucket


Count = Annotated[int, Merge.SUM]
Total = Annotated[float, Merge.SUM]
Least = Annotated[float, Merge.LEAST]
Greatest = Annotated[float, Merge.GREATEST]
Mean = Annotated[float, Merge.MEAN]
Std = Annotated[float, Merge.STD]
Norm = Annotated[float, Merge.NORM]
First = Annotated[int, Merge.FIRST]
AtGreatest = Annotated[int, Merge.AT_GREATEST]
Buckets = Annotated[tuple[float, ...], Merge.BUCKETS]


class Field(NamedTuple):
    """One figure.

    Attributes:
        name: Name of the figure in the tuple and in the C struct.
        type: int, float, or tuple for the sketch.
        merge: How two blocks are merged.
        side: "r" for a figure of the reference alone, "c" for the candidate's, "" for the pair's.
    """

    name: str
    type: type
    merge: Merge
    side: str


class Summary(NamedTuple):
    """One tensor's values in a few numbers. Moments are of the finite elements, in float64.

    Other programs store fewer of them. A missing figure is NaN, also if it is a count, and a
    missing sketch is empty. `nan` is NaN exactly in such a partial summary.

    Attributes:
        count: Number of elements.
        min: Smallest finite element; NaN if there is none (likewise max, mean and std).
        std: Population standard deviation (ddof 0).
        l2: Euclidean norm of the finite elements.
        zeros: Number of elements equal to zero, of either sign.
        nan: Number of NaN elements.
        pos_inf: Number of elements that are +inf.
        neg_inf: Number of elements that are -inf, or the lowest value of a float format of 16 bits
            or more, which stands for -inf in attention masks.
        sketch: Signed count-sketch of the finite elements; see `definitions.sketch`.
    """

    count: Count  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    min: Least
    max: Greatest
    mean: Mean
    std: Std
    l2: Norm
    zeros: Count
    nan: Count
    pos_inf: Count
    neg_inf: Count
    sketch: Buckets = ()


class PairMoments(NamedTuple):
    """Sums, extremes and counts of one pair, in float64; r is the reference, c the candidate, e = c
    - r.

    "Finite" means finite on both sides. The lowest value of a float format of 16 bits or more
    counts as -inf, because attention masks are filled with it. Sums and error extremes are over the
    finite elements. Positions are flat C-order indices; -1 means that there is none.

    A tuple, because setting forty fields one by one takes longer than measuring a small tensor.
    """

    count: Count  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    finite: Count
    sum_rr: Total
    sum_cc: Total
    sum_rc: Total
    sum_ee: Total
    sum_abs_e: Total
    max_abs_e: Greatest
    max_abs_e_at: AtGreatest
    sum_rel_e: Total  # |e|/|r|; 0 if both are 0, inf if only r is
    max_rel_e: Greatest
    max_ulp: Greatest  # distance in the candidate's format, after rounding the reference to it
    outside: Count  # elements with not |e| <= atol + rtol*|r|, also those that count as one-sided
    different: Count  # elements whose values differ; NaN equals NaN here
    first_different_at: First
    one_sided: Count  # non-finite on one side only, or not equally on the two
    one_sided_at: First
    # Figures of one side, over the finite elements of that side.
    r_finite: Count
    c_finite: Count
    r_min: Least
    c_min: Least
    r_max: Greatest
    c_max: Greatest
    r_mean: Mean
    c_mean: Mean
    r_std: Std
    c_std: Std
    r_l2: Norm
    c_l2: Norm
    r_nan: Count
    c_nan: Count
    r_pos_inf: Count
    c_pos_inf: Count
    r_neg_inf: Count  # including sentinels
    c_neg_inf: Count
    r_nonfinite_at: First
    c_nonfinite_at: First


def _fields_of(figures: type) -> tuple[Field, ...]:
    fields: list[Field] = []
    for name, hint in get_type_hints(figures, include_extras=True).items():
        side = name[0] if name.startswith(("r_", "c_")) else ""
        kind = hint.__origin__ if isinstance(hint.__origin__, type) else tuple
        fields.append(Field(name, kind, hint.__metadata__[0], side))
    return tuple(fields)


SUMMARY_FIELDS = _fields_of(Summary)
PAIR_FIELDS = _fields_of(PairMoments)


def _layout(fields: Sequence[Field]) -> struct.Struct:
    """The struct that C fills for these fields: eight bytes each, without the sketch."""
    letters = {int: "q", float: "d"}
    return struct.Struct("=" + "".join(letters[f.type] for f in fields if f.type in letters))


SUMMARY_STRUCT = _layout(SUMMARY_FIELDS)
SKETCH_STRUCT = struct.Struct(f"={SKETCH_BUCKETS}d")
PAIR_STRUCT = _layout(PAIR_FIELDS)


_Spread = tuple[int, float, float]
"""Number of finite elements of one side of a block, their mean and standard deviation."""


def merge_moments(parts: Sequence[PairMoments]) -> PairMoments:
    """Merge the moments of a pair's consecutive blocks, in order.

    Standard deviations are joined by Chan's formula, so a mean far from zero costs no digits.

    >>> merge_moments([])
    Traceback (most recent call last):
    ValueError: no blocks to merge
    """
    if not parts:
        raise ValueError("no blocks to merge")
    merged = parts[0]
    for part in parts[1:]:
        spreads = {
            side: (_pair_spread(merged, side), _pair_spread(part, side)) for side in ("r", "c")
        }
        merged = PairMoments._make(_join(PAIR_FIELDS, merged, part, spreads))
    return merged


def merge_summaries(a: Summary, b: Summary) -> Summary:
    """Merge the summaries of two consecutive blocks of a tensor."""
    spreads = {"": (_summary_spread(a), _summary_spread(b))}
    return Summary._make(_join(SUMMARY_FIELDS, a, b, spreads))


def _pair_spread(m: PairMoments, side: str) -> _Spread:
    if side == "r":
        return m.r_finite, m.r_mean, m.r_std
    return m.c_finite, m.c_mean, m.c_std


def repeat_summary(summary: Summary, times: int) -> Summary:
    """The summary of a tensor that holds the elements of another one `times` times.

    It has no sketch, which depends on the positions of elements.

    >>> one = Summary(2, 1.0, 3.0, 2.0, 1.0, 10.0**0.5, 0, 0, 0, 0)
    >>> repeat_summary(one, 4)[:5], round(repeat_summary(one, 4).l2, 3)
    ((8, 1.0, 3.0, 2.0, 1.0), 6.325)
    """
    counts = {
        name: getattr(summary, name) * times
        for name in ("count", "zeros", "nan", "pos_inf", "neg_inf")
    }
    return summary._replace(l2=summary.l2 * math.sqrt(times), sketch=(), **counts)


def _summary_spread(s: Summary) -> _Spread:
    return s.count - s.nan - s.pos_inf - s.neg_inf, s.mean, s.std


def _join(
    fields: Sequence[Field],
    first: Sequence[Any],
    second: Sequence[Any],
    spreads: dict[str, tuple[_Spread, _Spread]],
) -> list[Any]:
    """Merge field by field.

    The field `count` comes first and gives the offset of the second block.
    """
    offset: int = first[0]
    merged: list[Any] = []
    second_is_greater = False
    for field, a, b in zip(fields, first, second, strict=True):
        match field.merge:
            case Merge.MEAN:
                merged.append(joined_mean(*spreads[field.side]))
            case Merge.STD:
                merged.append(joined_std(*spreads[field.side]))
            case Merge.FIRST:
                merged.append(a if a >= 0 else b + offset if b >= 0 else -1)
            case Merge.AT_GREATEST:
                merged.append(b + offset if second_is_greater else a)
            case _:
                second_is_greater = b > a
                merged.append(_SIMPLE[field.merge](a, b))
    return merged


def joined_mean(a: _Spread, b: _Spread) -> float:
    """Mean of two groups together; each group is (count, mean, std)."""
    (n, mean_a, _), (m, mean_b, _) = a, b
    if n == 0 or m == 0:
        return mean_a if n else mean_b
    return mean_a * (n / (n + m)) + mean_b * (m / (n + m))


def joined_std(a: _Spread, b: _Spread) -> float:
    """Standard deviation of two groups together; each group is (count, mean, std)."""
    (n, mean_a, std_a), (m, mean_b, std_b) = a, b
    if n == 0 or m == 0:
        return std_a if n else std_b
    weight_a, weight_b = n / (n + m), m / (n + m)
    # hypot, because squares of huge or tiny numbers would overflow or underflow float64.
    return math.hypot(
        std_a * math.sqrt(weight_a),
        std_b * math.sqrt(weight_b),
        (mean_b - mean_a) * math.sqrt(weight_a * weight_b),
    )


def _of_numbers(choose: Callable[[float, float], float]) -> Callable[[float, float], float]:
    def chosen(a: float, b: float) -> float:
        if math.isnan(a) or math.isnan(b):
            return b if math.isnan(a) else a
        return choose(a, b)

    return chosen


_SIMPLE: dict[Merge, Callable[[Any, Any], Any]] = {
    Merge.SUM: lambda a, b: a + b,
    Merge.LEAST: _of_numbers(min),
    Merge.GREATEST: _of_numbers(max),
    Merge.NORM: math.hypot,
    Merge.BUCKETS: lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
}

INTERFACE = 1
"""Increase it when the arguments of a C function change; the tables do not show that."""


def abi_number(dtypes: Sequence[tuple[Any, ...]]) -> int:
    """A number for the tables that C was built from; the binding refuses a library with another
    number.

    Args:
        dtypes: The rows of `dtypes.DTYPES`.
    """
    import zlib

    fields = [(f.name, f.type.__name__) for f in (*SUMMARY_FIELDS, *PAIR_FIELDS)]
    text = repr((INTERFACE, SKETCH_BUCKETS, fields, [tuple(row) for row in dtypes]))
    return zlib.crc32(text.encode()) & 0x7FFFFFFF
