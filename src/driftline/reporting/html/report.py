"""The door to pages: two runs, or a comparison that was made before, become one HTML file.

Decides what is asked of whom: alignment, comparison, diagnosis, pictures. How any of it is done, or
drawn, is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from driftline.alignment.align import AlignOptions, align_runs
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.measure.scheduler import Progress
from driftline.comparison.options import CompareOptions, Execution
from driftline.comparison.pipeline import Measurer, prepare
from driftline.comparison.table.files import TABLE_FILE, is_table, open_table
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Side, Table
from driftline.diagnosis.api import compare_noise
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.evidence.files import (
    Evidence,
    Replay,
    Substitution,
    open_bisection,
    open_replay,
)
from driftline.diagnosis.evidence.noise import Variant
from driftline.diagnosis.pipeline import Assembly
from driftline.diagnosis.result import Diagnosis
from driftline.errors import AlreadyThere, BadInput, DriftlineError
from driftline.formats.registry import open_run
from driftline.graphs.open import write_whole
from driftline.reporting.html.dataflow import flow_of
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
"""Elements of a pair that is drawn into a file; a larger one is for `driftline view`."""

Source: TypeAlias = "Table | Run | StrPath"


@dataclass(frozen=True, slots=True)
class Page:
    """A page on its way: what is shown, and what it was made from.

    Attributes:
        document: As docs/report-format.md has it.
        table: The comparison.
        reference: The run behind its one side, where it could be opened.
        candidate: The other one.
        pairs: Row number → the pair of tensors it stands for, where the runs are there.
    """

    document: dict[str, Any]
    table: Table
    reference: Run | None = None
    candidate: Run | None = None
    pairs: Mapping[int, Pair] = field(default_factory=dict[int, Pair])


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
    """Write a comparison as one HTML file that opens offline, years later.

    Args:
        subject: A comparison (`driftline.compare` gave it, or its folder), a folder of `driftline
            metrics`, `layer-metrics` or `validate`; or the reference, if a candidate follows.
        candidate: What is in question; compared with the reference first.
        output: The file. Without one the page is returned as text.
        thresholds: Limits of each layer, where runs are compared; limits of tokens, for a decoder.
        replay: What `driftline replay` wrote, for the diagnosis.
        noise: What `driftline noise` wrote, or trusted runs: the band in which errors are normal.
        repeats: Other executions of the candidate's own program, for the diagnosis.
        bisect: What `driftline bisect --format json` printed, for the diagnosis.
        options: How the runs belong together, where names do not say it.
        diagnosis: Whether to say where and why, as far as tensors are there.
        pictures: How many pairs get histograms and heat maps; 0 for none.
        tokenizer: Of a decoder: folder or id of its tokenizer, for the text of tokens.
        title: Of the page.
        force: Replace a file that is there.
        threads: Worker threads; one per usable core when not given.
        progress: Called with (pairs done, pairs in all).

    Returns:
        The file, or the page's text if no file was named.

    Raises:
        DriftlineError: It could not be made. Numbers that differ are no exception.
    """
    place = None if output is None else Path(output)
    if place is not None:
        if place.is_dir():
            raise AlreadyThere(f"{place} is a folder", hint="give the name of a file with -o")
        if place.exists() and not force:
            raise AlreadyThere(f"{place} exists", hint="give another -o, or --force")
    page = page_of(
        subject,
        candidate,
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
    text = embedded_page(page.document)
    if place is None:
        return text
    write_whole(place, text.encode("utf-8", "backslashreplace"))
    return place


def page_of(
    subject: Source,
    candidate: Run | StrPath | None = None,
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
    threads: int | None = None,
    progress: Progress | None = None,
    measurer: Measurer | None = None,
) -> Page:
    """The page of a comparison; arguments as `report` takes them.

    Args:
        measurer: Who measures; a `RowCache`, for whoever makes the page of two runs again.

    Raises:
        DriftlineError: It could not be made.
    """
    notes: list[str] = []
    asked = CompareOptions(options or AlignOptions(), execution=Execution(threads))
    plan: Plan | None = None
    ours: Run | None = None
    theirs: Run | None = None
    decoder: list[dict[str, Any]] = []
    if candidate is not None:
        if isinstance(subject, Table):
            raise BadInput("a comparison has both sides already", hint="give it alone")
        judged_by = replace(asked, tolerance=CompareOptions.of(thresholds=thresholds).tolerance)
        comparison = prepare(_opened(subject), _opened(candidate), judged_by)
        ours, theirs, plan = comparison.reference, comparison.candidate, comparison.plan
        table = comparison.judged(measurer, progress)
        decoder = layers_of(table)
    else:
        table, decoder = _made_before(subject, thresholds, tokenizer)
        ours, theirs = _behind(table, subject)
        if ours is not None and theirs is not None:
            plan = align_runs(ours, theirs, asked.paired_by)
        elif table.rows and not decoder and table.limits.get("kind") is None:
            notes.append(
                "the two runs were not found where the comparison says, or have changed since: "
                "there are no pictures of tensors here, and no cause is named"
            )
    trusted: list[Variant] = []
    if noise:
        if ours is None:
            raise BadInput(
                "noise runs are compared with the reference, which is not there",
                hint="give the two runs: driftline report REF CAND --noise DIR",
            )
        trusted = compare_noise(ours, noise, asked)
    runs = None
    if plan is not None and ours is not None and theirs is not None:
        played = None if replay is None else open_replay(replay)
        runs = Runs(ours, theirs, played, [_opened(each) for each in repeats], plan)
    elif replay is not None or repeats or bisect is not None:
        raise BadInput(
            "evidence belongs to two runs, which are not there", hint="give the two runs: REF CAND"
        )
    proof = None if bisect is None else open_bisection(bisect)
    found = None
    if diagnosis and table.rows and table.column("relative_l2") is not None:
        found = _diagnosed(table, trusted, runs, proof, notes)
    pairs = _pairs(table, plan) if plan is not None else {}
    drawn: dict[int, Mapping[str, Any]] = {}
    if pictures and ours is not None and theirs is not None:
        drawn = _drawn(table, pairs, ours, theirs, found, pictures)
    flow = None
    if ours is not None and table.rows:
        key = (table.first or table.rows[0]).key
        flow = flow_of(ours, key.rank, key.process, key.step)
    contents = PageContents(
        reference=ours,
        candidate=theirs,
        diagnosis=found,
        noise=[variant.table for variant in trusted],
        flow=flow,
        pictures=drawn,
        decoder=decoder,
        notes=notes,
        title=title,
    )
    return Page(page_data(table, contents), table, ours, theirs, pairs)


def _opened(source: Source) -> Run:
    if isinstance(source, Run):
        return source
    if isinstance(source, Table):
        raise BadInput("a comparison is no run", hint="give the two runs, or the comparison alone")
    return open_run(source)


def _made_before(
    subject: Source, thresholds: Thresholds | StrPath | None, tokenizer: str
) -> tuple[Table, list[dict[str, Any]]]:
    """A comparison made before, and its parts about a text model."""
    if isinstance(subject, Run):
        raise BadInput("there is only one run", hint="give the candidate, too")
    if isinstance(subject, Table):
        return subject, layers_of(subject)
    if url_of(subject) is not None and not is_table(subject):
        raise BadInput(
            f"{subject} is no comparison", hint="give the candidate, too: driftline report REF CAND"
        )
    path = Path(subject)
    if path.is_file() and is_operators(told := _json(path)):
        return operator_table(told, str(path)), []
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


def _behind(table: Table, subject: Source) -> tuple[Run | None, Run | None]:
    """The runs a comparison was made of, where they still lie and are still the same."""
    home = None if isinstance(subject, Table | Run) else Path(subject)
    found: list[Run] = []
    for side in (table.reference, table.candidate):
        run = _same_run(side, home)
        if run is None:
            return None, None
        found.append(run)
    return found[0], found[1]


def _same_run(side: Side, home: Path | None) -> Run | None:
    """One side's run, from here or from beside the comparison; None where it is another one now."""
    path = Path(side.path)
    beside = [] if home is None else [home / path, home.parent / path, home.parent / path.name]
    for place in [path, *beside] if side.path else []:
        if not place.exists():
            continue
        try:
            run = open_run(place)
        except (DriftlineError, OSError):
            continue
        told = str(side.about.get("id", ""))
        if told != str(run.manifest.get("id", "")):
            continue
        # A file has no id: it must not have been written after the comparison.
        if not told and home is not None and place.stat().st_mtime > _written(home):
            continue
        return run
    return None


