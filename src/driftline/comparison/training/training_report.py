"""What two trainings say of each other, as a value that lies in a table, and what follows from it.

`update_order` fills the report from two runs. `judged_by_training` applies it to a judged table: a
break in an earlier stage than the first failing row is the finding; rows of steps whose weights
differ already are inherited; and a training program passes only where weights, loss and gradients
of a step after an update were compared.
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
"""In the order in which a step happens; the forward pass is between weights and loss."""
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
"""Times so much as weights differ, of the way they have moved, what is computed from them may."""
_MOST_STEPS = 4096


class Break(NamedTuple):
    """Where two trainings part: the first stage of the first step that does not follow.

    Attributes:
        step: The step.
        stage: What differs although everything before it agrees.
        finding: The sentence, with the cause where a difference of the programs explains it.
        error: Relative error; infinite where one side has something that the other has not.
        unmoved: Ranks on which a weight is what it was before the update, that moved on others.
        call: Before which further call of the model in the step; 0 if a stage as a whole differs.
    """

    step: int
    stage: Stage
    finding: str
    error: float = math.inf
    unmoved: tuple[int, ...] = ()
    call: int = 0

    @property
    def site(self) -> str:
        """Whom to look at."""
        return SITES[self.stage]

    @property
    def position(self) -> tuple[int, float]:
        # Weights move between two passes by what the first one gave: its loss and gradients.
        return self.step, _BETWEEN_PASSES if self.call else float(STAGES.index(self.stage))


class TrainingReport(NamedTuple):
    """What two trainings say of each other.

    Attributes:
        compared: Steps after an update of which weights, loss and gradients were compared.
        lacking: What must be added for a pass, in words; empty where enough was compared.
        broken: Where the trainings part; None where they agree.
        weights_off: Step → relative error of the weights it began with, of the way they have moved.
        thinned: What captures left out to keep within limits, in words.
    """

    compared: tuple[int, ...] = ()
    lacking: str = ""
    broken: Break | None = None
    weights_off: Mapping[int, float] = {}
    thinned: tuple[str, ...] = ()

    def weights_off_in(self, step: int) -> float:
        """By how much weights had moved apart when they were last looked at, up to this step."""
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
            # A list of pairs: keys of JSON objects are texts.
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
    """A judged table, with what the order of a training step says of it.

    Args:
        judged: The table as its rows alone make it.
        judge_again: Judges a table whose rows were changed.
        explicit: Whether limits were asked for: they judge the rows, and nothing else does.
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
        judged = judged.with_rows(_told(judged, broken))
        # The first row is one of the rows, with what was added to it.
        judged = judged.changed(first=None if place is None else judged.rows[place])
    return judged.changed(
        verdict="fail",
        first_site=broken.site,
        finding=finding,
    )


def _without_break(
    judged: Table, report: TrainingReport, judge_again: Callable[[Table], Table], *, explicit: bool
) -> Table:
    """A table of trainings that part nowhere by their stages."""
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
    """The gradients as a place, if the first row off is one that the optimizer is given.

    Every module computed its gradients as the reference's did. Where those of several modules are
    off all the same, code between the backward pass and the optimizer changed them (clipping,
    unscaling, a mean over batches), and none of the modules; where it is one module's alone, that
    module is the better place.
    """
    first = judged.first
    if judged.verdict != "fail" or first is None or first.key.port != "optimizer_grad":
        return None
    # Without these the two have other layouts: what ranks hold is added up row by row.
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
    """When in the training a row was computed, on the scale of the stages."""
    port = row.key.port
    if port == "param":
        # Before a step: what the last update left. After it: what this one did.
        if row.key.moment == "after":
            return row.step, len(STAGES) - 0.5
        return row.step, float(STAGES.index("weights"))
    if port in ("grad_input", "grad_output", "param_grad", "optimizer_grad"):
        return row.step, float(STAGES.index("gradients"))
    return row.step, _FORWARD


def _follows(row: Row, broken: Break) -> bool:
    """Whether a row was computed after the trainings had parted."""
    if broken.call and row.step == broken.step and row.key.port in _OF_A_PASS:
        return row.key.visit >= broken.call
    return _position(row) > broken.position


def _is_inherited(row: Row, broken: Break) -> bool:
    return row.status == "fail" and _follows(row, broken)


def _told(judged: Table, broken: Break) -> Iterator[Row]:
    words = f"; inherited: the trainings part in step {broken.step}"
    for row in judged.rows:
        yield row._replace(reason=row.reason + words) if _is_inherited(row, broken) else row


def _with_later_rows_excused(
    judged: Table, report: TrainingReport, judge_again: Callable[[Table], Table]
) -> Table:
    """Rows of later steps whose weights differ by noise: what they are off by came with those.

    Two sound trainings move apart, as rounding errors of one step are the weights of the next. How
    far they have is measured; what is not much further off than that shows no fault.
    """
    first = judged.first
    # A fault of another kind comes first: what follows it is no noise.
    if first is None or not _is_explained(first, report):
        return judged
    excused: dict[Tensors, Row] = {}
    while judged.verdict == "fail":
        # Without some of the rows that fail, others may come to the front.
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
        # In the later passes of step 0 weights have moved already.
        (row.step > 0 or row.key.visit > 0)
        # What a model is given was not computed from its weights.
        and not (row.key.port == "input" and row.key.site in ROOTS)
        and isinstance(value, float)
        and row.decided_by == METRIC
        and value <= _LATER_ROWS * off
    )
