"""Which step of one run is which of the other, from sequence lengths; and ranks that only differ
in their number.

Runs count differently: a warm-up takes number 0, or a prefill and a decode graph count each for
itself. The number of tokens of each execution tells them apart, and where that is the same the
token ids do. Where neither can, nothing is concluded: numbers are taken as they are, and the plan
says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.alignment.normalise.view import Origin, SeenRun, aside_of, origins_of
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

ID_NAMES = frozenset({"input_ids", "ids", "token_ids", "tokens", "x_ids", "inputs_ids"})
_COUNTER = re.compile(r"\d+_[^.]+")
"""An outermost operation of an accelerator library's dump: each counts its own executions."""
# Bounds on what is read and tried: ids of a long prompt, shifts that fit equally well.
_MOST_IDS = 1 << 20
_MOST_FITS = 32
_MOST_EXECUTIONS = 256
"""A warm-up comes early; so many executions of a run are looked at."""


class Execution(NamedTuple):
    """One counted execution of a run (or of one graph of it): its number and what it worked on."""

    step: int
    tokens: int
    ids: Record | None = None


Timeline = tuple[Execution, ...]


def parse_step_map(text: str) -> dict[int, int]:
    """`0=1,1=2`: step of the reference = step of the candidate.

    >>> parse_step_map("0=1,1=2")
    {0: 1, 1: 2}

    Raises:
        BadInput: It is none.
    """
    found: dict[int, int] = {}
    for word in text.split(","):
        here, equals, there = (part.strip() for part in word.partition("="))
        if not equals or not here.isdigit() or not there.isdigit():
            raise BadInput(
                f"'{word.strip()}' is no pair of steps", hint="write REF=CAND, such as 0=1,1=2"
            )
        # A step that is named twice on either side would put two tensors under one key.
        if int(here) in found or int(there) in found.values():
            raise BadInput(f"step {here} or {there} is given twice in '{text}'")
        found[int(here)] = int(there)
    return found


def is_ids(record: Record) -> bool:
    """Whether a tensor holds token ids, by its name or because an embedding takes it."""
    if record.key.port != "input" or record.dtype not in ("int64", "int32") or not record.shape:
        return False
    if len(record.shape) > 2:
        return False
    return not ID_NAMES.isdisjoint((record.key.slot, record.alias)) or (
        "mbedding" in record.class_name
        # An exported graph calls what an embedding takes by the name of the value.
        and (record.key.slot in ("0", "input", "1") or record.class_name == "Embedding")
    )


def timelines(run: Run) -> dict[str, Timeline]:
    """Every counter of a run: one, called "", unless outermost operations count for themselves."""
    found: dict[str, dict[int, tuple[Record, Record | None]]] = {}
    for record in run.records:
        key = record.key
        # Parameters are the same in all steps, and gradients come in another order.
        if key.port not in ("input", "output"):
            continue
        counter = counter_of(key.site)
        steps = found.setdefault(counter, {})
        known = steps.get(key.step)
        if known is None:
            # The first tensor of a step shows its number of tokens; token ids, wherever
            # they come, do better.
            steps[key.step] = (record, record if is_ids(record) else None)
        elif known[1] is None and is_ids(record):
            steps[key.step] = (known[0], record)
    return {
        counter: tuple(
            Execution(step, _tokens(ids or first), ids)
            for step, (first, ids) in sorted(steps.items())
        )
        for counter, steps in found.items()
    }


def counters_alike(run: Run) -> dict[str, str]:
    """Every counter of a run → the one that speaks for all that count like it."""
    lines = timelines(run)
    return {counter: group[0] for group in _alike(lines) for counter in group}


def counter_of(site: str) -> str:
    """The outermost operation that counts the executions of a site; empty for the run's steps."""
    first = site.partition(".")[0]
    return first if _COUNTER.fullmatch(first) else ""


def _tokens(record: Record) -> int:
    """How many tokens (all sequences together) an execution works on, by its first tensor."""
    shape = record.shape
    if len(shape) < 2 or is_ids(record):
        return int(np.prod(shape)) if shape else 0
    # The last axis holds features; all axes before it count tokens.
    return int(np.prod(shape[:-1]))


