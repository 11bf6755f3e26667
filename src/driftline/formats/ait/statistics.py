"""`statistics.csv` of an `ait llm` dump: a few numbers per tensor instead of its values.

NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from driftline.formats.dump_run import partial_summary
from driftline.formats.folder import Folder
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import Record, TensorKey

LARGEST = 1 << 26
_NUMBER = re.compile(r"\d+")


class Line(NamedTuple):
    """One tensor of a statistics file."""

    port: Literal["input", "output"]
    slot: str
    dtype: str
    shape: tuple[int, ...]
    summary: Summary
    node_type: str

    def record(self, key: TensorKey, class_name: str) -> Record:
        has_figures = any(not math.isnan(figure) for figure in self.summary[1:6])
        return Record(
            key,
            0,
            self.dtype,
            self.shape,
            class_name=class_name or self.node_type,
            kept="summary" if has_figures else "describe",
            summary=self.summary if has_figures else None,
        )


def read(folder: Folder, name: str) -> tuple[list[Line], list[str]]:
    """The lines that make sense, and a sentence for each that does not."""
    notes: list[str] = []
    try:
        # `utf-8-sig`: spreadsheet programs put a byte order mark in front.
        text = folder.read(name, LARGEST).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text)))
    except (OSError, ValueError, csv.Error) as trouble:
        return [], [f"cannot be read: {reason_of(trouble)}"]
    lines: list[Line] = []
    # Line 1 is the heading, so numbers agree with an editor's.
    for number, row in enumerate(rows, 2):
        try:
            lines.append(_line(row))
        except (KeyError, ValueError, TypeError, AttributeError) as trouble:
            notes.append(f"line {number} makes no sense: {reason_of(trouble)}")
    # A file of another kind has thousands of bad lines; twenty say enough.
    return lines, notes[:20]


def _line(row: Mapping[str, str]) -> Line:
    side = row["InputOutput"].strip().lower()
    if side not in ("input", "output"):
        raise ValueError(f"neither input nor output: {side[:40]!r}")
    dtype = row["DataType"].strip().removeprefix("torch.")
    # Without the width of an element even the size of the tensor would be unknown.
    if dtype not in DTYPES:
        raise ValueError(f"the element type {dtype[:40]!r} is not known")
    shape = tuple(int(size) for size in _NUMBER.findall(row["Shape"]))
    index = row["Index"].strip()
    return Line(
        "input" if side == "input" else "output",
        index if index.isdigit() else "0",
        dtype,
        shape,
        partial_summary(
            math.prod(shape),
            low=_number(row["Min"]),
            high=_number(row["Max"]),
            mean=_number(row["Mean"]),
            l2=_number(row["L2Norm"]),
        ),
        row.get("NodeType", "").strip(),
    )


def _number(text: str) -> float:
    """A number, NaN for what is none: `N/A`, or nothing at all."""
    try:
        return float(text)
    except ValueError:
        return math.nan
