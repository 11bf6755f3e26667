"""A judged table, and whatever else is known, as the document of a page (docs/report-format.md).

Only arranges: nothing is opened, measured or judged here, and nothing is known of HTML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from driftline import __version__
from driftline.comparison.table import Table
from driftline.pages.columns import row_columns
from driftline.pages.depth import DRAWN, depth_lines
from driftline.pages.outline import outline
from driftline.pages.provenance import sides
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.diagnosis.finding import Diagnosis

SCHEMA = "driftline.page/1"
_NO_PICTURES: Mapping[int, Mapping[str, Any]] = {}
_BY = {
    "replay": "a replay of the reference's modules",
    "noise": "trusted runs",
    "growth": "how the error grows in similar layers",
    "weights": "the weights themselves",
}


def page_data(
    table: Table,
    *,
    reference: Run | None = None,
    candidate: Run | None = None,
    diagnosis: Diagnosis | None = None,
    noise: Sequence[Table] = (),
    flow: Mapping[str, Any] | None = None,
    pictures: Mapping[int, Mapping[str, Any]] = _NO_PICTURES,
    decoder: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    title: str = "",
) -> dict[str, Any]:
    """The document of a page.

    Args:
        table: A judged comparison.
        reference: The run behind it, if it is there: says more of itself than the table does.
        candidate: The same of the other side.
        diagnosis: Where and why, if it was asked.
        noise: Comparisons of trusted runs with the same reference: what is normal.
        flow: Who feeds whom, as `flow_of` gives it.
        pictures: Row number → pictures of that pair.
        decoder: What validation of a text model gave.
        notes: What else the reader must know.
        title: Of the page; made from the sides when empty.
    """
    both = sides(table, reference, candidate)
    names = f"{both['reference']['name']} against {both['candidate']['name']}"
    if decoder and decoder[0]["model"]:
        first = decoder[0]
        model = str(first["model"]).rstrip("/").rpartition("/")[2]
        names = f"{model}, {first['reference']} against {first['candidate']}"
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "made": {
            "by": f"driftline {__version__}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "title": title or names,
        "verdict": _verdict(table, diagnosis, notes, decoder),
        "sides": both,
        "metrics": [
            {
                "name": column.name,
                "direction": column.direction,
                "meaning": column.meaning,
                "unit": column.unit,
            }
            for column in table.columns
        ],
        "rows": row_columns(table),
        "tree": outline(
            ((row.site, row.class_name) for row in table.rows),
            _roots(reference, table),
        ),
        "depth": depth_lines(table, diagnosis=diagnosis, noise=noise),
        "flow": flow,
        "pictures": {str(at): {"row": at, **picture} for at, picture in sorted(pictures.items())},
        "decoder": [
            {name: value for name, value in part.items() if name != "about"} for part in decoder
        ],
        "diagnosis": None if diagnosis is None else diagnosis.as_json(),
    }
    return _readable(document)


_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _readable(value: Any) -> Any:
    """The same with marks that turn text around written out: a name must not pose as another."""
    if isinstance(value, str):
        if _REORDERING.search(value) is None:
            return value
        return _REORDERING.sub(lambda mark: f"\\u{ord(mark[0]):04x}", value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_readable(key): _readable(item) for key, item in items}
    if isinstance(value, list):
        return [_readable(item) for item in cast("list[Any]", value)]
    return value


def _verdict(
    table: Table,
    diagnosis: Diagnosis | None,
    notes: Sequence[str],
    decoder: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    first = None
    if table.first is not None:
        first = next((at for at, row in enumerate(table.rows) if row is table.first), None)
        if first is None:
            first = table.rows.index(table.first)
    status, sentence = table.verdict, table.finding
    judged = [part for part in decoder if part["checks"] or part["verdict"] != "unjudged"]
    if judged or (decoder and not table.rows):
        status, sentence = _of_decoder(judged or decoder)
    site = table.first_site or None
    class_name = ""
    if site is not None:
        named = (row for row in table.rows if row.site == site and row.class_name)
        row = next(named, None)
        if row is not None:
            other = row.candidate_class
            class_name = f"{row.class_name} → {other}" if other else row.class_name
    said = table.limits.get("said")
    losses = [
        f"{name} run: {loss}"
        for name, side in (("reference", table.reference), ("candidate", table.candidate))
        for loss in side.losses
    ]
    return {
        "status": status,
        "sentence": sentence,
        "headline": _headline(judged),
        "site": site,
        "row": first,
        "class": class_name,
        "ordered": table.reference.ordered,
        "kind": str(table.limits.get("kind", "runs")),
        "cause": _cause(diagnosis, site),
        "coverage": table.coverage.as_json(),
        "failing": len(table.failing),
        "limits": said if isinstance(said, str) else "",
        "notes": [*table.notes, *losses, *notes],
        "tiles": _tiles(table),
    }


def _tiles(table: Table) -> list[list[str]]:
    """How far apart the models are in the end, where the comparison reaches that far."""
    outputs = [row for row in table.rows if row.port == "output" and row.compared and row.metrics]
    if not outputs or not table.reference.ordered:
        return []
    whole = [row for row in outputs if row.site in ("(root)", "")]
    last = (whole or outputs)[-1]
    metric = last.decided_by or "relative_l2"
    value = last.metrics.get(metric)
    if value is None or metric not in DRAWN:
        return []
    name = "Output of the model" if whole else f"Last output, {last.site}"
    allowed = "" if last.limit is None else f"{last.limit:g} allowed"
    shown = f"{float(value):.3g}"
    if last.limit is not None and shown == f"{last.limit:.3g}":  # 0.04998 keeps 0.05
        shown = f"{float(value):.5g}"
    return [[name, f"{metric} {shown}", allowed]]


def _headline(judged: Sequence[Mapping[str, Any]]) -> str:
    """What a decoder's validation says in a few words; empty for another page."""
    if not judged:
        return ""
    worst = min(judged, key=lambda part: ("fail", "unjudged", "pass").index(str(part["verdict"])))
    checks = cast("list[dict[str, Any]]", worst["checks"])
    failing = max((int(check["failing"]) for check in checks), default=0)
    if worst["verdict"] == "fail":
        return f"{failing:,} of {int(checks[0]['kept']):,} generated tokens differ too much"
    return "The two say the same" if not checks else "The two say the same, or nearly"


