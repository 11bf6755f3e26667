"""One pair of tensors as two sheets of rows and columns, read a window at a time.

Also guesses what the axes mean (token, head, channel) from shape and name. Values are decoded as
the comparison decodes them; no statistics are computed here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Pair
from driftline.comparison.measure.operands import open_arrays
from driftline.comparison.measure.pair_rows import incompatibility
from driftline.comparison.measure.recipes import made
from driftline.errors import BadInput
from driftline.numerics.definitions import masked_as_infinite
from driftline.numerics.dtypes import DTYPES, DType, to_float64, value_table
from driftline.runs.records import Record
from driftline.runs.run import Run

# The usual layouts of transformers; anything else is numbered.
_AXES = {
    1: ("channel",),
    2: ("token", "channel"),
    3: ("batch", "token", "channel"),
    4: ("batch", "head", "token", "channel"),
}


def axes_of(shape: tuple[int, ...], record: Record) -> tuple[str, ...]:
    """What each axis of a tensor is likely to be, in a word; a guess from its rank and port."""
    if record.key.port.startswith(("param", "optimizer")):
        usual = {1: ("channel",), 2: ("out", "in")}.get(len(shape))
    elif DTYPES[record.dtype].kind in ("int", "uint") and len(shape) == 2:
        usual = ("batch", "token")  # ids and positions have no channels
    else:
        usual = _AXES.get(len(shape))
    return usual or tuple(f"axis {axis}" for axis in range(len(shape))) or ("value",)


def attends(record: Record) -> bool:
    """Whether a tensor is one of an attention, by its class and the end of its path.

    >>> from driftline.runs.records import TensorKey
    >>> attends(Record(TensorKey.of("layers.0.self_attn.q_proj", "output"), 0, "float32", (1,)))
    True
    """
    # Only the end of the path: a whole model may be called `attention_test`.
    last = ".".join(record.key.site.replace("/", ".").split(".")[-2:])
    words = f"{last} {record.class_name}".lower()
    return "attn" in words or "attention" in words


# The pair itself, as rows and columns.


F64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

CHUNK = 1 << 19
"""Elements of a window that are decoded at a time."""
BUDGET = 1 << 24
"""Elements that are looked at for one picture; of a larger region an even sample is."""
# From here on float64 does not hold every integer.
_EXACT = 2.0**53


class Region(NamedTuple):
    """A rectangle of the sheet; `bottom` and `right` are the first ones outside."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def elements(self) -> int:
        return self.height * self.width


class Window(NamedTuple):
    """Both sides of some rows and columns, decoded.

    Attributes:
        reference: As float64; the lowest value of a wide float format is -inf, as in a mask.
        candidate: The same of the other side.
        error: Candidate minus reference; 0 where a side is not finite.
        finite: Where both sides are finite.
        apart: Where a side is not finite and the other is not the same: NaN equals NaN.
    """

    reference: F64
    candidate: F64
    error: F64
    finite: Flags
    apart: Flags


class Piece(NamedTuple):
    """A window, and which rows and columns of the sheet it shows."""

    rows: Places
    columns: Places
    window: Window


class _Side(NamedTuple):
    """The stored words of one side.

    Attributes:
        words: [rows, columns] where that is a view, else of the tensor's own shape; of a packed
            format, the flat bytes.
        dtype: What they mean.
        packed: Whether two elements share a byte of `words`.
    """

    words: npt.NDArray[Any]
    dtype: DType
    packed: bool


