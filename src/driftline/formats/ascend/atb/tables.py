"""The tables of an ATB dump: operations, kernels, statistics, and times on the host.

Functions convert text to rows and tolerate the known faults of the programs that wrote it: an
invalid row is left out, and a parameter with a `|` inside is put together again. This file does not
know folders.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from driftline.formats.ascend.atb.folders import shown
from driftline.formats.ascend.types import type_named
from driftline.formats.dump_run import DumpTable

# Number of columns of the operation and kernel csv, and the column with the parameters as JSON.
_COLUMNS = 21
_PARAM = 3
_NAME = re.compile(r"(.+?)((?:_\d{1,9})+)")
_FOLDER = re.compile(r"/(\d{1,9})_[^/]+")
_PROCESS = re.compile(r"/-?\d+_\d+/\d+(?=/)")
_SIZE = re.compile(r"\d{1,18}")
_LINE = re.compile(r"\[([A-Za-z0-9_]+)\]:(.*)")
_BLOCK = re.compile(r"([A-Za-z0-9_]+):\s*")
_PART = re.compile(r"\[(execute|setup)\]\s*:?\s*(.*)")


class Described(NamedTuple):
    """A tensor as a csv file describes it."""

    dtype: str
    layout: str
    shape: tuple[int, ...]


class OperationLine(NamedTuple):
    """One line of an operation or kernel csv.

    Attributes:
        execution: Number of the execution, from the file's name.
        name: Name in the line: `LinearOperation_1_1`; a kernel's name has no ids.
        kind: The type alone.
        ids: Operation id, which identifies the folder. For a kernel, the id of its operation.
        param: Parameters; empty if they are not JSON, as for kernels.
        inputs: Input tensors.
        outputs: Output tensors.
        files: Paths as written. Do not use them: they name folders of another machine, and often
            the wrong moment.
        rank: Rank of the process whose folder contains the file.
        process: Number of that process.
        damaged: Whether the parameters are no JSON object.
    """

    execution: int
    name: str
    kind: str
    ids: str
    param: Mapping[str, Any]
    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    files: tuple[str, ...]
    rank: int = 0
    process: int = 0
    damaged: bool = False


def read_operations(text: str, execution: int) -> list[OperationLine]:
    """Lines of `operation_tensors_{n}.csv` or `kernel_tensors_{n}.csv`."""
    operations: list[OperationLine] = []
    for line in text.split("\n"):
        cells = line.rstrip("\r").split("|")
        # The writer does not quote: a `|` inside the parameters makes extra cells, which are joined
        # again.
        surplus = len(cells) - _COLUMNS
        if surplus < 0 or cells[0] == "CaseNum":
            continue
        cells[_PARAM : _PARAM + surplus + 1] = ["|".join(cells[_PARAM : _PARAM + surplus + 1])]
        name = cells[2]
        files = tuple(filter(None, (*cells[14].split(";"), *cells[15].split(";"))))
        match = _NAME.fullmatch(name)
        # Kernels have no id in their name, but the folders of their files have it.
        kind, ids = (match[1], match[2][1:]) if match else (name, _ids_of_path(files))
        operations.append(
            OperationLine(
                execution,
                name,
                kind,
                ids,
                _object(cells[_PARAM]),
                _described(cells[5:8]),
                _described(cells[9:12]),
                files,
                damaged=_is_damaged(cells[_PARAM]),
            )
        )
    return operations


def _ids_of_path(files: Sequence[str]) -> str:
    """Operation id from the folders of a path, which is all that a kernel's line has."""
    for path in files:
        if match := _PROCESS.search(path):
            return "_".join(_FOLDER.findall(path, match.end()))
    return ""


def _described(cells: Sequence[str]) -> tuple[Described, ...]:
    # A single scalar has a type and no sizes: its last cell is empty.
    columns = [cell.split(";") if cells[0].strip() else [] for cell in cells]
    tensors: list[Described] = []
    for dtype, layout, sizes in zip(*columns, strict=False):
        kind = type_named(dtype)
        shape = tuple(int(size) for size in sizes.split(",") if _SIZE.fullmatch(size.strip()))
        name = layout.strip().lower().removeprefix("acl_format_")
        tensors.append(Described(kind.dtype or kind.name if kind else dtype.strip(), name, shape))
    return tuple(tensors)


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _is_damaged(text: str) -> bool:
    """Whether text of parameters is not a JSON object; true for a kernel's printed struct."""
    return bool(text.strip()) and not _object(text) and text.strip() != "{}"