def seen_steps(
    reference: Run, candidate: Run, said: Mapping[int, int] | None
) -> tuple[Run, Run, list[str]]:
    """Both runs with the same numbers for the same steps, and what was concluded.

    Raises:
        BadInput: The user's map speaks of steps that are not there.
    """
    if said is not None:
        return reference, _said(reference, candidate, said), [_map_text(said)]
    ours, theirs = ({record.key.step for record in run.records} for run in (reference, candidate))
    if ours == theirs and (len(ours) == 1 or _agree(reference, candidate)):
        return reference, candidate, []
    here, there = timelines(reference), timelines(candidate)
    notes: list[str] = []
    if _single(there) and not _single(here):  # the side with one counter gives the numbers
        view = _renumbered(reference, here, candidate, there, "reference", notes)
        return view, candidate, notes
    return reference, _renumbered(candidate, there, reference, here, "candidate", notes), notes


def _agree(reference: Run, candidate: Run) -> bool:
    """Whether both have the same names and shapes in every step: then nothing is to be moved.

    The first tensor of a step may be another one in a dump that lost the order of execution.
    """
    # Equal lengths first: it is cheap, and most runs that differ do so here.
    if len(reference) != len(candidate):
        return False
    shapes = {record.key: record.shape for record in reference.records}
    return all(shapes.get(record.key) == record.shape for record in candidate.records)


def _single(found: Mapping[str, Timeline]) -> bool:
    return len({tuple((e.step, e.tokens) for e in line) for line in found.values()}) <= 1


def _said(reference: Run, candidate: Run, said: Mapping[int, int]) -> Run:
    for run, steps in ((reference, said.keys()), (candidate, said.values())):
        known = {record.key.step for record in run.records}
        for step in steps:
            if step not in known:
                raise BadInput(
                    f"run '{run.name}' has no step {step}",
                    hint=f"it has step {', '.join(map(str, sorted(known)[:8]))}",
                )
    # The reference keeps its numbers; the candidate is renumbered.
    back = {there: here for here, there in said.items()}
    changes = {("", step): new for step, new in back.items()}
    return _view(candidate, changes, {}, whole=True)


def _renumbered(
    run: Run,
    lines: Mapping[str, Timeline],
    model: Run,
    model_lines: Mapping[str, Timeline],
    side: str,
    notes: list[str],
) -> Run:
    """The run with the numbers of the model; itself where they are the same."""
    changes: dict[tuple[str, int], int] = {}
    reasons: dict[tuple[str, int], str] = {}
    other = "candidate" if side == "reference" else "reference"
    told: set[str] = set()
    for counters in _alike(lines):
        line = lines[counters[0]]
        own = False
        goal = next((found for c in counters if (found := model_lines.get(c))), None)
        if goal is None and _single(model_lines):
            goal = next(iter(model_lines.values()), ())
            own = not _single(lines)
            if own:  # a graph for prompts knows nothing of the steps of the other
                lengths = {execution.tokens for execution in line}
                goal = tuple(execution for execution in goal if execution.tokens in lengths)
        if not goal:
            continue
        shift, doubt = _shift(model, goal, run, line, own)
        if doubt and doubt not in told:
            told.add(doubt)
            notes.append(doubt)
        if shift is None:
            continue
        for at, execution in enumerate(line):
            partner = at + shift
            step = goal[partner].step if 0 <= partner < len(goal) else -1
            why = f"its step of {execution.tokens} tokens comes before the first of the {other}"
            if partner < 0 and all(execution.tokens != each.tokens for each in goal):
                why = f"a warm-up: the {other} has no step of {execution.tokens} tokens"
            elif partner >= 0:
                why = f"the {other} ended earlier"
            for each in counters:
                changes[each, execution.step] = step
                reasons[each, execution.step] = why
        said = _change_text(side, counters, line, goal, shift)
        notes += [said] if said else []
    return _view(run, changes, reasons) if changes else run


