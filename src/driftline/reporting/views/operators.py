"""Results of an operator check: a view for people, the csv of `ait opcheck`, JSON for programs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from driftline.comparison.tolerance.defaults import allowed
from driftline.errors import BadFile
from driftline.operators.api import OperatorCheck
from driftline.operators.result import METRICS, Coverage, Metric, OutputRow
from driftline.reporting.formatting import counted, shape
from driftline.reporting.view import Block, Grid, Heading, Line, Sentence, Tone, Value, View
from driftline.units import csv_cell

SHOWN = 20
COLUMNS = (
    "op_id",
    "op_name",
    "op_param",
    "tensor_path",
    "out_tensor_id",
    "precision_standard",
    "excuted_information",
    "precision_result(%)",
    "max_rel_error",
)
"""Columns of the original's first version, including its spelling of the seventh."""
_OPTIONAL: dict[Metric, tuple[str, ...]] = {
    "abs": ("abs_precision_result(%)", "max_abs_error"),
    "cos_sim": ("cosine_similarity",),
    "kl": ("kl_divergence",),
}
OWN_COLUMNS = ("status", "reason", "bound", "dtype", "shape", "step", "rank", "site")
"""Additional columns after those of the original."""
_TONES: dict[str, Tone] = {"pass": "good", "fail": "bad", "not checked": "doubtful"}


class Report(NamedTuple):
    """The result of a check of operators.

    Attributes:
        name: The path that was checked, as the user gave it.
        kind: Kind of source.
        rows: One per output, or per call that could not be checked.
        coverage: How much was checked.
        metrics: Further figures that were requested.
        remarks: Sentences of the source.
    """

    name: str
    kind: str
    rows: Sequence[OutputRow]
    coverage: Coverage
    metrics: tuple[Metric, ...] = ()
    remarks: Sequence[str] = ()


def report_of(check: OperatorCheck) -> Report:
    """The report of a result of `operators.check`."""
    return Report(check.name, check.kind, check.rows, check.coverage, check.metrics, check.remarks)


def verdict(report: Report) -> str:
    """The first line: the result as a sentence."""
    cover = report.coverage
    failing = [row for row in report.rows if row.status == "fail"]
    checked = cover.passed + cover.failed
    if failing:
        first = failing[0]
        are = (
            "operator is"
            if checked == 1
            else "operators is"
            if cover.failed == 1
            else "operators are"
        )
        return (
            f"{cover.failed} of {checked} checked {are} not right; "
            f"first {first.call.site} ({first.call.op_type}, output {first.slot})"
        )
    if not checked:
        return f"none of {counted(cover.operators, 'operator')} could be checked"
    return f"{counted(checked, 'operator')} checked, all right"


def view(report: Report, *, everything: bool = False) -> View:
    """The view for people: which operators fail, which were not checked, and why."""
    cover = report.coverage
    tone: Tone = "bad" if cover.failed else "good" if cover.passed else "doubtful"
    blocks: list[Block] = [Sentence(verdict(report), tone)]
    failing = [row for row in report.rows if row.status == "fail"]
    rest = [row for row in report.rows if row.status != "fail" and row.slot]
    if everything:
        blocks.append(_grid(report, report.rows, "Outputs", everything=True))
    # Requested figures are shown even if nothing fails.
    elif report.metrics:
        blocks.append(_grid(report, failing + rest, "Outputs"))
    elif failing:
        blocks.append(_grid(report, failing, "Not right"))
    if cover.unchecked:
        blocks.append(_unchecked_grid(cover, everything))
    if not everything:
        blocks += _remarked(report.rows)
    if used := _bounds(report.rows):
        blocks.append(Sentence(f"bounds: {used}", "quiet"))
    if cover.filtered:
        left_out = counted(cover.filtered, "operator")
        blocks.append(Sentence(f"{left_out} left out by -ids and -opname", "quiet"))
    blocks += [Sentence(text, "quiet") for text in report.remarks]
    return View(tuple(blocks))


def _unchecked_grid(cover: Coverage, everything: bool) -> Grid:
    """The reasons why operators were not checked, with the number of operators of each."""
    lines = [Line((count, reason), "doubtful") for reason, count in cover.reasons]
    shown = lines if everything else lines[:SHOWN]
    title = f"Not checked: {counted(cover.unchecked, 'operator')} of {cover.operators}"
    headings = (Heading("operators"), Heading("reason", stretch=True))
    left = len(lines) - len(shown)
    return Grid(title, headings, tuple(shown), left, "--all shows every reason")


