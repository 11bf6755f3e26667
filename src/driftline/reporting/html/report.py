"""Makes the HTML report, one file, from two runs or from an existing comparison.

Decides which steps are needed (alignment, comparison, diagnosis, pictures) and collects their
results. How each step works, and how the page looks, is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from driftline.alignment.align import AlignOptions, align_runs
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.measure.scheduler import Progress
from driftline.comparison.options import CompareOptions, Execution
from driftline.comparison.pipeline import (
    Comparison,
    EvidenceSources,
    Measurer,
    judge_again,
    prepare,
    unjudged,
)
from driftline.comparison.table.files import TABLE_FILE, is_table, open_table
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Side, Table
from driftline.diagnosis.api import NOTHING_GATHERED, GatheredEvidence, gather_evidence
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.evidence.files import Evidence, Replay
from driftline.diagnosis.pipeline import Assembly
from driftline.diagnosis.result import Diagnosis
from driftline.errors import AlreadyThere, BadInput, DriftlineError
from driftline.formats.registry import open_run
from driftline.graphs.open import write_whole
from driftline.graphs.sources.run import site_edges
from driftline.reporting.html.decoder import decoder_folder, layers_of
from driftline.reporting.html.document import PageContents, page_data
from driftline.reporting.html.operators import is_operators, operator_table
from driftline.reporting.html.page import embedded_page
from driftline.runs.run import Run
from driftline.runs.stores.addresses import url_of

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.tolerance.thresholds import Thresholds

PICTURES = 32
"""Pairs that are drawn: the first, the worst, and those around them."""
_MOST_DRAWN = 64 << 20
"""The largest pair, in elements, that is drawn into a file; `driftline view` shows larger ones."""

Source: TypeAlias = "Table | Run | StrPath"


@dataclass(frozen=True, slots=True)
class Page:
    """A page before it is written: its contents, and what they were made from.

    Attributes:
        document: The document that docs/report-format.md describes.
        table: The comparison.
        reference: The reference run, if it could be opened.
        candidate: The candidate run, if it could be opened.
        pairs: Row number → its pair of tensors, if the runs could be opened.
    """

    document: dict[str, Any]
    table: Table
    reference: Run | None = None
    candidate: Run | None = None
    pairs: Mapping[int, Pair] = field(default_factory=dict[int, Pair])


@dataclass(frozen=True, slots=True)
class PageOptions:
    """What a page shows, and the evidence for its diagnosis; see the arguments of `report`."""

    thresholds: Thresholds | StrPath | None = None
    replay: Replay | StrPath | None = None
    noise: Sequence[Evidence] = ()
    repeats: Sequence[Evidence] = ()
    bisect: Mapping[str, Any] | StrPath | None = None
    options: AlignOptions | None = None
    diagnosis: bool = True
    pictures: int = PICTURES
    tokenizer: str = ""
    title: str = ""
    threads: int | None = None
    progress: Progress | None = None

    @property
    def evidence(self) -> EvidenceSources:
        """The paths of evidence other than the two runs."""
        return EvidenceSources(self.replay, self.noise, self.bisect)

    @property
    def compared_by(self) -> CompareOptions:
        """The options for comparing noise runs, and runs without thresholds."""
        return CompareOptions(self.options or AlignOptions(), execution=Execution(self.threads))


def report(
    subject: Source,
    candidate: Run | StrPath | None = None,
    output: StrPath | None = None,
    *,
    thresholds: Thresholds | StrPath | None = None,
    replay: Replay | StrPath | None = None,
    noise: Sequence[Evidence] = (),
    repeats: Sequence[Evidence] = (),
    bisect: Mapping[str, Any] | StrPath | None = None,
    options: AlignOptions | None = None,
    diagnosis: bool = True,
    pictures: int = PICTURES,
    tokenizer: str = "",
    title: str = "",
    force: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Path | str:
    """Write a comparison as one HTML file that needs no network and no other file.

    Args:
        subject: A comparison (a result of `driftline.compare`, or its folder), a folder of
            `driftline metrics`, `layer-metrics` or `validate`; or the reference, if a candidate is
            given.
        candidate: The run to test; it is compared with the reference first.
        output: The file. If not given, the page is returned as text.
        thresholds: Limits of each layer if runs are compared; limits of tokens for a decoder.
        replay: What `driftline replay` wrote, for the diagnosis.
        noise: What `driftline noise` wrote, or trusted runs: the band of normal errors.
        repeats: Other executions of the candidate's own program, for the diagnosis.
        bisect: What `driftline bisect --format json` printed, for the diagnosis.
        options: How the runs are aligned, if names are not enough.
        diagnosis: Whether to look for the place and cause of the drift, if tensors are available.
        pictures: How many pairs get histograms and heat maps; 0 for none.
        tokenizer: For a decoder: folder or id of its tokenizer, to show tokens as text.
        title: Title of the page.
        force: Replace an existing file.
        threads: Worker threads. Default: one per usable core.
        progress: Called with (pairs done, pairs in total).

    Returns:
        The file, or the page's text if no file was named.

    Raises:
        DriftlineError: The report could not be made. Numbers that differ raise nothing.
    """
    place = None if output is None else Path(output)
    # Checked before the work: a comparison may take minutes.
    if place is not None:
        if place.is_dir():
            raise AlreadyThere(f"{place} is a folder", hint="give the name of a file with -o")
        if place.exists() and not force:
            raise AlreadyThere(f"{place} exists", hint="give another -o, or --force")
    wanted = PageOptions(
        thresholds=thresholds,
        replay=replay,
        noise=noise,
        repeats=repeats,
        bisect=bisect,
        options=options,
        diagnosis=diagnosis,
        pictures=pictures,
        tokenizer=tokenizer,
        title=title,
        threads=threads,
        progress=progress,
    )
    page = page_of(subject, candidate, wanted)
    text = embedded_page(page.document)
    if place is None:
        return text
    # A name with a lone surrogate must not prevent the report.
    write_whole(place, text.encode("utf-8", "backslashreplace"))
    return place


def page_of(
    subject: Source,
    candidate: Run | StrPath | None = None,
    wanted: PageOptions | None = None,
    *,
    measurer: Measurer | None = None,
) -> Page:
    """The page of a comparison.

    Args:
        subject: A comparison, a folder, or the reference, as `report` takes it.
        candidate: The run to test.
        wanted: What the page shows, and the evidence.
        measurer: Measures the pairs; the viewer passes a `RowCache` to make the page again.

    Raises:
        DriftlineError: It could not be made.
    """
    wanted = wanted or PageOptions()
    notes: list[str] = []
    compared = _compared(subject, candidate, wanted, measurer, notes)
    table, reference_run, candidate_run = compared.table, compared.reference, compared.candidate
    runs = _diagnosis_runs(compared, wanted)
    diagnosed = None
    # Diagnosis judges by the relative error; tables of other metrics cannot be diagnosed.
    if wanted.diagnosis and table.rows and table.column("relative_l2") is not None:
        diagnosed = _diagnose(compared, runs, notes)
    pairs = _pairs(table, compared.plan) if compared.plan is not None else {}
    drawn: dict[int, Mapping[str, Any]] = {}
    if wanted.pictures and reference_run is not None and candidate_run is not None:
        drawn = _draw_pairs(table, pairs, reference_run, candidate_run, diagnosed, wanted.pictures)
    flow = None
    if reference_run is not None and table.rows:
        # The flow of the step and rank in which the drift starts.
        key = (table.first or table.rows[0]).key
        flow = site_edges(reference_run, key.rank, key.process, key.step)
    contents = PageContents(
        reference=reference_run,
        candidate=candidate_run,
        diagnosis=diagnosed,
        noise=[variant.table for variant in compared.evidence.variants],
        flow=flow,
        pictures=drawn,
        decoder=compared.decoder,
        notes=notes,
        title=wanted.title,
    )
    return Page(page_data(table, contents), table, reference_run, candidate_run, pairs)


class _Compared(NamedTuple):
    """A comparison, and its runs if they could be opened."""

    table: Table
    decoder: list[dict[str, Any]]
    reference: Run | None
    candidate: Run | None
    plan: Plan | None
    evidence: GatheredEvidence


def _compared(
    subject: Source,
    candidate: Run | StrPath | None,
    wanted: PageOptions,
    measurer: Measurer | None,
    notes: list[str],
) -> _Compared:
    """Compare two runs, or open an existing comparison."""
    if candidate is not None:
        if isinstance(subject, Table):
            raise BadInput("a comparison has both sides already", hint="give it alone")
        tolerance = CompareOptions.of(thresholds=wanted.thresholds).tolerance
        judged_by = replace(wanted.compared_by, tolerance=tolerance)
        comparison = prepare(_opened(subject), _opened(candidate), judged_by)
        evidence = gather_evidence(comparison, wanted.evidence)
        table = comparison.judged(measurer, wanted.progress, evidence.evidence)
        return _Compared(
            table,
            layers_of(table),
            comparison.reference,
            comparison.candidate,
            comparison.plan,
            evidence,
        )
    # A comparison made before keeps its rows; only pictures and causes need the runs again.
    table, decoder = _open_comparison(subject, wanted.thresholds, wanted.tokenizer)
    first, second = _runs_of(table, subject)
    if first is not None and second is not None:
        plan = align_runs(first, second, wanted.compared_by.paired_by)
        evidence = NOTHING_GATHERED
        # Further evidence changes what is known of the sites, and so the verdict.
        if wanted.evidence != EvidenceSources():
            comparison = Comparison(first, second, plan, wanted.compared_by)
            evidence = gather_evidence(comparison, wanted.evidence)
            table = comparison.settled(unjudged(table), evidence.evidence)
        return _Compared(table, decoder, first, second, plan, evidence)
    # Evidence without runs would be ignored, and the user would not notice.
    if wanted.noise:
        raise BadInput(
            "noise runs are compared with the reference, which is not there",
            hint="give the two runs: driftline report REF CAND --noise DIR",
        )
    # Operator checks and text models never had two runs, so nothing is missing there.
    if table.rows and not decoder and table.limits.get("kind") is None:
        notes.append(
            "the two runs were not found where the comparison says, or have changed since: "
            "there are no pictures of tensors here, and no cause is named"
        )
    return _Compared(table, decoder, first, second, None, NOTHING_GATHERED)


def _diagnosis_runs(compared: _Compared, wanted: PageOptions) -> Runs | None:
    """Both runs with the evidence about them, for the diagnosis."""
    reference, candidate, plan = compared.reference, compared.candidate, compared.plan
    if plan is not None and reference is not None and candidate is not None:
        repeats = [_opened(repeat) for repeat in wanted.repeats]
        return Runs(reference, candidate, compared.evidence.replay, repeats, plan)
    # Evidence without runs would be ignored, and the user would not notice.
    if wanted.replay is not None or wanted.repeats or wanted.bisect is not None:
        raise BadInput(
            "evidence belongs to two runs, which are not there", hint="give the two runs: REF CAND"
        )
    return None


def _opened(source: Source) -> Run:
    if isinstance(source, Run):
        return source
    if isinstance(source, Table):
        raise BadInput("a comparison is no run", hint="give the two runs, or the comparison alone")
    return open_run(source)


def _open_comparison(
    subject: Source, thresholds: Thresholds | StrPath | None, tokenizer: str
) -> tuple[Table, list[dict[str, Any]]]:
    """An existing comparison, and its parts about a text model."""
    if isinstance(subject, Run):
        raise BadInput("there is only one run", hint="give the candidate, too")
    if isinstance(subject, Table):
        return subject, layers_of(subject)
    if url_of(subject) is not None and not is_table(subject):
        raise BadInput(
            f"{subject} is no comparison", hint="give the candidate, too: driftline report REF CAND"
        )
    path = Path(subject)
    # Operator checks are JSON files too, so they must be recognised before tables.
    if path.is_file() and is_operators(document := _json(path)):
        return operator_table(document, str(path)), []
    if path.is_file() or is_table(path):
        table = open_table(path)
        if thresholds is not None:
            from driftline.comparison.pipeline import check

            table = check(table, thresholds=thresholds)
        return table, layers_of(table)
    return decoder_folder(path, thresholds, tokenizer=tokenizer)


def _json(path: Path) -> Any:
    """The content of a JSON file; None if it is not JSON, which the next reader reports."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _runs_of(table: Table, subject: Source) -> tuple[Run | None, Run | None]:
    """The runs of a comparison, if they are still at their paths and unchanged."""
    home = None if isinstance(subject, Table | Run) else Path(subject)
    sides: list[Run] = []
    for side in (table.reference, table.candidate):
        run = _run_of(side, home)
        if run is None:
            return None, None
        sides.append(run)
    return sides[0], sides[1]


