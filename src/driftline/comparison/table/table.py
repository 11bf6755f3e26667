"""The comparison table: one row for each pair, a verdict, and the coverage.

This file only holds values. `measure/` fills the rows, `verdict/` judges them, and `files.py`
writes and reads them. docs/table-format.md is the specification.
"""

from __future__ import annotations

import fnmatch
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

from driftline.alignment.plan import LeftOut
from driftline.comparison.differences.difference import Difference
from driftline.comparison.table.covered import Covered
from driftline.comparison.table.row import (
    JSON,
    STATUSES,
    Column,
    Row,
    Verdict,
    number_to_json,
    other_inputs_from,
)
from driftline.comparison.table.structure import NO_STRUCTURE, Structure
from driftline.comparison.training.training_report import TrainingReport
from driftline.errors import BadFile, BadInput, did_you_mean
from driftline.runs.scope import RunScope

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.table.row_spool import RowSpool
    from driftline.comparison.verdict.site_judgement import SiteJudgement

__all__ = ["SCHEMA", "Column", "Coverage", "Row", "Side", "Table"]

SCHEMA = "driftline.table/1"

_NOTHING: Mapping[str, JSON] = {}


class Coverage(NamedTuple):
    """How much of the two runs was compared with each other, in tensors.

    Attributes:
        compared: Number of pairs that were compared.
        missing: Number of tensors only in the reference.
        extra: Number of tensors only in the candidate.
        incomparable: Number of pairs that could not be compared.
        inside_fusion: Number of missing and extra tensors that the other side computes inside a
            fused node, whose result is compared.
    """

    compared: int = 0
    missing: int = 0
    extra: int = 0
    incomparable: int = 0
    inside_fusion: int = 0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Coverage:
        # Statuses of rows that were not compared.
        counts = {"missing": 0, "extra": 0, "incomparable": 0}
        compared = inside = 0
        for row in rows:
            if row.compared:
                compared += 1
            else:
                counts[row.status] += 1
                inside += row.inside_fusion
        return cls(compared, **counts, inside_fusion=inside)

    @property
    def total(self) -> int:
        return self.compared + self.missing + self.extra + self.incomparable

    @property
    def share(self) -> float:
        """Fraction of all tensors of both runs that were compared; 0 if there are none.

        >>> Coverage(compared=3, missing=1).share
        0.75
        """
        return self.compared / self.total if self.total else 0.0

    def __str__(self) -> str:
        parts = [f"{self.compared} of {self.total} tensors compared"]
        parts += [
            f"{count} {word}"
            for count, word in (
                (self.missing, "missing"),
                (self.extra, "extra"),
                (self.incomparable, "incomparable"),
            )
            if count
        ]
        if self.inside_fusion:
            parts.append(f"{self.inside_fusion} of these inside a fusion that is compared")
        return ", ".join(parts)

    def as_json(self) -> dict[str, int]:
        return {
            "compared": self.compared,
            "missing": self.missing,
            "incomparable": self.incomparable,
            "extra": self.extra,
            "inside_fusion": self.inside_fusion,
        }