def _remarked(all_rows: Sequence[OutputRow]) -> Iterator[Sentence]:
    """Sentences with the number of outputs that pass with a remark; `--all` shows each."""
    # A remark on a passing output must not get lost.
    noted = [row for row in all_rows if row.status == "pass" and row.figures.reason]
    near = [row for row in noted if (row.figures.share or 0.0) < 100.0]
    plain = [row for row in noted if (row.figures.share or 0.0) >= 100.0]
    for rows, words in (
        (near, "with elements outside the bound, as its share allows (--all)"),
        (plain, "with a remark (--all)"),
    ):
        if rows:
            outputs = "1 output passes" if len(rows) == 1 else f"{len(rows)} outputs pass"
            yield Sentence(f"{outputs} {words}", "quiet")


def _bounds(rows: Sequence[OutputRow]) -> str:
    """The bounds that decided, and the lengths of sums for which a bound was raised."""
    plain: dict[str, str] = {}
    grown: dict[str, set[int]] = {}
    for row in rows:
        # A bound for long sums carries the number of terms in its name.
        name, _, terms = row.figures.bound_name.partition(", K=")
        if not name:
            continue
        plain[name] = allowed(row.dtype, exact=name == "exact").words
        if terms:
            grown.setdefault(name, set()).add(int(terms))
    parts = [plain[name] for name in sorted(plain)]
    for name, lengths in sorted(grown.items()):
        low, high = min(lengths), max(lengths)
        span = str(low) if low == high else f"{low} to {high}"
        parts.append(f"{name} grown for sums of {span} terms")
    return ", ".join(parts)


def _grid(
    report: Report, rows: Sequence[OutputRow], title: str, *, everything: bool = False
) -> Grid:
    mixed = title == "Outputs"
    shown = rows if everything else rows[:SHOWN]
    titles = ["operator", "type", "id", "output", "dtype", "shape", "within %", "needed %"]
    titles += ["max rel", "max abs", "bound"]
    titles += [name for metric in report.metrics for name in _SHORT[metric]]
    titles += ["status"] if mixed else []
    titles.append("reason")
    asked = {name for metric in report.metrics for name in _SHORT[metric]}
    essential = {"operator", "output", "within %", "max rel", "status", "reason"} | asked
    headings = tuple(
        Heading(title, title in essential, title in ("operator", "reason")) for title in titles
    )
    several = len({(row.call.step, row.call.rank) for row in report.rows}) > 1
    lines = tuple(
        Line(tuple(_cells(report, row, several, mixed)), _TONES[row.status]) for row in shown
    )
    return Grid(title, headings, lines, len(rows) - len(shown), "--all shows every output")


_SHORT: dict[Metric, tuple[str, ...]] = {
    "abs": ("abs within %",),
    "cos_sim": ("cosine",),
    "kl": ("kl",),
}


def _cells(report: Report, row: OutputRow, several: bool, mixed: bool) -> list[Value]:
    call, numbers = row.call, row.figures
    where = f"rank{call.rank}/step{call.step}/{call.site}" if several else call.site
    cells: list[Value] = [where, call.op_type, call.ids, row.slot, row.dtype]
    cells += [shape(row.shape) if row.slot else "", _share(numbers.share), _share(numbers.required)]
    cells += [numbers.max_rel_error, numbers.max_abs_error, numbers.bound_name]
    figures: dict[Metric, Value] = {
        "abs": _share(numbers.abs_share),
        "cos_sim": numbers.cos_sim,
        "kl": numbers.kl,
    }
    cells += [figures[metric] for metric in report.metrics]
    cells += [row.status] if mixed else []
    cells.append(numbers.reason)
    return cells


def _share(percent: float | None) -> str | None:
    """The percentage with four decimals, rounded down, so that 100 means all elements."""
    # Rounded down: 99.99999 % is not all elements.
    return None if percent is None else f"{math.floor(percent * 1e4) / 1e4:g}"


