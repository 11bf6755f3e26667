"""The view of a diagnosis: a headline, its sentences and facts, then the sites that matter."""

from __future__ import annotations

import math

from driftline.diagnosis.result import STATUSES, Diagnosis, SiteFinding
from driftline.reporting.view import Block, Facts, Grid, Heading, Line, Sentence, Tone, Value, View
from driftline.reporting.views import differences

SHOWN = 12
_TONES: dict[str, Tone] = {
    "introduced": "bad",
    "amplified": "doubtful",
    "inherited": "quiet",
    "masked": "quiet",
    "clean": "plain",
    "unknown": "doubtful",
}
_VERDICTS: dict[str, Tone] = {
    "pass": "good",
    "fail": "bad",
    "incomplete": "doubtful",
    "incomparable": "doubtful",
}


def view(diagnosis: Diagnosis, *, everything: bool = False, most: int = SHOWN) -> View:
    """The view for people: every site with `everything`, otherwise the `most` important ones."""
    headline = _headline(diagnosis)
    blocks: list[Block] = [
        Sentence(f"{diagnosis.verdict}: {headline}", _VERDICTS[diagnosis.verdict])
    ]
    blocks += [Sentence(sentence) for sentence in diagnosis.sentences if sentence != headline]
    blocks += differences.remark(diagnosis.differences, diagnosis.verdict)
    blocks += differences.blocks(diagnosis.differences, everything=everything)
    blocks.append(Facts(tuple(_facts(diagnosis))))
    if diagnosis.sites:
        blocks.append(_grid(diagnosis, everything, most))
    blocks += [Sentence(f"would help: {need}", "quiet") for need in diagnosis.needs]
    return View(tuple(blocks))


def _headline(diagnosis: Diagnosis) -> str:
    # A failure without a faulty site: its sentence is the whole headline.
    if diagnosis.verdict == "fail" and not diagnosis.culprits and diagnosis.sentences:
        return diagnosis.sentences[0]
    if diagnosis.first_site:
        more = len(diagnosis.culprits) - 1
        also = f" (and {more} more)" if more else ""
        starts = f"the drift starts at {_site(diagnosis.first_site)}{also}"
        if pattern := diagnosis.evidence.get("pattern"):
            starts = f"{pattern}; {starts}"
        return f"{starts}, cause: {diagnosis.cause}"
    if diagnosis.verdict == "pass":
        return "no site errs beyond noise"
    if diagnosis.verdict == "incomplete":
        return "what was compared agrees, and is not enough to tell"
    if diagnosis.evidence.get("suspects"):
        return f"{_site(diagnosis.evidence['suspects'][0])} is off, and does not agree with itself"
    return "nothing could be judged"


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    counts = dict.fromkeys(STATUSES, 0)
    for site in diagnosis.sites:
        counts[site.status] += 1
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    facts = [("sites", shown or "none"), ("coverage", str(diagnosis.coverage))]
    facts.append(("confidence", f"{diagnosis.confidence:.2f}"))
    if diagnosis.false_alarm_rate is not None:
        facts.append(("false alarms", f"about {diagnosis.false_alarm_rate:.2g} per clean site"))
    else:
        # A rate needs several noise runs; with none the sentence says what is lacking.
        has_noise_runs = "noise_runs" in diagnosis.evidence
        facts.append(
            (
                "false alarms",
                "no rate can be stated from " + ("this" if has_noise_runs else "two runs alone"),
            )
        )
    runs = diagnosis.evidence.get("noise_runs")
    if runs:
        facts.append(("noise runs", ", ".join(runs["used"]) or "none that could be used"))
    facts += [("note", note) for note in diagnosis.evidence.get("notes", ())]
    jump = diagnosis.evidence.get("jump")
    if jump:
        facts.append(
            (
                "along the depth",
                f"the error jumps from {jump['before']:.2g} to {jump['after']:.2g} at "
                f"'{jump['site']}'",
            )
        )
    return facts


def _grid(diagnosis: Diagnosis, everything: bool, most: int) -> Grid:
    if everything:
        shown = list(diagnosis.sites)
        title = "Every site, in order of execution"
    else:
        guilty = [site for site in diagnosis.sites if site.status == "introduced"]
        rest = [site for site in diagnosis.sites if site.status not in ("introduced", "clean")]
        rest.sort(key=lambda site: site.status == "unknown")  # these may be most of all sites
        clean = [site for site in diagnosis.sites if site.status == "clean"]
        # If all is well, the sites nearest to their limits are worth a look.
        clean.sort(key=lambda site: -site.ratio if math.isfinite(site.ratio) else 0.0)
        shown = (guilty + rest)[:most] if guilty or rest else clean[:5]
        # Chosen by importance, but read in order of execution.
        shown.sort(key=lambda site: site.order)
        title = "Sites" if guilty or rest else "Sites nearest to their limits"
    headings = (
        Heading("site", stretch=True, kept=True),
        Heading("status", kept=True),
        Heading("error"),
        Heading("error in", essential=False),
        Heading("noise"),
        Heading("of limit"),
        Heading("lean", essential=False),
        Heading("z", essential=False),
        Heading("cause", kept=True),
        Heading("class", essential=False),
    )
    lines = tuple(Line(_cells(site), _TONES[site.status]) for site in shown)
    return Grid(title, headings, lines, len(diagnosis.sites) - len(shown), "--all shows every site")


def _cells(site: SiteFinding) -> tuple[Value, ...]:
    name = _site(site.site) + (f" {site.direction}" if site.direction != "forward" else "")
    cause = site.cause or (f"in {site.inside}" if site.inside else site.reason)
    return (
        *(name, site.status, _number(site.error), _number(site.error_in), _number(site.noise)),
        *(_number(site.ratio), _number(site.projection), _number(site.z), cause, site.class_name),
    )


def _number(value: float) -> Value:
    # NaN means not measured here, which a table shows as a dash.
    return None if math.isnan(value) else value


def _site(name: str) -> str:
    return name or "(root)"
