"""The view of model differences: first what is at or upstream of the first divergence."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.comparison.differences.difference import Difference, counted
from driftline.comparison.differences.find import summary
from driftline.reporting.view import Block, Grid, Heading, Line, Sentence, Sheet, Tone, View

SHOWN = 8
"""Most lines in a comparison; `driftline show REF CAND --differences` shows all of them."""
_TONES: dict[str, Tone] = {"at": "bad", "upstream": "doubtful", "elsewhere": "plain", "": "plain"}
_ALL = "driftline show REF CAND --differences shows all"
_WORDS = {"at": "at", "upstream": "upstream", "elsewhere": "elsewhere", "": ""}


def blocks(differences: Sequence[Difference] | None, *, everything: bool = False) -> list[Block]:
    """The blocks about differences of the two models; none if nothing is known.

    Args:
        differences: The most important first; None if a run has no facts about its model.
        everything: Show all of them, not only the first.
    """
    if not differences:
        return []
    number = counted(differences)
    if not number and not everything:
        return []
    telling = [d for d in differences if d.counts or everything]
    near = [d for d in telling if d.position in ("at", "upstream", "")]
    # Differences at other places are shown only if there is room.
    shown = telling if everything else (near or telling)[:SHOWN]
    return [_grid(shown, f"What differs ({number})", len(differences) - len(shown))]


def remark(differences: Sequence[Difference] | None, verdict: str) -> list[Block]:
    """A line for a passing comparison whose models differ nevertheless."""
    if not differences or verdict == "fail" or not counted(differences):
        return []
    return [Sentence(f"and the models differ in {summary(differences)}", "doubtful")]


def view(differences: Sequence[Difference] | None, reference: str, candidate: str) -> View:
    """Everything that differs, as `driftline show REF CAND --differences` prints it."""
    if differences is None:
        text = (
            f"'{reference}' or '{candidate}' holds no facts about its model; dump it again with "
            "this version of Driftline, and without --no-model-facts"
        )
        return View((Sentence(text, "doubtful"),))
    number = counted(differences)
    if not number:
        first = Sentence("No difference between the two models", "good")
    else:
        plural = "s" if number != 1 else ""
        first = Sentence(f"{number} difference{plural} between the two models", "doubtful")
    own = [difference for difference in differences if difference.counts]
    expected = [difference for difference in differences if not difference.counts]
    parts: list[Block] = [first]
    if own:
        parts.append(_grid(own, "What differs"))
    if expected:
        parts.append(_grid(expected, "What also differs, and is no difference of the models"))
    return View(tuple(parts))


def _grid(differences: Sequence[Difference], title: str, left_out: int = 0) -> Grid:
    placed = any(difference.position for difference in differences)
    headings = (
        *((Heading("where", kept=True),) if placed else ()),
        Heading("what", stretch=True, kept=True),
        Heading("reference → candidate", stretch=True, kept=True),
        Heading("class", essential=False),
        Heading("would explain", stretch=True, essential=False),
    )
    lines = [
        Line(
            (
                *((_WORDS[difference.position],) if placed else ()),
                _what(difference),
                difference.change,
                difference.class_name,
                difference.explains,
            ),
            _TONES[difference.position] if difference.counts else "quiet",
        )
        for difference in differences
    ]
    return Grid(title, headings, tuple(lines), left_out, _ALL)


def _what(difference: Difference) -> str:
    more = len(difference.sites) - 1
    return f"{difference.label} (+{more})" if more > 0 else difference.label


def sheet(differences: Sequence[Difference] | None) -> Sheet:
    """All differences as rows, for a spreadsheet."""
    headings = (
        *("kind", "site", "name", "reference", "candidate", "relation", "distance", "count"),
        *("class", "source", "counts", "explains"),
    )
    rows = [
        (
            *(d.kind, d.site, d.name, d.reference, d.candidate, d.relation, d.distance),
            *(max(1, len(d.sites)), d.class_name, d.source, str(d.counts), d.explains),
        )
        for d in differences or ()
    ]
    return Sheet(headings, rows)