def _run_of(side: Side, home: Path | None) -> Run | None:
    """The run of one side, at its path or next to the comparison; None if it has changed."""
    path = Path(side.path)
    # Results are often moved together with their runs: next to the comparison is tried too.
    nearby = [] if home is None else [home / path, home.parent / path, home.parent / path.name]
    for place in [path, *nearby] if side.path else []:
        if not place.exists():
            continue
        try:
            run = open_run(place)
        except (DriftlineError, OSError):
            continue
        run_id = str(side.about.get("id", ""))
        # Another run at the same path: its pictures would be of other tensors.
        if run_id != str(run.manifest.get("id", "")):
            continue
        # A file has no id: it must not have been written after the comparison.
        if not run_id and home is not None and place.stat().st_mtime > _modified_time(home):
            continue
        return run
    return None


def _modified_time(home: Path) -> float:
    table = home / TABLE_FILE if home.is_dir() else home
    return table.stat().st_mtime


def _diagnose(compared: _Compared, runs: Runs | None, notes: list[str]) -> Diagnosis | None:
    evidence, table = compared.evidence, compared.table
    try:
        # A table from a file, or one of other limits, has no judgement of its sites.
        if table.judgement is None:
            table = judge_again(table)
        diagnosis = Assembly(table, evidence.variants, runs, evidence.proof).diagnosis()
    except DriftlineError as trouble:
        if evidence.proof is not None or evidence.replay is not None:
            raise  # evidence that the user gave must not be dropped in silence
        notes.append(f"no diagnosis: {trouble}")
        return None
    return None if diagnosis.verdict == "incomparable" else diagnosis


