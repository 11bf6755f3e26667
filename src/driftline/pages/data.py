"""A judged table, and whatever else is known, as the document of a page (docs/report-format.md).

Only arranges: nothing is opened, measured or judged here, and nothing is known of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.comparison.table import Table

if TYPE_CHECKING:
    from driftline.diagnosis.finding import Diagnosis

SCHEMA = "driftline.page/1"


def page_data(
    table: Table,
    *,
    diagnosis: Diagnosis | None = None,
    noise: Sequence[Table] = (),
    tree: Sequence[Mapping[str, Any]] = (),
    flow: Mapping[str, Any] | None = None,
    pictures: Mapping[int, Mapping[str, Any]] | None = None,
    decoder: Sequence[Mapping[str, Any]] = (),
    title: str = "",
) -> dict[str, Any]:
    """The document of a page.

    Args:
        table: A judged comparison.
        diagnosis: Where and why, if it was asked.
        noise: Comparisons of trusted runs with the same reference: what is normal.
        tree: Roots of the module tree, as `topology.json` has them.
        flow: Who feeds whom.
        pictures: Row number → pictures of that pair.
        decoder: What validation of a text model gave.
        title: Of the page; made from the sides when empty.
    """
    raise AssertionError("being built")