def _alike(lines: Mapping[str, Timeline]) -> list[list[str]]:
    """Counters that ran at the same numbers on as many tokens; one that knows ids goes first."""
    groups: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for counter, line in lines.items():
        groups.setdefault(tuple((e.step, e.tokens) for e in line), []).append(counter)
    for counters in groups.values():
        # Only a counter with token ids can decide between shifts of equal lengths.
        counters.sort(key=lambda counter: all(e.ids is None for e in lines[counter]))
    return list(groups.values())


def _shift(
    model: Run, goal: Timeline, run: Run, line: Timeline, own: bool
) -> tuple[int | None, str]:
    """Which execution of `goal` the first of `line` is; None to take the numbers as they are.

    Numbers of a counter of its `own` are no evidence.
    """
    # Bounded, because every shift of two timelines is tried against the other.
    goal, line = goal[:_MOST_EXECUTIONS], line[:_MOST_EXECUTIONS]
    by_step = {execution.step: execution.tokens for execution in goal}
    common = [execution for execution in line if execution.step in by_step]
    agrees = bool(common) and all(each.tokens == by_step[each.step] for each in common)
    varied = own or len({each.tokens for each in (*goal, *line)}) > 1
    fits = _fitting(goal, line)
    if agrees and not varied:  # steps of training, all alike: only their ids can say otherwise
        at = line.index(common[0])
        taken = next(n for n, each in enumerate(goal) if each.step == common[0].step) - at
        if len(fits) == 1 or _same_ids(model, goal, run, line, taken):
            return None, ""
        found = [shift for shift in fits[:_MOST_FITS] if _same_ids(model, goal, run, line, shift)]
        return (found[0] if len(found) == 1 else None), ""
    # Several shifts fit the lengths: token ids choose, or the user is told that nothing can.
    if len(fits) > 1 and varied:
        by_ids = [shift for shift in fits if _same_ids(model, goal, run, line, shift)]
        if len(by_ids) == 1:
            fits = by_ids
        else:
            return (None if common else fits[0]), (
                f"the sequence lengths fit in {len(fits)} ways, so which step is which is not "
                "known; taken by their numbers, --step-map says it"
            )
    if not fits:
        return None, ""
    shift = fits[0]
    # A shift that changes no number is none, and needs no note.
    same = not own and all(
        execution.step == goal[at + shift].step
        for at, execution in enumerate(line)
        if 0 <= at + shift < len(goal)
    )
    return (None if same else shift), ""


def _fitting(goal: Timeline, line: Timeline) -> list[int]:
    """The shifts with the longest overlap, of those whose whole overlap has the same lengths."""
    ways: list[tuple[int, int]] = []
    # From the last of one against the first of the other to the reverse: every possible
    # overlap.
    for shift in range(-len(line) + 1, len(goal)):
        first, last = max(0, -shift), min(len(line), len(goal) - shift)
        if all(line[at].tokens == goal[at + shift].tokens for at in range(first, last)):
            ways.append((last - first, shift))
    best = max((overlap for overlap, _ in ways), default=0)
    return [shift for overlap, shift in ways if overlap == best]


def _same_ids(model: Run, goal: Timeline, run: Run, line: Timeline, shift: int) -> bool:
    """Whether the first execution that both have worked on the same token ids."""
    at = max(0, -shift)
    mine, its = line[at].ids, goal[at + shift].ids
    if mine is None or its is None:
        return False
    here, there = read_ids(run, mine), read_ids(model, its)
    return here is not None and there is not None and np.array_equal(here.ravel(), there.ravel())


def read_ids(run: Run, record: Record) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """A small integer tensor, in its shape; None when it was not kept."""
    if record.kept != "full" or np.prod(record.shape) > _MOST_IDS or run.lost(record):
        return None
    # Codes of four bits are no token ids, and share bytes.
    if DTYPES[record.dtype].bits == 4:
        return None
    try:
        return run.raw(record).reshape(record.shape).astype(np.int64)
    except (DriftlineError, OSError, ValueError):
        return None