class StatisticLine(NamedTuple):
    """One line of `statistic.csv`: a tensor, whether or not its values were saved.

    Attributes:
        folders: Names of the operation's folders, from the outermost inwards.
        output: Whether it is an output rather than an input.
        slot: Number of the tensor.
        dtype: Type as written in the file.
        shape: Sizes as stored; None if they cannot be read.
        statistics: max, min, mean and l2norm as written; empty if there are none.
        saved: Whether the path says that the values were saved.
    """

    folders: tuple[str, ...]
    output: bool
    slot: str
    dtype: str
    shape: tuple[int, ...] | None
    statistics: tuple[tuple[str, str], ...]
    saved: bool


def read_statistics(text: str) -> Iterator[StatisticLine]:
    """Lines of `statistic.csv`."""
    try:
        for row in csv.DictReader(text.splitlines()):
            folders = tuple((row.get("Op Name") or "").split("/"))
            slot = (row.get("Index") or "").strip()
            side = (row.get("Input/Output") or "").strip().lower()
            # Names become folders of the run; an empty name or an invalid index means a damaged
            # line.
            if not all(folders) or not _SIZE.fullmatch(slot) or side[:2] not in ("in", "ou"):
                continue
            sizes = (row.get("Shape") or "").strip()
            # `2x3`, or nothing for a scalar. A shape that cannot be read is not guessed.
            readable = re.fullmatch(r"(\d{1,18}(x\d{1,18})*)?", sizes) is not None
            figures = [
                (name, (row.get(column) or "N/A").strip())
                for name, column in (
                    ("max", "Max"),
                    ("min", "Min"),
                    ("mean", "Mean"),
                    ("l2norm", "Norm"),
                )
            ]
            yield StatisticLine(
                folders,
                side.startswith("ou"),
                str(int(slot)),
                (row.get("Dtype") or "").strip(),
                tuple(int(size) for size in sizes.split("x") if size) if readable else None,
                tuple(figures) if any(text != "N/A" for _, text in figures) else (),
                (row.get("Tensor Path") or "N/A").strip() != "N/A",
            )
    # The lines before the damage have been yielded already.
    except csv.Error:
        return


def profiles_in(files: Sequence[str]) -> list[str]:
    """Files of times; if a text and a table have the same content, only the text."""
    # Later probes write both; showing a table twice would double every time.
    texts = {path.removesuffix(".txt") for path in files if path.endswith(".txt")}
    return [p for p in files if p.endswith(".txt") or p.removesuffix(".csv") not in texts]


def read_profile(text: str, title: str) -> DumpTable:
    """Times on the host, in µs, from raw text, text in blocks, or csv."""
    rows: dict[str, dict[str, str]] = {}
    if text.lstrip().startswith("opname"):
        with contextlib.suppress(csv.Error):  # the lines before the damage are shown
            for row in csv.DictReader(text.splitlines()):
                name = row.pop("opname", None)
                if name:
                    figures = ((k, v or "") for k, v in row.items() if isinstance(k, str))
                    rows[shown(name)] = {shown(key): shown(value) for key, value in figures}
    else:
        current = ""
        for line in text.split("\n"):
            if match := _LINE.fullmatch(line.rstrip()):
                figures = _figures(match[2])
                # The raw text does not name the part; only execution has kernel times.
                part = "execute" if "kernelExecuteTime" in figures else "setup"
                _set(rows, match[1], part, figures)
            elif match := _PART.fullmatch(line.strip()):
                _set(rows, current, match[1], _figures(match[2]))
            elif match := _BLOCK.fullmatch(line):
                current = match[1]
    headings = sorted({name for row in rows.values() for name in row})
    return DumpTable(
        title,
        ("operation", *headings),
        [(name, *(_number(row.get(h, "")) for h in headings)) for name, row in rows.items()],
    )


def _set(rows: dict[str, dict[str, str]], name: str, part: str, figures: dict[str, str]) -> None:
    """Set the figures of a part; the last line of each kind counts."""
    if not name:
        return
    kept = {key: value for key, value in rows.get(name, {}).items() if not key.startswith(part)}
    rows[name] = kept | {f"{part}_{key}": value for key, value in figures.items()}


def _figures(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(","))
    return {
        shown(name.strip()): shown(value.strip())
        for name, sign, value in pairs
        if sign and name.strip()
    }


def _number(text: str) -> float | int | str | None:
    if not text:
        return None
    try:
        # Integers stay integers, so that a count does not print as 3.0.
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else float(text)
    except ValueError:
        return text
