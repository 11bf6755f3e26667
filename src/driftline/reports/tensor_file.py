"""A file of named tensors → the grid that lists them: such a file has no modules to show."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.reports.view import Grid, Heading, Line
from driftline.reports.wording import shape
from driftline.runs.record import Record

_SHOWN = 80


def is_file(records: Sequence[Record]) -> bool:
    """Whether these are named tensors and nothing else: one each, of no class."""
    return len({record.key.site for record in records}) == len(records) > 0 and not any(
        record.class_name or record.key.port != "output" for record in records
    )


def file_grid(records: Sequence[Record], everything: bool) -> Grid:
    """Name, type and shape of every tensor."""
    lines = tuple(
        Line((record.key.site, record.dtype, shape(record.shape), record.kept))
        for record in (records if everything else records[:_SHOWN])
    )
    headings = (
        Heading("tensor", stretch=True),
        Heading("dtype"),
        Heading("shape"),
        Heading("kept"),
    )
    left = len(records) - len(lines)
    return Grid("Tensors (--tensors: statistics)", headings, lines, left, "--all shows every one")