def _pairs(table: Table, plan: Plan) -> dict[int, Pair]:
    """Row → its pair; empty if the comparison was made with another plan."""
    pair_of_key = {pair.reference.key: pair for pair in plan.pairs}
    pair_of_row: dict[int, Pair] = {}
    for index, row in enumerate(table.rows):
        pair = pair_of_key.get(row.key)
        if pair is None or not row.compared:
            continue
        # A plan made now may pair otherwise than the one of the stored comparison.
        if pair.candidate.key.site == (row.candidate_site or row.key.site):
            pair_of_row[index] = pair
    return pair_of_row


def _draw_pairs(
    table: Table,
    pairs: Mapping[int, Pair],
    reference: Run,
    candidate: Run,
    diagnosis: Diagnosis | None,
    most: int,
) -> dict[int, Mapping[str, Any]]:
    from driftline.reporting.html.tensors.pictures import pictures_of

    drawn: dict[int, Mapping[str, Any]] = {}
    for index in _worth_drawing(table, pairs, diagnosis):
        # Each picture reads two tensors and makes the file larger.
        if len(drawn) >= most:
            break
        pair = pairs[index]
        try:
            drawn[index] = pictures_of(pair, reference, candidate)
        except (DriftlineError, OSError):
            continue  # its row says what is wrong with it
    return drawn


def _worth_drawing(
    table: Table, pairs: Mapping[int, Pair], diagnosis: Diagnosis | None
) -> list[int]:
    """Rows that may be drawn, the most important first."""
    named = {table.first_site, *(diagnosis.culprits if diagnosis is not None else ())} - {""}
    worst = sorted(pairs, key=lambda index: -_severity(table.rows[index]))
    first = [
        index
        for index in pairs
        if table.rows[index] is table.first or table.rows[index].site in named
    ]
    # The output is what a reader looks for first; inputs follow.
    first.sort(key=lambda index: (table.rows[index].port != "output", index))
    outputs = [index for index in worst if table.rows[index].port not in ("input", "param")]
    return list(dict.fromkeys((*first, *outputs, *worst)))


def _severity(row: Row) -> float:
    # NaN counts as the worst: it would sort anywhere.
    return row.severity if row.severity == row.severity else float("inf")