class Side(NamedTuple):
    """Where one side of a table came from: enough to find the run again.

    Attributes:
        path: The path as the user gave it; empty for a run that was never on a disk.
        about: The manifest's facts about the run (id, command, versions), redacted there.
        losses: What is missing from the run, as the run itself knows.
        ordered: Whether its order is the order of execution; that of a tensor file is not.
        scope: What the run covers: how its program ended and which steps ran.
        left_out: Rows and tokens of compared tensors that the other side lacks.
        unseen: Its processes of which nothing was compared, such as `rank1`.
        selected: Filters by which only a part of both runs was compared, in words.
        sequence: For a candidate, the sites of its first step in the order of their calls, each
            once. It is only set if tensors have no partner, to show what they are between.
    """

    path: str = ""
    about: Mapping[str, JSON] = _NOTHING
    losses: tuple[str, ...] = ()
    ordered: bool = True
    scope: RunScope = RunScope()
    left_out: tuple[LeftOut, ...] = ()
    unseen: tuple[str, ...] = ()
    selected: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    def as_json(self) -> dict[str, JSON]:
        shown: dict[str, JSON] = {
            "path": self.path,
            "about": dict(self.about),
            "losses": list(self.losses),
            "ordered": self.ordered,
        }
        # Empty fields are left out, so that files equal those of earlier versions.
        if self.scope != RunScope():
            shown["scope"] = self.scope.to_json()
        if self.left_out:
            shown["left_out"] = [[part.words, part.elements] for part in self.left_out]
        if self.unseen:
            shown["unseen"] = list(self.unseen)
        if self.selected:
            shown["selected"] = list(self.selected)
        if self.sequence:
            shown["sequence"] = list(self.sequence)
        return shown

    @classmethod
    def from_json(cls, shown: Mapping[str, JSON]) -> Side:
        return cls(
            str(shown.get("path", "")),
            dict(shown.get("about", {})),
            tuple(shown.get("losses", ())),
            bool(shown.get("ordered", True)),
            RunScope.from_json(shown.get("scope")),
            tuple(
                LeftOut("", str(words), int(elements))
                for words, elements in shown.get("left_out", ())
            ),
            tuple(map(str, shown.get("unseen", ()))),
            tuple(map(str, shown.get("selected", ()))),
            tuple(map(str, shown.get("sequence", ()))),
        )


