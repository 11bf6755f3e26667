"""What thresholds can be held to: a comparison table, or layer files as one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from driftline.comparison.table.files import TABLE_FILE, is_table, open_table
from driftline.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.table.table import Table
    from driftline.comparison.tolerance.thresholds import Thresholds


def judgeable(path: StrPath, thresholds: Thresholds | None = None) -> Table:
    """The table behind a path.

    Args:
        path: A folder that `compare -o` wrote, or one of layer files.
        thresholds: What it will be held to: says whose files to take, and which statistic.

    Raises:
        BadInput: There is neither.
    """
    place = Path(path)
    if thresholds is not None and is_table(place):
        from driftline.decoding.layer_table import table_of_files

        files = table_of_files(place, thresholds)
        if files is not None:
            return files

    if place.is_dir() and not is_table(place):
        from driftline.decoding.layer_table import layer_table
        from driftline.decoding.metric_files import find_metric_files

        found = find_metric_files(place)
        if any(file.layer for file in found.files):
            return layer_table(found, str(path), thresholds)
        if found.files:
            raise BadInput(
                f"{path} holds scores of tokens, not of layers",
                hint="`driftline validate` applies thresholds to those",
            )
    if place.is_file() and place.name != TABLE_FILE:
        raise BadInput(f"{path} is a file; a comparison is the folder that `compare -o` wrote")
    return open_table(place)
