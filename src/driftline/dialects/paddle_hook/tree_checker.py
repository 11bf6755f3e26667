"""The checker of seed 004: two trees of the saving hook, set against each other name by name.

    {A}/tensors/compare_rst/rank_{r}_rst.csv
    {A}/grads/compare_rst/rank_{r}_rst.csv

Reads `{tree}/{tensors|grads}/rank_{r}/*.npy`, whoever wrote them, and gives figures, no judgement:
what is too much is for `driftline compare`. Knows nothing of terminals.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from driftline.comparison.metrics.definitions import F64
from driftline.comparison.metrics.definitions import cosine as defined_cosine
from driftline.comparison.metrics.from_moments import cosine, needs_definition
from driftline.dialects.ait.compare_report import Cell, write_whole
from driftline.errors import BadInput, DriftlineError
from driftline.formats.dump_run import Member
from driftline.formats.folder import Folder
from driftline.formats.tensor_files import describe
from driftline.formats.tensors import npy
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.numerics.fields import PairMoments

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

_RANK = re.compile(r"rank_(\d{1,9})")
_TENSOR = re.compile(
    r"tensor_idx_(?P<idx>\d+)_layer_class_(?P<what>.+)_layer_name_(?P<name>.*)"
    r"_micro_step_(?P<step>-?\d+)"
)
_GRAD = re.compile(r"grad_idx_(?P<idx>\d+)_of_param_name_(?P<name>.+)_micro_step_(?P<step>-?\d+)")
_NUMBER = re.compile(r"\d+")

AnyArray = npt.NDArray[Any]
Progress = Callable[[int, int], None]
"""Called with (pairs done, pairs in all)."""


_File = tuple[Path, Folder, str]
"""The tree, the folder of a rank in there, the file's name."""


class Places(NamedTuple):
    """What both trees hold of one kind on one rank.

    Attributes:
        kind: tensors or grads.
        rank: Number of the rank.
        pairs: File names without `.npy`, (A's, B's), in the order of A's indices.
        only_a: Names that only A has.
        only_b: Names that only B has.
        by_order: So many of them are of classes of which not one name agrees, and were paired by
            class, order and micro step.
    """

    kind: str
    rank: int
    pairs: tuple[tuple[str, str], ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    by_order: int = 0


class Survey(NamedTuple):
    """What there is to compare, known before a tensor is read.

    Attributes:
        places: One per kind and rank that both trees have.
        absent: Sentences about kinds and ranks that only one tree has.
    """

    places: tuple[Places, ...]
    absent: tuple[str, ...]


class Checked(NamedTuple):
    """What came of one rank.

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
        BadInput: A path is no tree of the saving hook, or the two have no rank in common.
    """
    if (hook := sys.modules.get("driftline.dialects.paddle_hook.hook")) is not None:
        hook.wait_until_saved()  # this very process may be writing one of them
    for tree in (a, b):
        if not tree.is_dir():
            raise BadInput(f"there is no folder {tree}")
        if not any(_ranks(tree / kind) for kind in KINDS):
            raise BadInput(
                f"{tree} is no tree of the saving hook: it has no tensors/rank_0 or grads/rank_0",
                hint="give the folder that register_saving_hook was given as `path`",
            )
    places: list[Places] = []
    absent: list[str] = []
    for kind in KINDS:
        ours, theirs = _ranks(a / kind), _ranks(b / kind)
        if not ours and not theirs:
            absent.append(f"neither tree holds {kind}")
            continue
        for ranks, others, missing in ((ours, theirs, b), (theirs, ours, a)):
            lone = [str(rank) for rank in ranks if rank not in others]
            if lone:
                noun = "rank" if len(lone) == 1 else "ranks"
                absent.append(f"{kind}: {missing} has no {noun} {', '.join(lone)}")
        for rank in ours:
            if rank in theirs:
                places.append(_matched(kind, rank, _names(ours[rank]), _names(theirs[rank])))
    if not places:
        raise BadInput(f"{a} and {b} have no rank in common", hint="; ".join(absent))
    return Survey(tuple(places), tuple(absent))


class Watch(Protocol):
    """Is told how far a check of two trees is."""

    def found(self, survey: Survey, /) -> None:
        """What there is to compare."""
        ...

    def begin(self, places: Places, /) -> Progress | None:
        """One kind on one rank begins."""
        ...

    def done(self, places: Places, checked: Checked, /) -> None:
        """It is over."""
        ...


def check_trees(a: Path, b: Path, *, watch: Watch | None = None) -> list[Checked]:
    """Compare everything that both trees have: a csv for each kind and rank, written into A.

    Raises:
        BadInput: A path is no tree of the saving hook, the two have no rank in common, or a csv
            cannot be written.
    """
    found = survey(a, b)
    if watch is not None:
        watch.found(found)
    results: list[Checked] = []
    for places in found.places:
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
    troubles: list[tuple[str, str]] = []

    def lines() -> Iterator[list[Cell]]:
        where = Path(places.kind, f"rank_{places.rank}")
        here, there = Folder(a / where), Folder(b / where)
        ahead = zip(
            here.ahead([f"{ours}.npy" for ours, _ in places.pairs]),
            there.ahead([f"{theirs}.npy" for _, theirs in places.pairs]),
            strict=True,
        )
        for done, (ours, theirs) in enumerate(ahead, 1):
            yield _line((a, here, ours), (b, there, theirs), troubles)
            if progress is not None:
                progress(done, len(places.pairs))

    try:
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
    found: dict[int, Path] = {}
    if folder.is_dir():
        for entry in folder.iterdir():
            match = _RANK.fullmatch(entry.name)
            if match and entry.is_dir():
                found[int(match[1])] = entry
    return dict(sorted(found.items()))


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name[:-4] for entry in entries if entry.name.endswith(".npy")]
    return sorted(names, key=_by_numbers)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """`idx_2` before `idx_10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _matched(kind: str, rank: int, ours: list[str], theirs: list[str]) -> Places:
    there = set(theirs)
    pairs = [(name, name) for name in ours if name in there]
    agreeing = {_class(name) for name, _ in pairs}
    shifted = _paired_by_order(
        [name for name in ours if _class(name) not in agreeing],
        [name for name in theirs if _class(name) not in agreeing],
    )
    position = {name: at for at, name in enumerate(ours)}
    pairs = sorted([*pairs, *shifted], key=lambda pair: position[pair[0]])
    known, others = {a for a, _ in pairs}, {b for _, b in pairs}
    only_a = tuple(name for name in ours if name not in known)
    only_b = tuple(name for name in theirs if name not in others)
    return Places(kind, rank, tuple(pairs), only_a, only_b, len(shifted))


def _paired_by_order(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one class and micro step in the order of their indices.

    Paddle numbers layers in construction order, so one layer more in front shifts every name. A
    class that one side has more often is left alone: there is no telling which one is surplus.
    """
    here, there = _grouped(ours), _grouped(theirs)
    return [
        pair
        for group, names in here.items()
        if len(names) == len(there.get(group, ()))
        for pair in zip(names, there[group], strict=True)
    ]