def _written(home: Path) -> float:
    table = home / TABLE_FILE if home.is_dir() else home
    return table.stat().st_mtime


def _diagnosed(
    table: Table,
    trusted: Sequence[Variant],
    runs: Runs | None,
    proof: Substitution | None,
    notes: list[str],
) -> Diagnosis | None:
    try:
        found = Assembly(table, trusted, runs, proof).diagnosis()
    except DriftlineError as trouble:
        if proof is not None or (runs is not None and runs.replay is not None):
            raise  # evidence that the user gave must not be dropped in silence
        notes.append(f"no diagnosis: {trouble}")
        return None
    return None if found.verdict == "incomparable" else found


def _pairs(table: Table, plan: Plan) -> dict[int, Pair]:
    """Row → the pair behind it; none where the comparison was made with another plan."""
    known = {pair.reference.key: pair for pair in plan.pairs}
    found: dict[int, Pair] = {}
    for at, row in enumerate(table.rows):
        pair = known.get(row.key)
        if pair is None or not row.compared:
            continue
        if pair.candidate.key.site == (row.candidate_site or row.key.site):
            found[at] = pair
    return found


def _drawn(
    table: Table,
    pairs: Mapping[int, Pair],
    ours: Run,
    theirs: Run,
    diagnosis: Diagnosis | None,
    most: int,
) -> dict[int, Mapping[str, Any]]:
    from driftline.reporting.html.tensors.pictures import pictures_of

    drawn: dict[int, Mapping[str, Any]] = {}
    for at in _worth_drawing(table, pairs, diagnosis):
        if len(drawn) >= most:
            break
        pair = pairs[at]
        try:
            drawn[at] = pictures_of(pair, ours, theirs)
        except (DriftlineError, OSError):
            continue  # its row says what is wrong with it
    return drawn


def _worth_drawing(
    table: Table, pairs: Mapping[int, Pair], diagnosis: Diagnosis | None
) -> list[int]:
    """Rows in the order in which a reader will want to see them."""
    named = {table.first_site, *(diagnosis.culprits if diagnosis is not None else ())} - {""}
    worst = sorted(pairs, key=lambda at: -_severity(table.rows[at]))
    first = [at for at in pairs if table.rows[at] is table.first or table.rows[at].site in named]
    first.sort(key=lambda at: (table.rows[at].port != "output", at))
    outputs = [at for at in worst if table.rows[at].port not in ("input", "param")]
    return list(dict.fromkeys((*first, *outputs, *worst)))


def _severity(row: Row) -> float:
    return row.severity if row.severity == row.severity else float("inf")
