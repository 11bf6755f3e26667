"""One row of a comparison table: a pair of tensors, or a tensor without a partner, and its figures.

This file holds values and their JSON form. A `Column` explains what a metric means; `verdict`
decides whether a value is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from driftline.alignment.sites.site_graph import ROOTS
from driftline.runs.records import Moment, Phase, Port, TensorKey

Status: TypeAlias = Literal["pass", "fail", "incomparable", "missing", "extra", "unjudged"]
"""`unjudged` is the status of a measured row before it is judged; a judged table has none."""
Verdict: TypeAlias = Literal["pass", "fail", "incomplete", "incomparable", "unjudged"]
Direction: TypeAlias = Literal["lower", "higher", "zero", "none"]
"""Which values are better; `zero` means nearest to 0, and `none` a description without limits."""
Basis: TypeAlias = Literal["values", "sample", "summary", "digest", "describe", ""]
"""What the measurements of a row were made from; empty if there are none."""
Number: TypeAlias = float | int
JSON: TypeAlias = Any

STATUSES: tuple[Status, ...] = ("fail", "incomparable", "missing", "extra", "pass", "unjudged")
"""Statuses from worst to best, as reports list them."""

LOST = "the values are lost"
"""Start or end of the reason of a row whose values one side should have but lost."""

NOT_RUN = "not run by the backend"
"""Start of the reason of a row whose values exist but were not computed by the backend."""

NO_THRESHOLD = "the thresholds do not speak of it"
"""Start of the reason of a row that was measured but has no threshold."""

FUSION = "fusion"
"""Value of `Row.by` for a tensor without a partner that the other side computes inside a fusion."""

NO_METRICS: Mapping[str, Number] = {}


class Column(NamedTuple):
    """The meaning of one metric, so that the table can be read without the program.

    Attributes:
        name: Key of the metric in every row.
        direction: Which values are better.
        meaning: One line that explains it.
        unit: Its unit; empty for a plain ratio.
    """

    name: str
    direction: Direction
    meaning: str = ""
    unit: str = ""

    def holds(self, value: float, limit: float) -> bool:
        """Return whether a value is within the limit; NaN never is, on either side.

        >>> Column("cosine", "higher").holds(float("nan"), 0.9)
        False
        """
        if self.direction == "lower":
            return value <= limit
        if self.direction == "higher":
            return value >= limit
        if self.direction == "zero":
            return abs(value) <= limit
        return False


Tensors: TypeAlias = tuple[
    TensorKey,
    tuple[str, str, str],
    tuple[int | None, int | None, int | None],
    str,
    str,
]
"""Identity of what a row compares: its key, the candidate's place, and both recipes."""


def tensors_of(row: Row) -> Tensors:
    """Return what a row compares; parts of a fused tensor, and copies on ranks, share one key."""
    place = (row.candidate_site, row.candidate_port, row.candidate_slot)
    moment = (row.candidate_step, row.candidate_visit, row.candidate_rank)
    return row.key, place, moment, row.reference_recipe, row.candidate_recipe


MANY = 1 << 15
"""Number of rows from which they are stored in a file (`comparison/table/row_spool.py`).

A row takes a kilobyte of memory. Judging makes a dozen passes over the rows, which take a seventh
longer from a file.
"""


