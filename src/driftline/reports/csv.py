"""Sheets as CSV: every row, every digit; nan and inf are words, absence is an empty cell."""

from __future__ import annotations

import csv
from typing import TextIO

from driftline.reports.view import Sheet


def write(sheet: Sheet, stream: TextIO) -> None:
    """One line per row under a header."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(sheet.headings)
    for line in sheet.lines:
        writer.writerow(["" if value is None else value for value in line])