def _view(
    run: Run,
    changes: Mapping[tuple[str, int], int],
    reasons: Mapping[tuple[str, int], str],
    *,
    whole: bool = False,
) -> Run:
    """The run with other step numbers; -1, and with `whole` every step not named, is set aside."""
    records: list[Record] = []
    before = origins_of(run)
    aside = list(aside_of(run))
    origins: dict[TensorKey, Origin] = {}
    for record in run.records:
        key = record.key
        counter = "" if whole else counter_of(key.site)
        new = changes.get((counter, key.step), -1 if whole else key.step)
        origin = before.get(key, record)
        if new < 0:
            why = reasons.get((counter, key.step), "the step map leaves its step out")
            aside.append((record, origin, why))
            continue
        moved = record if new == key.step else record._replace(key=key._replace(step=new))
        # Only what differs from the run is noted: a record that is its own origin needs no
        # entry.
        if moved is not record or origin is not record:
            origins[moved.key] = origin
        records.append(moved)
    # Views do not nest: one of a view is made of the run behind it, with the origins carried
    # over.
    base = run.whole if isinstance(run, SeenRun) else run
    return SeenRun(base, records, origins, aside)


def _map_text(said: Mapping[int, int]) -> str:
    shown = ", ".join(f"{here} = {there}" for here, there in sorted(said.items()))
    return f"steps as you say, reference = candidate: {shown}"


def _change_text(
    side: str, counters: Sequence[str], line: Timeline, goal: Timeline, shift: int
) -> str:
    whose = f"of the {side}"
    if counters[0]:
        more = f" and {len(counters) - 1} more" if len(counters) > 1 else ""
        whose = f"of '{counters[0]}'{more} in the {side}"
    same = [
        (execution.step, goal[at + shift].step)
        for at, execution in enumerate(line)
        if 0 <= at + shift < len(goal)
    ]
    if len(same) == len(line) and all(own == its for own, its in same):
        return ""  # nothing was moved and nothing is left out
    pairs = [f"{own} is {its}" for own, its in same]
    shown = ", ".join(pairs[:4]) + (", ..." if len(pairs) > 4 else "")
    how = "numbers of tokens" + (" and their ids" if line[0].ids and goal[0].ids else "")
    text = f"steps {whose}, by their {how}: {shown}"
    lengths = {execution.tokens for execution in goal}
    before = [e for at, e in enumerate(line) if at + shift < 0]
    if before:
        told = ", ".join(
            f"{e.step} ({e.tokens} token{'s' if e.tokens != 1 else ''})" for e in before[:4]
        )
        known = all(e.tokens not in lengths for e in before)
        why = "of another length, a warm-up" if known else "before the first common one"
        text += f"; not compared: {told}, {why}"
    return text


def seen_ranks(reference: Run, candidate: Run) -> tuple[Run, list[str]]:
    """The candidate with the reference's rank numbers, where both have as many and they differ."""
    ours, theirs = _places(reference.records), _places(candidate.records)
    if ours == theirs or len(ours) != len(theirs):
        return candidate, []
    # In order: the nth rank of one run is taken for the nth of the other.
    numbers = dict(zip(theirs, ours, strict=True))
    records: list[Record] = []
    origins: dict[TensorKey, Origin] = {}
    for record in candidate.records:
        key = record.key
        rank, process = numbers[key.rank, key.process]
        moved = record._replace(key=key._replace(rank=rank, process=process))
        if moved.key != key:
            origins[moved.key] = record
        records.append(moved)
    said = ", ".join(f"{_place(b)} is {_place(a)}" for b, a in list(numbers.items())[:8])
    return SeenRun(candidate, records, origins), [f"ranks of the candidate, in order: {said}"]


def _places(records: Sequence[Record]) -> list[tuple[int, int]]:
    return sorted({(record.key.rank, record.key.process) for record in records})


def _place(place: tuple[int, int]) -> str:
    return f"{place[0]}" + (f".p{place[1]}" if place[1] else "")