def write_csv(report: Report, folder: Path) -> Path:
    """Write `opcheck_result_{time}.csv`: the columns of the original, then ours.

    Raises:
        BadFile: It cannot be written.
    """
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"opcheck_result_{stamp}.csv"
        # Two checks within one second must not overwrite each other.
        for number in range(1, 100):
            if not path.exists():
                break
            path = folder / f"opcheck_result_{stamp}_{number}.csv"
        # `x` refuses an existing file even if another process makes it meanwhile.
        with path.open("x", newline="", encoding="utf-8") as stream:
            print_csv(report, stream)
    except OSError as trouble:
        why = trouble.strerror or str(trouble)
        raise BadFile(f"{folder} cannot hold the result: {why}") from None
    return path


def print_csv(report: Report, stream: TextIO) -> None:
    """Write the csv to a stream."""
    writer = csv.writer(stream)
    optional = [
        name for metric in METRICS if metric in report.metrics for name in _OPTIONAL[metric]
    ]
    writer.writerow((*COLUMNS, *optional, *OWN_COLUMNS))
    writer.writerows(map(csv_cell, _line(row, report.metrics)) for row in report.rows)


def _line(row: OutputRow, metrics: Collection[Metric]) -> list[str]:
    call, figures = row.call, row.figures
    param = json.dumps(dict(call.param), separators=(",", ":"), ensure_ascii=False, default=str)
    standard = ""
    if figures.bound_name:
        exact = figures.bound_name == "exact"
        standard = allowed(row.dtype, exact=exact).standard
    cells = [call.ids, call.op_type, param, row.path or call.path, row.slot, standard]
    cells += [_executed(row), _number(figures.share), _number(figures.max_rel_error)]
    if "abs" in metrics:
        cells += [_number(figures.abs_share), _number(figures.max_abs_error)]
    if "cos_sim" in metrics:
        cells.append(_number(figures.cos_sim))
    if "kl" in metrics:
        cells.append(_number(figures.kl))
    cells += [row.status, figures.reason, figures.bound_name, row.dtype]
    cells += [shape(row.shape) if row.slot else "", str(call.step), str(call.rank), call.site]
    return cells


def _executed(row: OutputRow) -> str:
    """The execution result in the original's words; "addition failed" for unknown operators."""
    if row.figures.share is not None or row.status == "fail":
        return "execution successful"
    return "addition failed" if "no golden" in row.figures.reason else "execution failed"


def _number(value: float | None) -> str:
    # Sixteen decimals, as the original program writes them.
    return "" if value is None else f"{value:.16f}"


def document(report: Report) -> dict[str, Any]:
    """The complete result as JSON values, for programs."""
    cover = report.coverage
    return {
        "format": "driftline-operators/1",
        "source": report.name,
        "kind": report.kind,
        "verdict": verdict(report),
        "coverage": {
            **{name: getattr(cover, name) for name in ("operators", "passed", "failed")},
            "not_checked": cover.unchecked,
            "filtered": cover.filtered,
            "reasons": [{"reason": text, "operators": count} for text, count in cover.reasons],
        },
        "remarks": list(report.remarks),
        "rows": [_entry(row, report.metrics) for row in report.rows],
    }


def _entry(row: OutputRow, metrics: Collection[Metric]) -> dict[str, Any]:
    call, figures = row.call, row.figures
    entry: dict[str, Any] = {
        "site": call.site,
        "op_type": call.op_type,
        "ids": call.ids,
        "step": call.step,
        "rank": call.rank,
        "process": call.process,
        "visit": call.visit,
        "phase": call.phase,
        "param": dict(call.param),
        "path": row.path or call.path,
        "output": row.slot or None,
        "dtype": row.dtype or None,
        "shape": list(row.shape) if row.slot else None,
        "status": row.status,
        "reason": figures.reason,
        "bound": figures.bound,
        "bound_name": figures.bound_name or None,
        "share": figures.share,
        "required": figures.required,
        "max_rel_error": figures.max_rel_error,
        "max_abs_error": figures.max_abs_error,
        "elements": figures.elements,
    }
    if "abs" in metrics:
        entry["abs_share"] = figures.abs_share
    if "cos_sim" in metrics:
        entry["cos_sim"] = figures.cos_sim
    if "kl" in metrics:
        entry["kl"] = figures.kl
    return entry
