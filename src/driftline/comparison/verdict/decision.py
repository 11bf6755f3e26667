"""The verdict of a table, decided by the first of an ordered list of reasons that applies.

    incomparable: nothing was compared
    fail: something is wrong
    incomparable: only inputs were compared
    incomplete: what was compared agrees, but too little was compared for a pass
    pass: none of these

This file reads counts, coverage and the divergence. It reads no run, and no metrics of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from driftline.comparison.table.covered import Covered, spans
from driftline.comparison.table.row import Verdict
from driftline.comparison.table.table import Coverage, Side
from driftline.comparison.tolerance.tolerance import Tolerance
from driftline.comparison.verdict.divergence import Divergence
from driftline.comparison.verdict.growth import FAULT
from driftline.comparison.verdict.site_judgement import SiteJudgement
from driftline.comparison.verdict.verdict import RowCounts
from driftline.errors import EXIT_COULD_NOT, EXIT_DIFFERENT, EXIT_FINE

EXIT_CODES: dict[Verdict, int] = {
    "pass": EXIT_FINE,
    "fail": EXIT_DIFFERENT,
    "incomplete": EXIT_COULD_NOT,
    "incomparable": EXIT_COULD_NOT,
    "unjudged": EXIT_COULD_NOT,
}


LEAST_COVERED = 0.9
"""Fraction of the deciding side's leaf calls that must be covered for a pass."""
_NO_SIDES = (Side(), Side())


class Facts(NamedTuple):
    """The facts that decide the verdict.

    Attributes:
        counts: Counts of the judged rows.
        coverage: How many tensors were compared.
        divergence: Where the drift starts, with a sentence that says so or says that nothing
            drifts.
        tolerance: The limits in use.
        judgement: Judgement of the sites; None if sites were not judged.
        covered: Which calls, steps, elements and ranks were compared.
        sides: Origin and scope of the reference's and the candidate's run.
    """

    counts: RowCounts
    coverage: Coverage
    divergence: Divergence
    tolerance: Tolerance
    judgement: SiteJudgement | None = None
    covered: Covered = Covered()
    sides: tuple[Side, Side] = _NO_SIDES


class Decision(NamedTuple):
    """A verdict and the sentence that explains it."""

    verdict: Verdict
    finding: str


Reason: TypeAlias = Callable[[Facts], "Decision | None"]


def decide(facts: Facts) -> Decision:
    """Return the verdict of a table."""
    for reason in REASONS:
        if (decision := reason(facts)) is not None:
            return decision
    return Decision("pass", f"{facts.divergence.finding}{_narrowed(facts)}{_endings(facts)}")


def _nothing_compared(facts: Facts) -> Decision | None:
    # Inputs of different shapes are a difference even if nothing computed from them was compared.
    nothing = not facts.coverage.compared or not facts.covered.elements
    if not nothing or facts.divergence.first is not None:
        return None
    if facts.coverage.compared:
        return Decision(
            "incomparable",
            f"nothing was compared: no tensor that both sides have holds an element "
            f"({facts.coverage})",
        )
    finding = f"nothing could be compared: {facts.coverage}"
    if why := facts.counts.incomparable:
        finding += f"; '{why.key.site}' {why.key.port}, for one: {why.reason}"
    return Decision("incomparable", finding)


def _row_fails(facts: Facts) -> Decision | None:
    if facts.divergence.first is None:
        return None
    return Decision("fail", facts.divergence.finding)


def _output_is_off(facts: Facts) -> Decision | None:
    """The final output exceeds the measured noise, but no site is found to introduce the error."""
    judgement = facts.judgement
    if judgement is None or not judgement.unlocated:
        return None
    return Decision("fail", judgement.unlocated)


def _only_inputs(facts: Facts) -> Decision | None:
    # Equal inputs say nothing about the values computed from them.
    if not facts.counts.only_inputs:
        return None
    return Decision(
        "incomparable",
        f"only inputs could be compared, and no output of the reference: {facts.coverage}",
    )


def _incomplete(facts: Facts) -> Decision | None:
    """What was compared agrees; list all reasons why that is not enough, most serious first."""
    reasons = [words for shortfall in SHORTFALLS for words in shortfall(facts)]
    if not reasons:
        return None
    agrees = f"what was compared agrees ({facts.coverage})"
    return Decision("incomplete", "; ".join([*reasons, agrees]) + _narrowed(facts))


def _unread(facts: Facts) -> Iterator[str]:
    counts = facts.counts
    if (unread := counts.first_unread) is None:
        return
    single = counts.unread == 1
    yield (
        f"{counts.unread} tensor{'' if single else 's'} could not be read, '{unread.key.site}' "
        f"{unread.key.port}{'' if single else ' for one'} ({unread.reason})"
    )


def _not_run(facts: Facts) -> Iterator[str]:
    """Values exist, but the backend under test did not compute them."""
    counts = facts.counts
    if (row := counts.first_not_run) is None:
        return
    single = counts.not_run == 1
    yield (
        f"{counts.not_run} tensor{'' if single else 's'} did not come from the backend, "
        f"'{row.key.site}' {row.key.port}{'' if single else ' for one'} ({row.reason})"
    )


def _unfinished(facts: Facts) -> Iterator[str]:
    """A program left a step unfinished, or ended with an error and has less than the other one."""
    covered, (_, missing, extra, *_) = facts.covered, facts.coverage
    lacking = (covered.extra_steps, covered.missing_steps)
    for name, side, steps in zip(("reference", "candidate"), facts.sides, lacking, strict=True):
        scope = side.scope
        if scope.unfinished:
            ending = f" and {scope.ending}" if scope.ending else ""
            yield f"the {name}'s program left {scope.unfinished[0]} unfinished{ending}"
        # A run may be compared while it is written, unless a tensor is still missing.
        elif (missing if name == "candidate" else extra) if scope.growing else scope.unsealed:
            yield f"the {name}'s program {scope.ending}"
        elif scope.ending and steps:
            yield f"the {name}'s program {scope.ending}, before {spans(steps)}"