_NOWHERE = Side()


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """The result of comparing two runs: a row for every pair of tensors, and a verdict.

    Attributes:
        rows: The rows in the reference's order of execution, rank after rank, with extra rows last.
            A tuple, or for a long table a sequence that reads rows from a file when they are used.
        columns: The meaning of each metric in the rows.
        verdict: pass, fail, incomplete or incomparable. incomplete: the compared tensors agree, but
            they are too few for a pass. incomparable: no pair could be compared.
        first: The failing row where the divergence starts; None if no row fails.
        first_site: The site to look at. It is the site of `first`, or the module around it if an
            input is wrong although no captured output before it is; `(loss)`, `(optimizer)` and the
            like for a training; empty if nothing fails.
        finding: The result as a sentence.
        limits: The limits by which the rows were judged.
        reference: Where the reference came from.
        candidate: Where the candidate came from.
        notes: Conclusions of the alignment about the runs as a whole, one sentence each.
        differences: The differences of the two models, the most relevant first; None if a run has
            no facts about its model.
        structure: Facts about the structure of the model, which judging the table again needs.
        evidence: Results of experiments about the sites, which judging the table again needs.
        training: The comparison of two trainings; None if there is none.
        judgement: The judgement of the sites, if they were judged; not written to files.
        covered: Which calls, steps, elements and ranks were compared; None before judging.
    """

    rows: Sequence[Row]
    columns: tuple[Column, ...] = ()
    verdict: Verdict = "unjudged"
    first: Row | None = None
    first_site: str = ""
    finding: str = ""
    limits: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    reference: Side = _NOWHERE
    candidate: Side = _NOWHERE
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] | None = None
    structure: Structure = NO_STRUCTURE
    evidence: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    training: TrainingReport | None = None
    judgement: SiteJudgement | None = field(default=None, compare=False, repr=False)
    covered: Covered | None = None

    def changed(self, **fields: Any) -> Table:
        """Return the same table with other values for some fields."""
        return replace(self, **fields)

    @property
    def coverage(self) -> Coverage:
        """How many tensors of the two runs were compared, and how many not."""
        return self.rows.coverage if is_spooled(self.rows) else Coverage.of(self.rows)

    @property
    def failing(self) -> tuple[Row, ...]:
        """The rows whose status is fail, in order of execution."""
        return tuple(row for row in self.rows if row.status == "fail")

    def worst(self, count: int = 10, *, compared: bool = False) -> list[Row]:
        """The rows to read first: sorted by status, then by severity.

        Rows of steps whose inputs differ because of the first divergence come last.

        Args:
            count: The number of rows.
            compared: Whether to list only pairs that were compared.
        """
        # A heap, because a report shows ten rows of a million.
        rows = (row for row in self.rows if row.compared) if compared else self.rows
        after = None if self.first is None else other_inputs_from(self.rows, self.first)

        def badness(row: Row) -> tuple[bool, int, float]:
            follows = after is not None and row.key.step >= after
            # NaN cannot be ordered; it counts as the largest severity.
            severity = math.inf if math.isnan(row.severity) else row.severity
            return follows, STATUSES.index(row.status), -severity

        return heapq.nsmallest(count, rows, key=badness)

    def only(
        self,
        *,
        sites: Sequence[str] = (),
        ports: Sequence[str] = (),
        steps: Collection[int] = (),
    ) -> Table:
        """The table with only some of its rows. The verdict and the finding do not change.

        Args:
            sites: Globs, such as `model.layers.*.mlp`; all sites if there is none.
            ports: Globs, such as `grad_*`; all ports if there is none.
            steps: Numbers of steps; all steps if there is none.

        Raises:
            BadInput: No row is left, or a glob matches nothing.
        """
        for what, globs in (("site", sites), ("port", ports)):
            names = sorted({str(getattr(row, what)) for row in self.rows}) if globs else []
            for glob in globs:
                if not fnmatch.filter(names, glob):
                    raise BadInput(
                        f"no {what} of this comparison matches '{glob}'",
                        hint=did_you_mean(glob, names),
                    )
        kept = [
            row
            for row in self.rows
            if (not sites or any(fnmatch.fnmatchcase(row.site, glob) for glob in sites))
            and (not ports or any(fnmatch.fnmatchcase(row.port, glob) for glob in ports))
            and (not steps or row.step in steps)
        ]
        if not kept:
            have = sorted({row.step for row in self.rows})
            raise BadInput(
                "no row of this comparison is at such a site, port and step",
                hint=f"it has {'step' if len(have) == 1 else 'steps'} "
                + ", ".join(map(str, have[:8])),
            )
        return self.with_rows(kept)

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """One line: the verdict, where the drift starts, how much was compared."""
        place = f", starts at {self.first_site}" if self.first_site else ""
        return f"<Table {self.verdict}{place}: {self.coverage}>"

    def __str__(self) -> str:
        """The text that `driftline compare` prints, without colours."""
        from driftline.reporting.views.comparison import table_text

        return table_text(self)

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        from driftline.reporting.notebook import table_html

        return table_html(self)

    def with_rows(self, rows: Iterable[Row]) -> Table:
        return self.changed(rows=like_storage(self.rows, rows))

    def as_json(self) -> dict[str, JSON]:
        """Return the table as JSON values; non-finite numbers are "nan", "inf" and "-inf"."""
        return {**self.head_as_json(), "rows": [row.as_json() for row in self.rows]}

    def head_as_json(self) -> dict[str, JSON]:
        """Return the same JSON values without the rows, which come last."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "first_site": self.first_site or None,
            "finding": self.finding,
            "coverage": {
                **self.coverage.as_json(),
                **({} if self.covered is None else self.covered.as_json()),
            },
            "first_row": self.position(self.first),
            "limits": _json_safe(dict(self.limits)),
            "metrics": {
                column.name: {
                    "direction": column.direction,
                    "meaning": column.meaning,
                    "unit": column.unit,
                }
                for column in self.columns
            },
            "reference": _json_safe(self.reference.as_json()),
            "candidate": _json_safe(self.candidate.as_json()),
            "notes": list(self.notes),
            **self._differences_as_json(),
            **({} if self.training is None else {"training": self.training.as_json()}),
        }

    def _differences_as_json(self) -> dict[str, JSON]:
        if self.differences is None:
            return {}
        return {
            "differences": _json_safe([difference.as_json() for difference in self.differences])
        }

    @classmethod
    def from_json(cls, shown: JSON, *, source: str = "table", rows: bool = True) -> Table:
        """The inverse of `as_json`.

        Args:
            shown: The JSON values.
            source: Name of the table in messages.
            rows: Whether the rows are included, and not read separately.

        Raises:
            BadFile: It is not a table, or its schema is unknown to this version.
        """
        if not isinstance(shown, dict) or "schema" not in shown:
            raise BadFile(
                f"{source} is no comparison table",
                hint="`driftline compare REF CAND -o DIR` writes one",
            )
        top = cast(dict[str, JSON], shown)
        if top["schema"] != SCHEMA:
            raise BadFile(
                f"{source} has schema {top['schema']!r}; this version reads {SCHEMA!r}",
                hint="a newer driftline wrote it; upgrade, or compare again",
            )
        try:
            # Statuses and numbers are validated, because the file may have any origin.
            listed = tuple(Row.from_json(row) for row in top["rows"])
            first_row = cast("int | None", top.get("first_row")) if rows else None
            return cls(
                rows=listed,
                columns=tuple(
                    Column(
                        name, about["direction"], about.get("meaning", ""), about.get("unit", "")
                    )
                    for name, about in top["metrics"].items()
                ),
                verdict=cast(Verdict, top["verdict"]),
                first=None if first_row is None else listed[first_row],
                first_site=top.get("first_site") or "",
                finding=str(top.get("finding", "")),
                limits=top.get("limits", {}),
                reference=Side.from_json(top.get("reference", {})),
                candidate=Side.from_json(top.get("candidate", {})),
                notes=tuple(map(str, top.get("notes", ()))),
                differences=_differences(top.get("differences")),
                structure=Structure.from_json(top.get("structure", {})),
                evidence=dict(top.get("evidence", {})),
                training=TrainingReport.from_json(top.get("training")),
                covered=Covered.from_json(top.get("coverage")),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as trouble:
            raise BadFile(
                f"{source} is a damaged comparison table: {type(trouble).__name__}: {trouble}"
            ) from trouble

    def write(self, folder: StrPath, *, force: bool = False) -> Path:
        """Write `table.json` and `rows.csv`, and `rows.parquet` if pyarrow is installed.

        Args:
            folder: The folder to write to.
            force: Replace an existing table.
        """
        from driftline.comparison.table.files import write_table

        return write_table(self, folder, force=force)

    def to_arrow(self) -> Any:
        """Return all rows as a `pyarrow.Table` with the columns of `rows.parquet`.

        Raises:
            NotInstalled: pyarrow is missing.
        """
        from driftline.comparison.table.files import arrow_table

        return arrow_table(self)

    def to_pandas(self) -> Any:
        """Return all rows as a `pandas.DataFrame` with the same columns.

        Raises:
            NotInstalled: pandas is missing.
        """
        from driftline.comparison.table.files import data_frame

        return data_frame(self)

    def position(self, wanted: Row | None) -> int | None:
        """Return the index of a row, or None if the table does not have it."""
        if wanted is None:
            return None
        # Identity is tested first, because comparing two rows by value compares all their metrics.
        return next(
            (index for index, row in enumerate(self.rows) if row is wanted or row == wanted), None
        )


def _differences(shown: JSON) -> tuple[Difference, ...] | None:
    # Tables of earlier versions, and of runs without model facts, have none.
    if not isinstance(shown, list):
        return None
    return tuple(
        Difference.from_json(cast("dict[str, Any]", entry))
        for entry in cast("list[JSON]", shown)
        if isinstance(entry, dict)
    )


def is_spooled(rows: Sequence[Row]) -> TypeGuard[RowSpool]:
    """Whether rows are stored in a file; decided without importing the class that reads them."""
    # Every sequence that is not a tuple or a list is a spool.
    return not isinstance(rows, (tuple, list))


def like_storage(like: Sequence[Row], rows: Iterable[Row]) -> Sequence[Row]:
    """Return rows, stored in the same way as the rows they come from: in memory or in a file."""
    if not is_spooled(like):
        return tuple(rows)
    from driftline.comparison.table.row_spool import keep

    return keep(rows)


def _json_safe(value: JSON) -> JSON:
    """Convert non-finite floats inside limits and provenance to strings."""
    if isinstance(value, dict):
        return {str(k): _json_safe(v) for k, v in cast(dict[object, JSON], value).items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(v) for v in cast(list[JSON], value)]
    if isinstance(value, float):
        return number_to_json(value)
    return value
