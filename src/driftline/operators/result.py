"""Results of operator checks: rows for single outputs, and how much of a dump was checked.

Values only: does not know who computes them (`judging`) or who prints them (`reporting`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["pass", "fail", "not checked"]
Metric: TypeAlias = Literal["abs", "cos_sim", "kl"]
METRICS: tuple[Metric, ...] = ("abs", "cos_sim", "kl")

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class OperatorCall(NamedTuple):
    """One execution of one operator: what its rows have in common.

    Attributes:
        site: Place in the model, as the run calls it.
        op_type: `LinearOperation`, or `aten.add.Tensor`.
        ids: Its number in the dump (`24_1`); empty if it has none.
        step: Token, execution or training step.
        rank: Rank or device.
        process: Number of the process within its rank.
        visit: The nth call of the site within the step.
        phase: forward, backward or recompute.
        param: Its parameters, as the dump has them.
        path: Its path below the opened folder; empty if several operators share a file.
    """

    site: str
    op_type: str
    ids: str = ""
    step: int = 0
    rank: int = 0
    process: int = 0
    visit: int = 0
    phase: str = "forward"
    param: Mapping[str, Any] = _NOTHING
    path: str = ""


class Figures(NamedTuple):
    """The comparison of one output with its golden values.

    Attributes:
        status: pass, fail, or not checked.
        reason: Why it does not pass, or a remark about a pass (such as elements outside).
        bound: Largest error an element may have, relative to the golden value (absolute for
            quantised integers; 0 for exact results); of a growing bound, the part that is relative.
        bound_name: Which bound decided: `float16`, `exact`, `float16, K=8192`.
        share: Percent of elements within the bound.
        required: Percent of elements that must be within the bound.
        max_rel_error: Largest |actual - golden| / |golden|; inf where golden is 0 and actual not.
        max_abs_error: Largest |actual - golden|.
        elements: How many elements there are.
        abs_share: Metric abs: percent of elements whose *absolute* error is within the bound.
        cos_sim: Metric cos_sim: cosine of the two tensors.
        kl: Metric kl: Kullback-Leibler divergence of the two tensors read as distributions.
    """

    status: Status
    reason: str = ""
    bound: float | None = None
    bound_name: str = ""
    share: float | None = None
    required: float | None = None
    max_rel_error: float | None = None
    max_abs_error: float | None = None
    elements: int = 0
    abs_share: float | None = None
    cos_sim: float | None = None
    kl: float | None = None


class OutputRow(NamedTuple):
    """One output of one operator call.

    Attributes:
        call: The operator.
        slot: Which output; empty if the call as a whole could not be checked.
        dtype: Element type of the output.
        shape: Its shape.
        figures: The result.
        path: The file of the output below the opened folder; empty if several outputs share it.
    """

    call: OperatorCall
    slot: str
    dtype: str
    shape: tuple[int, ...]
    figures: Figures
    path: str = ""

    @property
    def status(self) -> Status:
        return self.figures.status


def unchecked(call: OperatorCall, reason: str) -> OutputRow:
    """The row of a call that could not be checked, with the reason."""
    return OutputRow(call, "", "", (), Figures("not checked", reason))


class Coverage(NamedTuple):
    """How many operators were checked, how many not, and why.

    Attributes:
        operators: All calls.
        passed: Calls whose outputs all pass.
        failed: Calls with a failing output.
        unchecked: Calls without a failing output, if some or all of their outputs could not be
            checked.
        reasons: For each reason, how many calls; the most frequent first.
        filtered: Calls that the user's filters left out; not among `operators`.
    """

    operators: int
    passed: int
    failed: int
    unchecked: int
    reasons: tuple[tuple[str, int], ...]
    filtered: int = 0


def coverage(calls: Iterable[Iterable[OutputRow]], filtered: int = 0) -> Coverage:
    """Count calls by the worst status of their rows."""
    counts: Counter[Status] = Counter()
    reasons: Counter[str] = Counter()
    for rows in calls:
        call_rows = list(rows)
        states = {row.status for row in call_rows}
        # One failing output makes the call fail, one unchecked output makes it unchecked.
        if "fail" in states:
            counts["fail"] += 1
        elif "not checked" in states or not call_rows:
            counts["not checked"] += 1
        else:
            counts["pass"] += 1
        # Reasons are counted once per call, or a call with many outputs would dominate the list.
        reasons.update({r.figures.reason for r in call_rows if r.status == "not checked"})
    return Coverage(
        sum(counts.values()),
        counts["pass"],
        counts["fail"],
        counts["not checked"],
        tuple(reasons.most_common()),
        filtered,
    )
