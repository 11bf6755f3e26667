"""The view of a thresholds file: every limit, and the measurements it was made from."""

from __future__ import annotations

from driftline.comparison.tolerance.thresholds import Threshold, Thresholds
from driftline.reporting.view import Facts, Grid, Heading, Line, Sentence, Sheet, Value, View

SHOWN = 20
_HEADINGS = ("metric", "layer", "port", "limit", "is", "values", "interval", "pooled")


def view(thresholds: Thresholds, *, everything: bool = False) -> View:
    """The view for people: every limit with `everything`, otherwise the first ones."""
    entries = thresholds.entries if everything else thresholds.entries[:SHOWN]
    facts = [
        (name, str(thresholds.settings[name]))
        for name in ("made_by", "statistic", "margin", "tables", "seed")
        if name in thresholds.settings
    ]
    if thresholds.sources:
        more = len(thresholds.sources) - 1
        facts.append(("sources", thresholds.sources[0] + (f" and {more} more" if more else "")))
    if created := thresholds.provenance.get("created"):
        facts.append(("created", str(created)))
    grid = Grid(
        "Limits",
        tuple(
            Heading(
                title, essential=title in ("metric", "layer", "limit"), stretch=title == "layer"
            )
            for title in _HEADINGS
        ),
        tuple(Line(_cells(entry), "plain" if entry.usable else "bad") for entry in entries),
        len(thresholds.entries) - len(entries),
        "--all shows every limit",
    )
    notes = [Sentence(note, "doubtful") for note in thresholds.notes]
    return View((Sentence(str(thresholds), "strong"), Facts(tuple(facts)), grid, *notes))


def sheet(thresholds: Thresholds) -> Sheet:
    """Every limit, for other programs."""
    return Sheet(
        ("metric", "site", "port", "value", "direction", "statistic", "samples", "low", "high"),
        tuple(
            (
                *(entry.metric, entry.site, entry.port, entry.value, entry.direction),
                *(entry.statistic, entry.samples),
                *(entry.interval or (None, None)),
            )
            for entry in thresholds.entries
        ),
    )


def _cells(entry: Threshold) -> tuple[Value, ...]:
    # Directions of metrics: a cosine must be high, a bias near zero, everything else low.
    sign = {"higher": ">=", "zero": "within +-"}.get(entry.direction, "<=")
    interval = "" if entry.interval is None else "{:.4g} to {:.4g}".format(*entry.interval)
    shapes = f"{len(entry.shapes)} shapes" if len(entry.shapes) != 1 else "1 shape"
    pooled = ", ".join((shapes, *entry.dtypes)) if entry.shapes else ""
    return (
        *(entry.metric, entry.site or "(whole model)", entry.port),
        *(f"{sign} {entry.value:.6g}", entry.statistic),
        *(entry.samples or None, interval, pooled),
    )