class OpenedPair(NamedTuple):
    """A pair whose values can be looked at; made by `open_pair`.

    Attributes:
        reference: Its words.
        candidate: The words of the other side.
        shape: Of both, after the plan's recipes; of a sample, how many elements were kept.
        axes: What each axis is, in a word.
        rows: How many rows the sheet has.
        columns: How many columns; a complex number takes two.
        stride: Every nth element was kept, for a sample; else 1.
        attends: Whether its channels may be those of attention heads, by the names of its site.
    """

    reference: _Side
    candidate: _Side
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    rows: int
    columns: int
    stride: int
    attends: bool

    @property
    def whole(self) -> Region:
        return Region(0, self.rows, 0, self.columns)

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def clipped(self, region: Region | None) -> Region:
        """A region as far as there is something.

        Raises:
            BadInput: Nothing is left of it.
        """
        # An empty tensor has no region that could be outside.
        if region is None or not self.elements:
            return self.whole
        top, left = max(0, region.top), max(0, region.left)
        inside = Region(top, min(self.rows, region.bottom), left, min(self.columns, region.right))
        if inside.height <= 0 or inside.width <= 0:
            raise BadInput(
                f"rows {region.top}:{region.bottom}, columns {region.left}:{region.right} are "
                f"outside of {self.rows} rows and {self.columns} columns"
            )
        return inside

    def window(self, rows: Places, columns: Places) -> Window:
        """Some rows and columns, in any order; the caller sees to it that they are few."""
        r = self._decoded(self.reference, rows, columns)
        c = self._decoded(self.candidate, rows, columns)
        finite = np.isfinite(r) & np.isfinite(c)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.where(finite, c - r, 0.0)
        apart = ~finite & (r != c) & ~(np.isnan(r) & np.isnan(c))
        if self.are_wide_integers and max(np.max(np.abs(r)), np.max(np.abs(c))) >= _EXACT:
            # Beyond 2**53 float64 would call neighbours equal.
            reference_integers, candidate_integers = self.integers(rows, columns)
            error = (candidate_integers - reference_integers).astype(np.float64)
        return Window(r, c, error, finite, apart)

    def integers(self, rows: Places, columns: Places) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The values of two integer tensors as Python's integers, which do not round."""
        reference, candidate = (
            self._stored(side, rows, columns).astype(object)
            for side in (self.reference, self.candidate)
        )
        return reference, candidate

    @property
    def are_wide_integers(self) -> bool:
        """Whether float64 may call two different values equal."""
        kinds = (self.reference.dtype, self.candidate.dtype)
        return all(dtype.kind in ("int", "uint", "bool") for dtype in kinds) and any(
            dtype.bits == 64 for dtype in kinds
        )

    def _decoded(self, side: _Side, rows: Places, columns: Places) -> F64:
        dtype = side.dtype
        if dtype.kind == "complex":
            # Real and imaginary part are two columns of one stored number.
            kept, which = np.unique(columns // 2, return_inverse=True)
            numbers = to_float64(np.ascontiguousarray(self._stored(side, rows, kept)), dtype)
            pairs = np.ascontiguousarray(numbers).view(np.float64)
            return pairs[:, 2 * which + columns % 2]
        words = self._stored(side, rows, columns)
        if dtype.bits == 4:
            if dtype.kind == "float":
                return value_table(dtype.name)[words.astype(np.intp)]
            signed = words.astype(np.int8)
            if dtype.kind == "int":
                # Codes 8 to 15 are the negative ones of a 4-bit integer.
                signed = np.where(signed > 7, signed - 16, signed)
            return signed.astype(np.float64)
        numbers = to_float64(np.ascontiguousarray(words), dtype)
        return masked_as_infinite(np.asarray(numbers, dtype=np.float64), dtype)

    def _stored(self, side: _Side, rows: Places, columns: Places) -> npt.NDArray[Any]:
        """Words of these rows and columns; a 4-bit code is a byte here."""
        if side.packed:
            return self._unpacked(side, rows, columns)
        down = _as_slice(rows)
        across = _as_slice(columns)
        # Slices keep this a view of the mapped file; only the window is copied.
        if side.words.ndim == 2:
            part = side.words[down]
            return part[:, across]
        if down is not rows:
            rows = np.arange(rows[0], rows[-1] + 1, dtype=np.intp)
        places = np.unravel_index(rows, self.shape[:-1])
        if isinstance(across, slice):
            return side.words[(*places, across)]
        return side.words[(*(place[:, None] for place in places), columns[None, :])]

    def _unpacked(self, side: _Side, rows: Places, columns: Places) -> npt.NDArray[Any]:
        flat = rows[:, None] * self.columns + columns[None, :]
        # Two elements share a byte, the first in its lower half.
        codes = side.words[flat // 2]
        return np.where(flat % 2, codes >> 4, codes & 0x0F).astype(np.uint8)

    def pieces(
        self, region: Region, *, bands: int = 1, cells: int = 1, budget: int = BUDGET
    ) -> Iterator[Piece]:
        """A region, window after window, each inside one band of rows and of few elements.

        Args:
            region: Inside the sheet.
            bands: The rows are cut into so many bands; from each the same number is taken.
            cells: The columns are cut so where even one row of each band is too much.
            budget: Elements to look at; of a larger region an even sample is taken.
        """
        bands, cells = min(bands, region.height), min(cells, region.width)
        if not bands or not cells:
            return
        columns = np.arange(region.left, region.right, dtype=np.intp)
        # Even one row per band is too much, so columns are sampled too.
        if bands * region.width > budget:
            per_cell = max(1, budget // (bands * cells))
            columns = spread(region.left, region.right, cells, per_cell)
        depth = max(1, budget // (bands * len(columns)))
        at_once = max(1, CHUNK // len(columns))
        across = max(1, CHUNK // at_once)
        for band in range(bands):
            rows = spread(
                region.top + band * region.height // bands,
                region.top + (band + 1) * region.height // bands,
                1,
                depth,
                evenly=True,
            )
            for top in range(0, len(rows), at_once):
                for left in range(0, len(columns), across):
                    some, few = rows[top : top + at_once], columns[left : left + across]
                    yield Piece(some, few, self.window(some, few))

    def looked_at(self, region: Region, *, bands: int, cells: int, budget: int) -> int:
        """How many elements `pieces` gives; as many as there are, unless that is too much."""
        bands, cells = min(bands, region.height), min(cells, region.width)
        if not bands or not cells:
            return 0
        width = region.width
        if bands * width > budget:
            width = len(spread(region.left, region.right, cells, max(1, budget // (bands * cells))))
        # Must follow `pieces` exactly: the page states how many elements were read.
        depth = max(1, budget // (bands * width))
        heights = (
            (band + 1) * region.height // bands - band * region.height // bands
            for band in range(bands)
        )
        return width * sum(min(depth, height) for height in heights)

    def row_name(self, row: int) -> str:
        """Which row that is, in the tensor's own axes.

        `batch 1, token 5`; an axis of one element is left out.
        """
        sizes, names = self.shape[:-1], self.axes[:-1]
        if not sizes:
            return "the only row"
        places = np.unravel_index(row, sizes)
        words = [
            f"{name} {int(place)}"
            for name, place, size in zip(names, places, sizes, strict=True)
            if size > 1
        ]
        return ", ".join(words) or f"{names[-1]} 0"


def open_pair(reference: Run, candidate: Run, pair: Pair) -> OpenedPair:
    """The two sides of a pair, after the plan's recipes; nothing is read yet.

    Raises:
        DriftlineError: They cannot be compared with each other, or their values are not there.
    """
    # The comparison refused this pair for the same reason.
    if trouble := pair.trouble or incompatibility(pair):
        raise BadInput(trouble)
    reference_record, candidate_record = pair.reference, pair.candidate
    for run, record in ((reference, reference_record), (candidate, candidate_record)):
        _check_kept(run, record)
    # A sample has lost its axes; it is shown as a line of kept values.
    if "sample" in (reference_record.kept, candidate_record.kept):
        values = open_arrays(reference, reference_record, candidate, candidate_record)
        strides = [
            sampled.sample_stride
            for sampled in (reference_record, candidate_record)
            if sampled.kept == "sample"
        ]
        shape, stride = (values.count,), math.lcm(*strides)
        reference_side = _Side(
            values.reference, values.reference_dtype, values.reference_dtype.bits == 4
        )
        candidate_side = _Side(
            values.candidate, values.candidate_dtype, values.candidate_dtype.bits == 4
        )
        return _laid_out(reference_side, candidate_side, shape, ("kept value",), stride, False)
    reference_side = _side(reference, pair.reference_recipe, reference_record)
    candidate_side = _side(candidate, pair.candidate_recipe, candidate_record)
    shape = reference_record.shape if pair.reference_recipe is None else pair.reference_recipe.shape
    return _laid_out(
        reference_side,
        candidate_side,
        shape,
        axes_of(shape, reference_record),
        1,
        attends(reference_record),
    )


def spread(start: int, stop: int, parts: int, per_part: int, *, evenly: bool = False) -> Places:
    """At most `per_part` numbers from every part of a range: neighbours, or evenly spaced."""
    edges = [start + part * (stop - start) // parts for part in range(parts + 1)]
    chosen: list[Places] = []
    for low, high in itertools.pairwise(edges):
        if high - low <= per_part:
            chosen.append(np.arange(low, high, dtype=np.intp))
        elif evenly:
            chosen.append(low + (np.arange(per_part, dtype=np.intp) * (high - low)) // per_part)
        else:
            chosen.append(np.arange(low, low + per_part, dtype=np.intp))
    return np.concatenate(chosen)


def _check_kept(run: Run, record: Record) -> None:
    if record.kept not in ("full", "sample"):
        raise BadInput(
            f"the values of {record.key} were not kept, only its {record.kept}",
            hint="dump it with the reduction 'full'",
        )
    if why := run.lost(record):
        raise BadInput(f"the values of {record.key} are lost: {why}")


def _side(run: Run, recipe: Any, record: Record) -> _Side:
    if recipe is not None:
        words, dtype = made(run, recipe)
        return _Side(words, dtype, False)
    dtype = DTYPES[record.dtype]
    words = run.raw(record)
    if dtype.bits == 4:
        return _Side(words.view(np.uint8).reshape(-1), dtype, True)
    count = math.prod(record.shape)
    if words.size != count:
        raise BadInput(f"{record.key} holds {words.size} elements, its shape says {count}")
    return _Side(words, dtype, False)


def _laid_out(
    reference: _Side,
    candidate: _Side,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    stride: int,
    attends: bool,
) -> OpenedPair:
    shape = shape or (1,)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    sides = [
        side if side.packed else side._replace(words=_as_sheet(side.words, shape, rows, columns))
        for side in (reference, candidate)
    ]
    # A complex number takes two columns.
    wide = 2 * columns if reference.dtype.kind == "complex" else columns
    return OpenedPair(sides[0], sides[1], shape, axes, rows, wide, stride, attends)


def _as_sheet(
    words: npt.NDArray[Any], shape: tuple[int, ...], rows: int, columns: int
) -> npt.NDArray[Any]:
    """[rows, columns] where that takes no copy; a turned tensor keeps its axes."""
    if words.flags.c_contiguous:
        return words.reshape(rows, columns)
    return words.reshape(shape)


def _as_slice(places: Places) -> slice | Places:
    """Neighbours as a slice: a view, where a list of places would be a copy."""
    if len(places) and places[-1] - places[0] == len(places) - 1 and places[0] <= places[-1]:
        ascending = len(places) == 1 or bool(np.all(np.diff(places) == 1))
        if ascending:
            return slice(int(places[0]), int(places[-1]) + 1)
    return places