def _grouped(names: Sequence[str]) -> dict[tuple[str, int], list[str]]:
    groups: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name in names:
        if match := _TENSOR.fullmatch(name) or _GRAD.fullmatch(name):
            group = (_class(name), int(match["step"]))
            groups.setdefault(group, []).append((int(match["idx"]), name))
    return {group: [name for _, name in sorted(found)] for group, found in groups.items()}


def _class(name: str) -> str:
    """The class of a tensor's layer; of a gradient, the name of its parameter without numbers."""
    if match := _TENSOR.fullmatch(name):
        return match["what"]
    match = _GRAD.fullmatch(name)
    return "parameter " + _NUMBER.sub("", match["name"]) if match else ""


def _line(one: _File, other: _File, troubles: list[tuple[str, str]]) -> list[Cell]:
    name = one[2].removesuffix(".npy")
    try:
        alike, figures = _figures(_member(*one), _member(*other))
    except (DriftlineError, OSError, ValueError) as trouble:
        troubles.append((name, str(trouble)))
        return [name, *[""] * (len(COLUMNS) - 1)]
    if isinstance(alike, str):
        troubles.append((name, alike))
    mean_a, std_a, mean_b, std_b = figures
    line: list[Cell] = [name, "" if isinstance(alike, str) else alike]
    for first, second in ((mean_a, mean_b), (std_a, std_b), (std_a * std_a, std_b * std_b)):
        line += [first, second, first - second]
    return line


def _member(tree: Path, folder: Folder, name: str) -> Member:
    (member,) = describe(folder, name)
    if not member.trouble:
        return member
    # A link, or a file with something the matter: the long way follows the one and names the other.
    path = folder.path / name
    if path.is_symlink() and not path.resolve().is_relative_to(tree.resolve()):
        raise BadInput(f"{path} leads out of {tree}; not followed")
    if not path.is_file():  # a named pipe would block for ever
        raise BadInput(f"{path} is no file")
    (member,) = npy.members(path)
    return member


def _figures(here: Member, there: Member) -> tuple[float | str, tuple[float, float, float, float]]:
    """Cosine (or why there is none), then mean and std of A and of B."""
    for member in (here, there):
        if DTYPES[member.dtype].kind == "complex":
            raise BadInput(f"it holds {member.dtype} numbers, which have no order and no std")
    ours, theirs = here.fetch(), there.fetch()
    count, other = math.prod(here.shape), math.prod(there.shape)
    one, two = DTYPES[here.dtype], DTYPES[there.dtype]
    if here.shape != there.shape:
        why = f"the shapes differ: {list(here.shape)} against {list(there.shape)}"
        first = kernel.pair_moments(ours, one, ours, one, count=count)
        second = kernel.pair_moments(theirs, two, theirs, two, count=other)
        return why, (*_spread(first, ours), *_spread(second, theirs))
    moments = kernel.pair_moments(ours, one, theirs, two, count=count)
    if moments.r_finite == moments.c_finite == count and not needs_definition(moments):
        alike = cosine(moments) if count else math.nan
    else:
        alike = _long_cosine(_numbers(ours), _numbers(theirs))
    if moments.r_finite == moments.c_finite == count > 0:
        return alike, (moments.r_mean, moments.r_std, moments.c_mean, moments.c_std)
    swapped = moments._replace(
        r_finite=moments.c_finite, r_mean=moments.c_mean, r_std=moments.c_std
    )
    return alike, (*_spread(moments, ours), *_spread(swapped, theirs))


def _spread(moments: PairMoments, values: AnyArray) -> tuple[float, float]:
    """Mean and std (ddof 0) of the first side. NaN and Inf count, as they do in numpy."""
    if moments.r_finite == moments.count:
        if not moments.count:
            return math.nan, math.nan
        return moments.r_mean, moments.r_std
    # The kernel leaves non-finite elements out, and takes a format's lowest value for one.
    numbers = _numbers(values)
    with np.errstate(all="ignore"):
        return float(np.mean(numbers)), float(np.std(numbers))


def _numbers(values: AnyArray) -> F64:
    return to_float64(values, DTYPES[values.dtype.name]).astype(np.float64, copy=False)


def _long_cosine(ours: F64, theirs: F64) -> float:
    """For what the kernel's sums do not hold; a NaN or an Inf has no direction."""
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return math.nan
    return defined_cosine(ours, theirs)