class Row(NamedTuple):
    """A pair of tensors, or a tensor without a partner, with its measurements and its status.

    Attributes:
        key: Address of the tensor in the reference, or in the candidate for `extra`.
        status: The status: pass, fail, incomparable, missing or extra.
        reason: The reason for the status, in words; may be empty for a pass.
        order: Execution order in the reference. Rows are sorted by rank, process and this.
        candidate_site: The candidate's site if it differs from the reference's, else empty. The
            same holds for `candidate_port` and `candidate_slot`.
        candidate_step: The candidate's step if it differs from the reference's, else None. The same
            holds for `candidate_visit` and `candidate_rank`.
        by: The rule that paired the two tensors; empty for a tensor without a partner. `fusion` if
            the other side computes the tensor inside a fused node; `candidate_site` and the like
            are then the address of that node's result on the other side.
        confidence: Confidence of that rule; 1 if the user paired the tensors or they have the same
            name.
        reference_recipe: The transformations applied to the reference's stored tensors before the
            comparison, in words; empty if there were none.
        candidate_recipe: The same for the candidate.
        class_name: Class of the module, or name of the operator.
        candidate_class: The candidate's class if it differs, else empty.
        reference_dtype: Element type in the reference; empty if it lacks the tensor. The same holds
            for `candidate_dtype`.
        reference_shape: Shape in the reference, after the recipe; None if it lacks the tensor. The
            same holds for `candidate_shape`.
        line: The line of the program that computes the tensor, as `file:number in function`; empty
            if neither side knows it.
        fused: If one kernel of a compiled graph computes several operators on the way to the
            tensor, those operators in words.
        culprit: The first node of a compiled graph on the way to the tensor whose result is wrong
            for its own inputs, whatever the other side computed.
        basis: What the measurements were made from: values, sample, summary, digest or describe;
            empty if there are none.
        estimated: Names of the measurements that are estimates from sketches.
        metrics: Measurements by name. They may be NaN or infinite.
        decided_by: The metric that decided the status; empty if no metric did.
        limit: The limit of that metric.
        limit_from: Where the limit comes from: a dtype, `exact`, `user`, `thresholds`, or the
            evidence about the site; docs/table-format.md lists all.
        severity: The value divided by the limit: above 1 it is outside, and infinite if the status
            does not depend on a size.
    """

    key: TensorKey
    status: Status
    reason: str = ""
    order: int = 0
    candidate_site: str = ""
    candidate_port: str = ""
    candidate_slot: str = ""
    candidate_step: int | None = None
    candidate_visit: int | None = None
    candidate_rank: int | None = None
    by: str = ""
    confidence: float = 1.0
    reference_recipe: str = ""
    candidate_recipe: str = ""
    class_name: str = ""
    candidate_class: str = ""
    reference_dtype: str = ""
    candidate_dtype: str = ""
    reference_shape: tuple[int, ...] | None = None
    candidate_shape: tuple[int, ...] | None = None
    line: str = ""
    fused: str = ""
    culprit: str = ""
    basis: Basis = ""
    estimated: tuple[str, ...] = ()
    metrics: Mapping[str, Number] = NO_METRICS
    decided_by: str = ""
    limit: float | None = None
    limit_from: str = ""
    severity: float = 0.0

    @property
    def site(self) -> str:
        return self.key.site

    @property
    def port(self) -> Port:
        return self.key.port

    @property
    def slot(self) -> str:
        return self.key.slot

    @property
    def step(self) -> int:
        return self.key.step

    @property
    def rank(self) -> int:
        return self.key.rank

    @property
    def visit(self) -> int:
        return self.key.visit

    @property
    def passed(self) -> bool:
        """Whether the status is pass."""
        return self.status == "pass"

    @property
    def failed(self) -> bool:
        """Whether the status is fail."""
        return self.status == "fail"

    @property
    def metric(self) -> str:
        """The metric that decided the status; empty if no metric did."""
        return self.decided_by

    @property
    def value(self) -> Number | None:
        """The value of the metric that decided the status; None if no metric did."""
        return self.metrics.get(self.decided_by)

    @property
    def relative_l2(self) -> Number | None:
        """Norm of the error divided by the norm of the reference; None if it was not measured."""
        return self.metrics.get("relative_l2")

    @property
    def cosine(self) -> Number | None:
        """Cosine of the angle between the two tensors; None if it was not measured."""
        return self.metrics.get("cosine")

    @property
    def max_abs_error(self) -> Number | None:
        """Largest absolute error of an element; None if it was not measured."""
        return self.metrics.get("max_abs_error")

    @property
    def candidate_name(self) -> str:
        """The candidate's place where it differs from the reference's; empty if it does not.

        >>> Row(TensorKey("a", "output", "0"), "pass", candidate_site="b").candidate_name
        'b'
        """
        # Numbers are labelled, because `step 3` and `rank 3` are different places.
        words = [self.candidate_site, self.candidate_port, self.candidate_slot]
        for name in ("step", "visit", "rank"):
            number = getattr(self, f"candidate_{name}")
            words.append("" if number is None else f"{name} {number}")
        return " ".join(filter(None, words))

    @property
    def inside_fusion(self) -> bool:
        """Whether it has no partner because the other side computed it inside a fused node."""
        return self.by == FUSION and self.status in ("missing", "extra")

    @property
    def compared(self) -> bool:
        """Whether both sides exist and could be compared with each other."""
        return self.status in ("pass", "fail", "unjudged")

    def measured(
        self,
        basis: Basis,
        metrics: Mapping[str, Number],
        *,
        estimated: tuple[str, ...] = (),
        status: Status = "unjudged",
        reason: str = "",
    ) -> Row:
        """Return this row with measurements and without a judgement."""
        # This also drops an older judgement. Fields are set by position, as in `judged`.
        judgement = (status, reason, *self[3:23], basis, estimated, metrics)
        return self._make((self[0], *judgement, "", None, "", 0.0))

    def judged(
        self,
        status: Status,
        reason: str = "",
        *,
        decided_by: str = "",
        limit: float | None = None,
        limit_from: str = "",
        severity: float = 0.0,
    ) -> Row:
        """Return this row with another judgement instead of its own."""
        # By position, because `_replace` takes three times as long, for each of 10^5 rows.
        judgement = (decided_by, limit, limit_from, severity)
        return self._make((self[0], status, reason, *self[3:26], *judgement))

    def __repr__(self) -> str:
        """One line; all fields are available as attributes.

        >>> Row(TensorKey("mlp", "output", "0"), "fail", decided_by="cosine", limit=0.99,
        ...     metrics={"cosine": 0.5})
        <Row fail mlp output: cosine 0.5, limit 0.99>
        """
        place = f"{self.key.site or '(model)'} {self.key.port}"
        place += f" {self.key.slot}" if self.key.slot != "0" else ""
        place += f" step {self.key.step}" if self.key.step else ""
        place += f" rank {self.key.rank}" if self.key.rank else ""
        words = self.reason
        if self.value is not None:
            words = f"{self.metric} {self.value:.3g}, limit {self.limit:.3g}"
        return f"<Row {self.status} {place}{': ' if words else ''}{words}>"

    def __str__(self) -> str:
        return f"{self.status:>12}  {self.key}" + (f"  {self.reason}" if self.reason else "")

    def as_json(self) -> dict[str, JSON]:
        """Return the row in the form of docs/table-format.md: fixed fields, then all metrics."""
        shown: dict[str, JSON] = {
            "site": self.key.site,
            "port": self.key.port,
            "slot": self.key.slot,
            "step": self.key.step,
            "rank": self.key.rank,
            "visit": self.key.visit,
            "process": self.key.process,
            "phase": self.key.phase,
            "moment": self.key.moment,
            "order": self.order,
            "status": self.status,
            "reason": self.reason,
            "candidate_site": self.candidate_site,
            "candidate_port": self.candidate_port,
            "candidate_slot": self.candidate_slot,
            "candidate_step": self.candidate_step,
            "candidate_visit": self.candidate_visit,
            "candidate_rank": self.candidate_rank,
            "by": self.by,
            "confidence": self.confidence,
            "reference_recipe": self.reference_recipe,
            "candidate_recipe": self.candidate_recipe,
            "class": self.class_name,
            "candidate_class": self.candidate_class,
            "reference_dtype": self.reference_dtype,
            "candidate_dtype": self.candidate_dtype,
            "reference_shape": _listed(self.reference_shape),
            "candidate_shape": _listed(self.candidate_shape),
            "line": self.line,
            "fused": self.fused,
            "culprit": self.culprit,
            "basis": self.basis,
            "estimated": list(self.estimated),
            "decided_by": self.decided_by,
            "limit": None if self.limit is None else number_to_json(self.limit),
            "limit_from": self.limit_from,
            "severity": number_to_json(self.severity),
        }
        for name, value in self.metrics.items():
            shown[name] = number_to_json(value)
        return shown

    @classmethod
    def from_json(cls, shown: Mapping[str, JSON]) -> Row:
        """The inverse of `as_json`; every key that is not a fixed field is a metric."""
        limit = shown.get("limit")
        return cls(
            key=TensorKey(
                site=str(shown["site"]),
                port=cast(Port, shown["port"]),
                slot=str(shown["slot"]),
                step=int(shown["step"]),
                visit=int(shown["visit"]),
                rank=int(shown["rank"]),
                process=int(shown.get("process", 0)),
                phase=cast(Phase, shown.get("phase", "forward")),
                moment=cast(Moment, shown.get("moment", "after")),
            ),
            status=cast(Status, _one_of(shown["status"], STATUSES, "status")),
            reason=str(shown.get("reason", "")),
            order=int(shown.get("order", 0)),
            candidate_site=str(shown.get("candidate_site", "")),
            candidate_port=str(shown.get("candidate_port", "")),
            candidate_slot=str(shown.get("candidate_slot", "")),
            candidate_step=_whole(shown.get("candidate_step")),
            candidate_visit=_whole(shown.get("candidate_visit")),
            candidate_rank=_whole(shown.get("candidate_rank")),
            by=str(shown.get("by", "")),
            confidence=float(shown.get("confidence", 1.0)),
            reference_recipe=str(shown.get("reference_recipe", "")),
            candidate_recipe=str(shown.get("candidate_recipe", "")),
            class_name=str(shown.get("class", "")),
            candidate_class=str(shown.get("candidate_class", "")),
            reference_dtype=str(shown.get("reference_dtype", "")),
            candidate_dtype=str(shown.get("candidate_dtype", "")),
            reference_shape=_shape(shown.get("reference_shape")),
            candidate_shape=_shape(shown.get("candidate_shape")),
            line=str(shown.get("line", "")),
            fused=str(shown.get("fused", "")),
            culprit=str(shown.get("culprit", "")),
            basis=cast(Basis, shown.get("basis", "")),
            estimated=tuple(shown.get("estimated", ())),
            # Every other key is a metric, so users' own metrics need no declaration.
            metrics={
                name: number_from_json(value)
                for name, value in shown.items()
                if name not in ROW_FIELDS and value is not None
            },
            decided_by=str(shown.get("decided_by", "")),
            limit=None if limit is None else number_from_json(limit),
            limit_from=str(shown.get("limit_from", "")),
            severity=number_from_json(shown.get("severity", 0.0)),
        )