def _borders(facts: Facts) -> Iterator[str]:
    for words in facts.covered.borders:
        yield f"the model's {words} are in both runs and could not be compared"


def _below_min_coverage(facts: Facts) -> Iterator[str]:
    coverage, wanted = facts.coverage, facts.tolerance.min_coverage
    if wanted is not None and not coverage.share >= wanted:
        yield f"only {coverage.share:.1%} of the tensors were compared, {wanted:.1%} are asked for"


def _too_few_calls(facts: Facts) -> Iterator[str]:
    leaves = facts.covered.leaves
    # A user who asks for a minimum coverage has decided how much is enough.
    if facts.tolerance.min_coverage is not None or leaves.share >= LEAST_COVERED:
        return
    words = (
        f"only {leaves.share:.1%} of the {leaves.calls} calls of leaf modules of the "
        f"{leaves.side} are covered, {LEAST_COVERED:.0%} are needed"
    )
    if facts.covered.unseen:
        words += f"; of '{facts.covered.unseen}' only inputs and outputs are known"
    noted = {
        f"the {name}'s dump notes": side.scope.notes[0]
        for name, side in zip(("reference", "candidate"), facts.sides, strict=True)
        if side.scope.notes
    }
    if len(noted) == 2 and len({*noted.values()}) == 1:
        noted = {"both dumps note": next(iter(noted.values()))}
    yield "; ".join([words, *(f"{who}: {note}" for who, note in noted.items())])


def _left_out(facts: Facts) -> Iterator[str]:
    if facts.covered.left_out:
        yield f"not compared: {', '.join(facts.covered.left_out)}"


def _ranks(facts: Facts) -> Iterator[str]:
    for words in facts.covered.unseen_ranks:
        yield f"nothing of {words} was compared"


def _steps(facts: Facts) -> Iterator[str]:
    """One side captured steps that the other side did not reach."""
    covered = facts.covered
    lone = (covered.missing_steps, covered.extra_steps)
    for name, other, steps in zip(
        ("reference", "candidate"), reversed(facts.sides), lone, strict=True
    ):
        # If the other side ran past a step, its own step selection left the step out.
        beyond = [step for step in steps if step >= other.scope.steps_ran]
        if beyond and other.scope.captured and other.scope.steps_ran and not other.scope.ending:
            yield f"{spans(beyond)} ran in the {name} only"


def _contradicts_itself(facts: Facts) -> Iterator[str]:
    """A site does not reproduce its own output, and other evidence finds it off."""
    if facts.judgement is not None and facts.judgement.undecided:
        yield facts.judgement.undecided


def _too_noisy(facts: Facts) -> Iterator[str]:
    """At too many sites, the error that arrives could hide a fault."""
    judgement = facts.judgement
    if judgement is None or not judgement.is_too_noisy:
        return
    judged = judgement.hiding[1]
    by = "trusted runs" if judgement.evidence.has_noise else "two runs"
    yield (
        f"too noisy to tell from {by}; run replay: at "
        f"{judgement.drowning} of {judged} sites the error "
        f"that arrives would hide a fault of {FAULT:.0%} (driftline replay CAND --exec "
        '"python reference.py" -o REPLAY, then --replay REPLAY)'
    )


def _narrowed(facts: Facts) -> str:
    """What was compared, if filters or the selection of steps leave something out."""
    words: list[str] = []
    covered = facts.covered
    ran = covered.ran
    if min(ran) > len(covered.steps) > 0:
        of = (
            f"{ran[0]}"
            if ran[0] == ran[1]
            else f"{ran[0]} in the reference, {ran[1]} in the candidate"
        )
        words.append(f"{spans(covered.steps)} of {of}")
    if selected := facts.sides[0].selected:
        words.append(f"only {', '.join(selected)}")
    for name, side, other in zip(
        ("reference", "candidate"), facts.sides, reversed(facts.sides), strict=True
    ):
        alone = [level for level in side.scope.levels if level not in other.scope.levels]
        if alone and other.scope.captured:
            words.append(f"only the {name} holds {' and '.join(map(_called, alone))}")
        if side.scope.filters:
            words.append(f"the {name} holds only {', '.join(side.scope.filters)}")
    return "".join(f"; {word}" for word in words)


def _called(level: str) -> str:
    return "weights" if level == "params" else level


def _endings(facts: Facts) -> str:
    """How the programs ended after their last step; nothing is missing because of it."""
    sides = zip(("reference", "candidate"), facts.sides, strict=True)
    return "".join(
        f"; the {name}'s program {side.scope.ending}" for name, side in sides if side.scope.ending
    )


Shortfall: TypeAlias = Callable[[Facts], Iterator[str]]

SHORTFALLS: tuple[Shortfall, ...] = (
    _unread,
    _not_run,
    _unfinished,
    _borders,
    _below_min_coverage,
    # Missing ranks explain missing calls, so they are named first.
    _ranks,
    _too_few_calls,
    _left_out,
    _steps,
    _contradicts_itself,
    _too_noisy,
)
"""Reasons why agreement may not be enough, the most serious first; all that apply are reported."""

REASONS: tuple[Reason, ...] = (
    _nothing_compared,
    # A failing row takes precedence over low coverage, because it is the more useful answer.
    _row_fails,
    _output_is_off,
    _only_inputs,
    _incomplete,
)
"""Reasons in the order in which they are tried; the first that applies decides."""
