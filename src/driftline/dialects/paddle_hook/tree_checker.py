"""The checker of the saving hook: compares two of its trees, file name by file name.

    {A}/tensors/compare_rst/rank_{r}_rst.csv
    {A}/grads/compare_rst/rank_{r}_rst.csv

Reads `{tree}/{tensors|grads}/rank_{r}/*.npy`, whoever wrote them. This file finds the pairs, lets
the comparison measure them, and writes the figures. It gives no verdict: limits belong to
`driftline compare`. It prints nothing.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.metrics.definitions import F64, cosine
from driftline.comparison.options import CompareOptions
from driftline.comparison.pipeline import prepare
from driftline.comparison.table.row import Row
from driftline.dialects.ait.compare_report import Cell, write_whole
from driftline.errors import BadInput, DriftlineError
from driftline.formats.dump_run import TreeRun
from driftline.formats.folder import Folder
from driftline.formats.tensor_files import describe, leaf
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

COLUMNS = (
    "tensor_name",
    "cosine similarity",
    "meanA",
    "meanB",
    "meanA - meanB",
    "stdA",
    "stdB",
    "stdA - stdB",
    "varA",
    "varB",
    "varA - varB",
)
KINDS = ("tensors", "grads")
RESULTS = "compare_rst"

# Nine digits at most: longer numbers are no ranks.
_RANK = re.compile(r"rank_(\d{1,9})")
_TENSOR = re.compile(
    r"tensor_idx_(?P<idx>\d+)_layer_class_(?P<what>.+)_layer_name_(?P<name>.*)"
    r"_micro_step_(?P<step>-?\d+)"
)
_GRAD = re.compile(r"grad_idx_(?P<idx>\d+)_of_param_name_(?P<name>.+)_micro_step_(?P<step>-?\d+)")
_NUMBER = re.compile(r"\d+")

Progress = Callable[[int, int], None]
"""Called with (pairs done, pairs in total)."""


class Places(NamedTuple):
    """The tensors of one kind on one rank in both trees.

    Attributes:
        kind: tensors or grads.
        rank: Number of the rank.
        pairs: File names without `.npy`, (A's, B's), in the order of A's indices.
        only_a: Names that only A has.
        only_b: Names that only B has.
        by_order: How many pairs are of classes without a common name, and were paired by class,
            order and micro step.
    """

    kind: str
    rank: int
    pairs: tuple[tuple[str, str], ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    by_order: int = 0


class Survey(NamedTuple):
    """What can be compared, found before any tensor is read.

    Attributes:
        places: One per kind and rank that both trees have.
        absent: Sentences about kinds and ranks that only one tree has.
    """

    places: tuple[Places, ...]
    absent: tuple[str, ...]


class Checked(NamedTuple):
    """The result of one rank.

    Attributes:
        csv: The file that was written.
        rows: Its rows.
        troubles: (name, reason) of the rows that could not be compared; their cells are empty.
    """

    csv: Path
    rows: int
    troubles: tuple[tuple[str, str], ...]


def survey(a: Path, b: Path) -> Survey:
    """Find what both trees have.

    Raises:
        BadInput: A path is not a tree of the saving hook, or the two have no rank in common.
    """
    if (hook := sys.modules.get("driftline.dialects.paddle_hook.hook")) is not None:
        hook.wait_until_saved()  # this process may still be writing one of them
    # Both are checked before anything is compared.
    for tree in (a, b):
        if not tree.is_dir():
            raise BadInput(
                f"there is no folder {tree}",
                hint="--pathA and --pathB take folders that the saving hook wrote",
            )
        if not any(_ranks(tree / kind) for kind in KINDS):
            raise BadInput(
                f"{tree} is no tree of the saving hook: it has no tensors/rank_0 or grads/rank_0",
                hint="give the folder that register_saving_hook was given as `path`",
            )
    places: list[Places] = []
    absent: list[str] = []
    for kind in KINDS:
        ranks_a, ranks_b = _ranks(a / kind), _ranks(b / kind)
        if not ranks_a and not ranks_b:
            absent.append(f"neither tree holds {kind}")
            continue
        # A rank that one tree lacks is stated, not ignored.
        for ranks, others, missing in ((ranks_a, ranks_b, b), (ranks_b, ranks_a, a)):
            lone = [str(rank) for rank in ranks if rank not in others]
            if lone:
                noun = "rank" if len(lone) == 1 else "ranks"
                absent.append(f"{kind}: {missing} has no {noun} {', '.join(lone)}")
        for rank in ranks_a:
            if rank in ranks_b:
                places.append(_matched(kind, rank, _names(ranks_a[rank]), _names(ranks_b[rank])))
    if not places:
        raise BadInput(f"{a} and {b} have no rank in common", hint="; ".join(absent))
    return Survey(tuple(places), tuple(absent))


class Watch(Protocol):
    """Callbacks during a check of two trees."""

    def found(self, survey: Survey, /) -> None:
        """Called with what can be compared."""
        ...

    def begin(self, places: Places, /) -> Progress | None:
        """Called before one kind on one rank; returns a progress callback."""
        ...

    def done(self, places: Places, checked: Checked, /) -> None:
        """Called after one kind on one rank."""
        ...


def check_trees(a: Path, b: Path, *, watch: Watch | None = None) -> list[Checked]:
    """Compare everything that both trees have: a csv for each kind and rank, written into A.

    Raises:
        BadInput: A path is no tree of the saving hook, the two have no rank in common, or a csv
            cannot be written.
    """
    surveyed = survey(a, b)
    if watch is not None:
        watch.found(surveyed)
    results: list[Checked] = []
    for places in surveyed.places:
        results.append(check(a, b, places, watch.begin(places) if watch is not None else None))
        if watch is not None:
            watch.done(places, results[-1])
    return results


def check(a: Path, b: Path, places: Places, progress: Progress | None = None) -> Checked:
    """Compare one kind on one rank and write its csv; the file appears complete or not at all.

    Raises:
        BadInput: The csv cannot be written.
    """
    folder = a / places.kind / RESULTS
    goal = folder / f"rank_{places.rank}_rst.csv"
    names_a, names_b = ([pair[side] for pair in places.pairs] for side in (0, 1))
    tree_a, tree_b = _opened(a, places, names_a), _opened(b, places, names_b)
    pairs = tuple(map(Pair, tree_a.records, tree_b.records))
    comparison = prepare(tree_a, tree_b, CompareOptions.of(), Plan(pairs, (), ()))
    troubles: list[tuple[str, str]] = []

    def lines() -> Iterator[list[Cell]]:
        rows = comparison.measure(progress=progress).rows
        for pair, row in zip(pairs, rows, strict=True):
            yield _line(tree_a, tree_b, pair, row, troubles)

    try:
        # Results go into tree A, as in the original.
        folder.mkdir(exist_ok=True)
        write_whole(goal, COLUMNS, lines())
    except OSError as trouble:
        raise BadInput(
            f"cannot write {goal}: {trouble.strerror or trouble}",
            hint="the results go into pathA, which must be writable",
        ) from trouble
    return Checked(goal, len(places.pairs), tuple(troubles))


def _ranks(folder: Path) -> dict[int, Path]:
    """Rank → its folder, in the order of the numbers."""
    folders: dict[int, Path] = {}
    if folder.is_dir():
        for entry in folder.iterdir():
            match = _RANK.fullmatch(entry.name)
            if match and entry.is_dir():
                folders[int(match[1])] = entry
    return dict(sorted(folders.items()))


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name[:-4] for entry in entries if entry.name.endswith(".npy")]
    return sorted(names, key=_by_numbers)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """`idx_2` before `idx_10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _matched(kind: str, rank: int, names_a: list[str], names_b: list[str]) -> Places:
    set_b = set(names_b)
    pairs = [(name, name) for name in names_a if name in set_b]
    # If some names of a class agree, the trees number it equally: order must not override this.
    agreeing = {_class(name) for name, _ in pairs}
    shifted = _paired_by_order(
        [name for name in names_a if _class(name) not in agreeing],
        [name for name in names_b if _class(name) not in agreeing],
    )
    position = {name: index for index, name in enumerate(names_a)}
    pairs = sorted([*pairs, *shifted], key=lambda pair: position[pair[0]])
    paired_a, paired_b = {a for a, _ in pairs}, {b for _, b in pairs}
    only_a = tuple(name for name in names_a if name not in paired_a)
    only_b = tuple(name for name in names_b if name not in paired_b)
    return Places(kind, rank, tuple(pairs), only_a, only_b, len(shifted))


def _paired_by_order(names_a: Sequence[str], names_b: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one class and micro step in the order of their indices.

    Paddle numbers layers in construction order, so one additional layer shifts all names after it.
    If one side has more layers of a class, the class is not paired: any of them could be the extra.
    """
    groups_a, groups_b = _grouped(names_a), _grouped(names_b)
    return [
        pair
        for group, names in groups_a.items()
        if len(names) == len(groups_b.get(group, ()))
        for pair in zip(names, groups_b[group], strict=True)
    ]


def _grouped(names: Sequence[str]) -> dict[tuple[str, int], list[str]]:
    groups: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name in names:
        if match := _TENSOR.fullmatch(name) or _GRAD.fullmatch(name):
            group = (_class(name), int(match["step"]))
            groups.setdefault(group, []).append((int(match["idx"]), name))
    return {group: [name for _, name in sorted(numbered)] for group, numbered in groups.items()}


def _class(name: str) -> str:
    """The class of a tensor's layer; for a gradient, the name of its parameter without numbers."""
    if match := _TENSOR.fullmatch(name):
        return match["what"]
    match = _GRAD.fullmatch(name)
    return "parameter " + _NUMBER.sub("", match["name"]) if match else ""


def _opened(tree: Path, places: Places, names: Sequence[str]) -> TreeRun:
    """Some tensors of one rank as a run: the name of a file is its site."""
    folder = Folder(tree)
    place = f"{places.kind}/rank_{places.rank}"
    # Listed again: the folder object knows links only for files that it has listed.
    for _ in folder.files(place, named=lambda name: name.endswith(".npy")):
        pass
    files = folder.ahead([f"{place}/{name}.npy" for name in names])
    leaves = [
        leaf(TensorKey.of(name, "output"), file, describe(folder, file)[0])
        for name, file in zip(names, files, strict=True)
    ]
    return TreeRun(tree, "files of a rank", leaves)


def _line(
    tree_a: Run, tree_b: Run, pair: Pair, row: Row, troubles: list[tuple[str, str]]
) -> list[Cell]:
    name = row.site
    if not row.compared:
        troubles.append((name, row.reason))
    try:
        alike, spread_a, spread_b = _figures(tree_a, tree_b, pair, row)
    except (DriftlineError, OSError, ValueError) as trouble:
        if row.compared:
            troubles.append((name, str(trouble)))
        return [name, *[""] * (len(COLUMNS) - 1)]
    (mean_a, std_a), (mean_b, std_b) = spread_a, spread_b
    line: list[Cell] = [name, alike if row.compared else ""]
    for first, second in ((mean_a, mean_b), (std_a, std_b), (std_a * std_a, std_b * std_b)):
        line += [first, second, first - second]
    return line


Spread = tuple[float, float]
"""Mean, and standard deviation (ddof 0)."""


def _figures(tree_a: Run, tree_b: Run, pair: Pair, row: Row) -> tuple[float, Spread, Spread]:
    """Cosine, then the spread of A and of B.

    Raises:
        DriftlineError: A tensor has no such figures, or cannot be read.
    """
    for record in (pair.reference, pair.candidate):
        if not record.lost and DTYPES[record.dtype].kind == "complex":
            raise BadInput(f"it holds {record.dtype} numbers, which have no order and no std")
    metrics = row.metrics
    strange = any(
        metrics.get(f"{side}_{what}", 0)
        for side in ("reference", "candidate")
        for what in ("nan", "inf")
    )
    if row.compared and math.prod(pair.reference.shape) and not strange:
        spread_a = float(metrics["reference_mean"]), float(metrics["reference_std"])
        spread_b = float(metrics["candidate_mean"]), float(metrics["candidate_std"])
        return float(metrics["cosine"]), spread_a, spread_b
    # The comparison leaves out values that are not finite, and reads a format's lowest value as
    # minus infinity; the original uses all elements. Different shapes are not measured.
    values_a, values_b = _numbers(tree_a, pair.reference), _numbers(tree_b, pair.candidate)
    finite = np.isfinite(values_a).all() and np.isfinite(values_b).all()
    alike = math.nan
    if row.compared and finite and values_a.size:
        alike = cosine(values_a, values_b)
    return alike, _spread(values_a), _spread(values_b)


def _numbers(run: Run, record: Record) -> F64:
    values = to_float64(run.raw(record), DTYPES[record.dtype])
    return values.astype(np.float64, copy=False)


def _spread(values: F64) -> Spread:
    if not values.size:
        return math.nan, math.nan
    with np.errstate(all="ignore"):
        return float(np.mean(values)), float(np.std(values))