def _cause(diagnosis: Diagnosis | None, site: str | None) -> dict[str, Any] | None:
    """What kind of error it is; said only where something is known."""
    if diagnosis is None or not diagnosis.introduced:
        return None
    by = str(diagnosis.evidence.get("by", ""))
    return {
        "kind": diagnosis.cause,
        "sentence": diagnosis.sentences[1] if len(diagnosis.sentences) > 1 else "",
        "where": diagnosis.sentences[0] if diagnosis.sentences else "",
        "share": diagnosis.sentences[2] if len(diagnosis.sentences) > 2 else "",
        "site": diagnosis.first_site,
        "agrees": site is None or diagnosis.first_site == site,
        "confidence": diagnosis.confidence,
        "by": _BY.get(by, by),
    }


def _of_decoder(parts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The verdict of a page that has no table of tensors: the first part that fails speaks."""
    order = ("fail", "unjudged", "pass")
    worst = min(parts, key=lambda part: order.index(str(part["verdict"])))
    return str(worst["verdict"]), str(worst["sentence"])


def _roots(run: Run | None, table: Table) -> list[Mapping[str, Any]]:
    if run is None or not table.rows:
        return []
    key = table.rows[0].key
    topology = run.topology(key.rank, key.process)
    found = topology.get("roots") if topology is not None else None
    return cast("list[Mapping[str, Any]]", found) if isinstance(found, list) else []
