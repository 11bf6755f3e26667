"""The report of a comparison of two trainings, which a table holds, and how it changes the table.

`update_order` makes the report from two runs. `judged_by_training` applies it to a judged table: a
break before the first failing row becomes the finding, failures after the break are inherited from
it, and a training passes only if weights, loss and gradients of a step after an update were
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from driftline.alignment.sites.site_graph import ROOTS
from driftline.comparison.table.covered import spans
from driftline.comparison.table.row import JSON, Row, Tensors, tensors_of
from driftline.comparison.tolerance.defaults import METRIC

if TYPE_CHECKING:
    from driftline.comparison.table.table import Table

Stage: TypeAlias = Literal["input", "weights", "loss", "gradients", "update"]
STAGES: tuple[Stage, ...] = ("input", "weights", "loss", "gradients", "update")
"""The stages of a step in order. The forward pass is between weights and loss."""
_FORWARD = STAGES.index("loss") - 0.5
_BETWEEN_PASSES = STAGES.index("loss") + 0.5
SITES: Mapping[Stage, str] = {
    "input": "(program)",
    "weights": "(program)",
    "loss": "(loss)",
    "gradients": "(gradients)",
    "update": "(optimizer)",
}
_OF_A_PASS = ("input", "output", "grad_input", "grad_output")
_LATER_ROWS = 3.0
"""The relative error of a row may be this many times the divergence of the weights."""
_MOST_STEPS = 4096


class Break(NamedTuple):
    """Where two trainings diverge: the first stage that differs although everything before agrees.

    Attributes:
        step: The step.
        stage: The stage.
        finding: The sentence, with a difference of the programs that explains it if there is one.
        error: Relative error; infinite if only one side has something.
        unmoved: Ranks on which an update left a weight unchanged that it changed on other ranks.
        call: If weights change between two calls of the model in the step, the first call that
            follows from the break, counted from 0; else 0.
    """

    step: int
    stage: Stage
    finding: str
    error: float = math.inf
    unmoved: tuple[int, ...] = ()
    call: int = 0

    @property
    def site(self) -> str:
        """The part of the program to look at."""
        return SITES[self.stage]

    @property
    def position(self) -> tuple[int, float]:
        # A change between two passes depends on the loss of the first one, and comes after it.
        return self.step, _BETWEEN_PASSES if self.call else float(STAGES.index(self.stage))


class TrainingReport(NamedTuple):
    """The result of comparing two trainings.

    Attributes:
        compared: Steps after an update whose weights, loss and gradients were compared.
        lacking: What the runs need for a verdict of pass; empty if enough was compared.
        broken: Where the trainings diverge; None if they agree.
        weights_off: For each step, the divergence of the weights: the error of the way that they
            have moved since step 0, relative to that way.
        thinned: What captures left out to stay within their limits, as sentences.
    """

    compared: tuple[int, ...] = ()
    lacking: str = ""
    broken: Break | None = None
    weights_off: Mapping[int, float] = {}
    thinned: tuple[str, ...] = ()

    def weights_off_in(self, step: int) -> float:
        """The divergence of the weights when they were last compared, up to this step."""
        looked = [earlier for earlier in self.weights_off if earlier <= step]
        return self.weights_off[max(looked)] if looked else 0.0

    def as_json(self) -> dict[str, JSON]:
        broken = self.broken
        return {
            "compared": list(self.compared[:_MOST_STEPS]),
            "lacking": self.lacking,
            "broken": None
            if broken is None
            else {
                "step": broken.step,
                "stage": broken.stage,
                "finding": broken.finding,
                "error": broken.error if math.isfinite(broken.error) else None,
                "unmoved": list(broken.unmoved),
                **({"call": broken.call} if broken.call else {}),
            },
            # A list of pairs, because keys of JSON objects are strings.
            "weights_off": [
                [step, error if math.isfinite(error) else None]
                for step, error in list(self.weights_off.items())[:_MOST_STEPS]
            ],
            "thinned": list(self.thinned),
        }

    @classmethod
    def from_json(cls, shown: Any) -> TrainingReport | None:
        """The inverse of `as_json`; None for tables without it."""
        if not isinstance(shown, dict):
            return None
        facts = cast("dict[str, Any]", shown)
        broken = facts.get("broken")
        about = cast("dict[str, Any]", broken) if isinstance(broken, dict) else {}
        parted = None
        if about.get("stage") in STAGES:
            error = about.get("error")
            parted = Break(
                int(about["step"]),
                cast("Stage", about["stage"]),
                str(about["finding"]),
                math.inf if error is None else float(error),
                tuple(map(int, about.get("unmoved", ()))),
                int(about.get("call", 0)),
            )
        return cls(
            tuple(map(int, facts.get("compared", ()))),
            str(facts.get("lacking", "")),
            parted,
            {
                int(step): math.inf if error is None else float(error)
                for step, error in facts.get("weights_off", ())
            },
            tuple(map(str, facts.get("thinned", ()))),
        )


def judged_by_training(
    judged: Table, judge_again: Callable[[Table], Table], *, explicit: bool
) -> Table:
    """Apply the report of the trainings to a judged table.

    Args:
        judged: The table, judged by its rows alone.
        judge_again: Judges a table again after its rows were changed.
        explicit: Whether the user set limits, which alone judge the rows then.
    """
    report = judged.training
    if report is None:
        return judged
    broken = report.broken
    changed = None if explicit else _gradients_changed(judged, report)
    if changed is not None and (broken is None or changed.position < broken.position):
        broken = changed
        judged = judged.changed(training=report._replace(broken=broken))
    if broken is None:
        return _without_break(judged, report, judge_again, explicit=explicit)
    first = judged.first
    is_first = first is None or not _follows(first, broken)
    if judged.verdict == "fail" and is_first and changed is None:
        return judged
    if explicit and judged.verdict != "fail":
        return judged
    inherited = sorted({row.step for row in judged.rows if _is_inherited(row, broken)})
    finding = broken.finding
    if inherited:
        finding += f"; what fails in {spans(inherited)} is inherited from it"
        place = judged.position(first)
        judged = judged.with_rows(_with_inheritance(judged, broken))
        # The rows have new reasons, so the first row is taken from them again.
        judged = judged.changed(first=None if place is None else judged.rows[place])
    return judged.changed(
        verdict="fail",
        first_site=broken.site,
        finding=finding,
    )


def _without_break(
    judged: Table, report: TrainingReport, judge_again: Callable[[Table], Table], *, explicit: bool
) -> Table:
    """The table of two trainings without a break."""
    if judged.verdict == "fail" and not explicit:
        judged = _with_later_rows_excused(judged, report, judge_again)
    if judged.verdict == "pass" and report.lacking:
        finding = f"{report.lacking}; what was compared agrees ({judged.coverage})"
        return judged.changed(verdict="incomplete", finding=finding)
    if judged.verdict == "pass" and report.compared:
        words = f"{judged.finding}; weights, loss and gradients agree in {spans(report.compared)}"
        return judged.changed(finding=words)
    return judged


def _gradients_changed(judged: Table, report: TrainingReport) -> Break | None:
    """A break in the stage of the gradients, if the first failing row is an optimizer's gradient.

    Then every module has computed the right gradients. If the gradients of several modules are off
    when the optimizer reads them, code between the backward pass and the optimizer has changed them
    (clipping, unscaling, a mean over batches). If those of one module are off, the module is named
    instead.
    """
    first = judged.first
    if judged.verdict != "fail" or first is None or first.key.port != "optimizer_grad":
        return None
    # Steps are compared only if both sides have the same layout of ranks.
    if first.step not in report.weights_off or _is_explained(first, report):
        return None
    wrong: dict[str, set[str]] = {"param_grad": set(), "optimizer_grad": set()}
    for row in judged.rows:
        if row.status == "fail" and row.step == first.step and row.key.port in wrong:
            wrong[row.key.port].add(row.key.site)
    if wrong["param_grad"] or len(wrong["optimizer_grad"]) < 2:
        return None
    size = f"{first.metrics[METRIC]:.2g}" if METRIC in first.metrics else "more than is allowed"
    finding = (
        f"every module computes the same gradients in step {first.step}, and those that the "
        f"optimizer sees differ in {len(wrong['optimizer_grad'])} modules (of "
        f"'{first.key.site}' {first.key.slot} by {size}): look at what the program does with "
        "gradients between the backward pass and the optimizer"
    )
    return Break(first.step, "gradients", finding)


def _position(row: Row) -> tuple[int, float]:
    """When a row was computed: the step, and the place among its stages."""
    port = row.key.port
    if port == "param":
        # A parameter is captured before the step, or after its update.
        if row.key.moment == "after":
            return row.step, len(STAGES) - 0.5
        return row.step, float(STAGES.index("weights"))
    if port in ("grad_input", "grad_output", "param_grad", "optimizer_grad"):
        return row.step, float(STAGES.index("gradients"))
    return row.step, _FORWARD


def _follows(row: Row, broken: Break) -> bool:
    """Whether a row was computed after the trainings had diverged."""
    if broken.call and row.step == broken.step and row.key.port in _OF_A_PASS:
        return row.key.visit >= broken.call
    return _position(row) > broken.position


def _is_inherited(row: Row, broken: Break) -> bool:
    return row.status == "fail" and _follows(row, broken)


def _with_inheritance(judged: Table, broken: Break) -> Iterator[Row]:
    words = f"; inherited: the trainings part in step {broken.step}"
    for row in judged.rows:
        yield row._replace(reason=row.reason + words) if _is_inherited(row, broken) else row


def _with_later_rows_excused(
    judged: Table, report: TrainingReport, judge_again: Callable[[Table], Table]
) -> Table:
    """Excuse rows of later steps whose errors the divergence of the weights explains.

    The weights of two correct trainings diverge, because the rounding errors of one step change the
    weights of the next. That divergence is measured, and a row whose error is not much larger shows
    no fault.
    """
    first = judged.first
    # If a fault comes first, later errors follow from it and are not noise.
    if first is None or not _is_explained(first, report):
        return judged
    excused: dict[Tensors, Row] = {}
    while judged.verdict == "fail":
        # When some failing rows are excused, judging again may fail others.
        more = {
            tensors_of(row): row
            for row in judged.rows
            if row.status == "fail" and _is_explained(row, report)
        }
        if not more.keys() - excused.keys():
            break
        excused |= more
        judged = judge_again(judged.with_rows(_excused_rows(judged, excused, report)))
    return judged


def _excused_rows(
    judged: Table, excused: Mapping[Tensors, Row], report: TrainingReport
) -> Iterator[Row]:
    for row in judged.rows:
        if tensors_of(row) not in excused:
            yield row.judged("unjudged") if row.compared else row
            continue
        reason = (
            f"{METRIC} {float(row.metrics[METRIC]):.3g}: its weights have moved apart by "
            f"{report.weights_off_in(row.step):.2g} of their way since step 0, little by little"
        )
        yield row.judged("incomparable", reason, decided_by=METRIC)


def _is_explained(row: Row, report: TrainingReport) -> bool:
    off = report.weights_off_in(row.step)
    value = row.metrics.get(METRIC)
    return (
        # In later passes of step 0 the weights may have changed already.
        (row.step > 0 or row.key.visit > 0)
        # The inputs of a model are not computed from its weights.
        and not (row.key.port == "input" and row.key.site in ROOTS)
        and isinstance(value, float)
        and row.decided_by == METRIC
        and value <= _LATER_ROWS * off
    )
