"""What validation of a text model left, as the decoder parts of a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.comparison.table import Table
from driftline.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.tolerance.thresholds import Thresholds


def layers_of(table: Table) -> list[dict[str, Any]]:
    del table
    return []


def decoder_folder(
    path: Path, thresholds: Thresholds | StrPath | None
) -> tuple[Table, list[dict[str, Any]]]:
    raise BadInput(f"{path} is no comparison")