def number_to_json(value: Number) -> Number | str:
    """Return a JSON value; a non-finite number becomes a string, distinct from null and 0.

    >>> number_to_json(float("-inf"))
    '-inf'
    """
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def number_from_json(value: JSON) -> Number:
    """The inverse of `number_to_json`; other values are refused.

    >>> number_from_json("inf")
    inf
    """
    # True is an int in Python, but not a measurement.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is no number")
    return float(value) if isinstance(value, str) else value


def _one_of(value: JSON, allowed: tuple[str, ...], what: str) -> str:
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is none of {', '.join(allowed)}")
    return cast(str, value)


def _listed(shape: tuple[int, ...] | None) -> list[int] | None:
    return None if shape is None else list(shape)


def _whole(shown: JSON) -> int | None:
    return None if shown is None else int(shown)


def _shape(shown: JSON) -> tuple[int, ...] | None:
    return None if shown is None else tuple(int(size) for size in shown)


ROW_FIELDS: tuple[str, ...] = tuple(Row(TensorKey("", "output", ""), "pass").as_json())
"""The fixed fields of a row in their order; no metric may have one of these names."""


def other_inputs_from(rows: Iterable[Row], first: Row) -> int | None:
    """Return the step from which the model gets different inputs because of an earlier fault.

    This happens when text is generated: once a token differs, later steps compute something else.

    Args:
        rows: Rows of a table.
        first: The first failing row.
    """
    steps = {
        row.key.step
        for row in rows
        if row.status == "fail" and row.key.port == "input" and row.key.site in ROOTS
    }
    start = min(steps, default=0)
    return start if start > first.key.step else None
