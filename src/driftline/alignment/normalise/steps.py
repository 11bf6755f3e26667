"""Step and rank numbers: the steps of one run get the numbers of the matching steps of the other.

Runs count differently: a warm-up may be step 0, or a prefill graph and a decode graph may have
separate counters. Steps are matched by the number of tokens of each execution, and if several
matches fit, by the token ids. If these cannot decide either, the numbers stay unchanged, and a note
says so. Ranks that differ only in their numbers are renumbered in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.alignment.normalise.view import AlignedView, Origin, excluded_of, origins_of
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

ID_NAMES = frozenset({"input_ids", "ids", "token_ids", "tokens", "x_ids", "inputs_ids"})
_COUNTER = re.compile(r"\d+_[^.]+")
"""Site of an outermost operation in an ATB dump; each such operation counts its own executions."""
# Limits on what is read and tried: ids of a long prompt, shifts that fit equally well.
_MOST_IDS = 1 << 20
_MOST_FITS = 32
_MOST_EXECUTIONS = 256
"""Largest number of executions of a run that are compared; a warm-up comes early."""


class Execution(NamedTuple):
    """One execution of a run, or of one graph of it: its number, its tokens and their ids."""

    step: int
    tokens: int
    ids: Record | None = None


Timeline = tuple[Execution, ...]


def parse_step_map(text: str) -> dict[int, int]:
    """Parse `0=1,1=2`: step of the reference = step of the candidate.

    >>> parse_step_map("0=1,1=2")
    {0: 1, 1: 2}

    Raises:
        BadInput: The text is not a step map.
    """
    step_map: dict[int, int] = {}
    for word in text.split(","):
        reference_step, equals, candidate_step = (part.strip() for part in word.partition("="))
        if not equals or not reference_step.isdigit() or not candidate_step.isdigit():
            raise BadInput(
                f"'{word.strip()}' is no pair of steps", hint="write REF=CAND, such as 0=1,1=2"
            )
        # A step that is named twice on either side would put two tensors under one key.
        if int(reference_step) in step_map or int(candidate_step) in step_map.values():
            raise BadInput(
                f"step {reference_step} or {candidate_step} is given twice in '{text}'",
                hint="name every step once on either side, such as --step-map 0=1,1=2",
            )
        step_map[int(reference_step)] = int(candidate_step)
    return step_map


def is_ids(record: Record) -> bool:
    """Whether a tensor holds token ids, by its name or because it is the input of an embedding."""
    if record.key.port != "input" or record.dtype not in ("int64", "int32") or not record.shape:
        return False
    if len(record.shape) > 2:
        return False
    return not ID_NAMES.isdisjoint((record.key.slot, record.alias)) or (
        "mbedding" in record.class_name
        # An exported graph names the input of an embedding after the value.
        and (record.key.slot in ("0", "input", "1") or record.class_name == "Embedding")
    )


def timelines(run: Run) -> dict[str, Timeline]:
    """Timelines of a run's counters: one named "", unless outermost operations have their own."""
    counters: dict[str, dict[int, tuple[Record, Record | None]]] = {}
    for record in run.records:
        key = record.key
        # Parameters are the same in all steps, and gradients come in another order.
        if key.port not in ("input", "output"):
            continue
        counter = counter_of(key.site)
        steps = counters.setdefault(counter, {})
        entry = steps.get(key.step)
        if entry is None:
            # The first tensor of a step shows its number of tokens; token ids anywhere in the step
            # are better evidence.
            steps[key.step] = (record, record if is_ids(record) else None)
        elif entry[1] is None and is_ids(record):
            steps[key.step] = (entry[0], record)
    return {
        counter: tuple(
            Execution(step, _tokens(ids or first), ids)
            for step, (first, ids) in sorted(steps.items())
        )
        for counter, steps in counters.items()
    }


def counter_groups(run: Run) -> dict[str, str]:
    """Every counter of a run → the representative of all counters with the same timeline."""
    lines = timelines(run)
    return {counter: group[0] for group in _group_counters(lines) for counter in group}


def counter_of(site: str) -> str:
    """Name of the operation that counts a site's executions; empty for the steps of the run."""
    first = site.partition(".")[0]
    return first if _COUNTER.fullmatch(first) else ""


def _tokens(record: Record) -> int:
    """Number of tokens of an execution, over all sequences, from its first tensor."""
    shape = record.shape
    if len(shape) < 2 or is_ids(record):
        return int(np.prod(shape)) if shape else 0
    # The last axis holds features; all axes before it count tokens.
    return int(np.prod(shape[:-1]))


def align_steps(
    reference: Run, candidate: Run, step_map: Mapping[int, int] | None
) -> tuple[Run, Run, list[str]]:
    """Both runs with the same numbers for the same steps, and notes on what was concluded.

    Raises:
        BadInput: The user's map names a step that a run does not have.
    """
    if step_map is not None:
        return reference, _by_step_map(reference, candidate, step_map), [_map_text(step_map)]
    reference_steps, candidate_steps = (
        {record.key.step for record in run.records} for run in (reference, candidate)
    )
    if reference_steps == candidate_steps and (
        len(reference_steps) == 1 or _agree(reference, candidate)
    ):
        return reference, candidate, []
    reference_lines, candidate_lines = timelines(reference), timelines(candidate)
    notes: list[str] = []
    if _single(candidate_lines) and not _single(
        reference_lines
    ):  # the side with one counter gives the numbers
        view = _renumbered(
            reference, reference_lines, candidate, candidate_lines, "reference", notes
        )
        return view, candidate, notes
    return (
        reference,
        _renumbered(candidate, candidate_lines, reference, reference_lines, "candidate", notes),
        notes,
    )


def _agree(reference: Run, candidate: Run) -> bool:
    """Whether both runs have the same names and shapes in every step, so that no step is moved.

    This is needed because in a dump without execution order, the first tensor of a step, which
    gives its number of tokens, may be a different one.
    """
    # Equal lengths first: the check is cheap, and most runs that differ do so here.
    if len(reference) != len(candidate):
        return False
    shapes = {record.key: record.shape for record in reference.records}
    return all(shapes.get(record.key) == record.shape for record in candidate.records)


def _single(lines: Mapping[str, Timeline]) -> bool:
    return len({tuple((e.step, e.tokens) for e in line) for line in lines.values()}) <= 1


def _by_step_map(reference: Run, candidate: Run, step_map: Mapping[int, int]) -> Run:
    for run, steps in ((reference, step_map.keys()), (candidate, step_map.values())):
        existing = {record.key.step for record in run.records}
        for step in steps:
            if step not in existing:
                raise BadInput(
                    f"run '{run.name}' has no step {step}",
                    hint=f"it has step {', '.join(map(str, sorted(existing)[:8]))}",
                )
    # The reference keeps its numbers; the candidate is renumbered.
    reference_step_of = {
        candidate_step: reference_step for reference_step, candidate_step in step_map.items()
    }
    changes = {("", step): new for step, new in reference_step_of.items()}
    return _view(candidate, changes, {}, all_steps=True)


def _renumbered(
    run: Run,
    lines: Mapping[str, Timeline],
    model: Run,
    model_lines: Mapping[str, Timeline],
    side: str,
    notes: list[str],
) -> Run:
    """The run with the step numbers of `model`; the run itself if they are equal already."""
    changes: dict[tuple[str, int], int] = {}
    reasons: dict[tuple[str, int], str] = {}
    other = "candidate" if side == "reference" else "reference"
    doubts: set[str] = set()
    for counters in _group_counters(lines):
        line = lines[counters[0]]
        goal, own = _goal(counters, lines, model_lines)
        if not goal:
            continue
        shift, doubt = _shift(model, goal, run, line, own)
        # Several counters may have the same doubt; it is reported once.
        if doubt and doubt not in doubts:
            doubts.add(doubt)
            notes.append(doubt)
        if shift is None:
            continue
        for index, execution in enumerate(line):
            partner = index + shift
            # -1 excludes a step that the other run does not have.
            step = goal[partner].step if 0 <= partner < len(goal) else -1
            for counter in counters:
                changes[counter, execution.step] = step
                reasons[counter, execution.step] = _why_excluded(execution, partner, goal, other)
        if note := _change_text(side, counters, line, goal, shift):
            notes.append(note)
    return _view(run, changes, reasons) if changes else run


def _goal(
    counters: Sequence[str], lines: Mapping[str, Timeline], model_lines: Mapping[str, Timeline]
) -> tuple[Timeline, bool]:
    """The timeline of the other run with which these counters are matched; empty if there is none.

    Also returns whether these are separate counters while the other run has a single one.
    """
    for counter in counters:
        if goal := model_lines.get(counter):
            return goal, False
    if not _single(model_lines):
        return (), False
    goal = next(iter(model_lines.values()), ())
    if _single(lines):
        return goal, False
    # A prefill graph never ran the decode steps of the other run's only counter, and the reverse.
    lengths = {execution.tokens for execution in lines[counters[0]]}
    return tuple(execution for execution in goal if execution.tokens in lengths), True


def _why_excluded(execution: Execution, partner: int, goal: Timeline, other: str) -> str:
    """Why a step has no partner, if it has none."""
    if partner >= 0:
        return f"the {other} ended earlier"
    if all(execution.tokens != step.tokens for step in goal):
        return f"a warm-up: the {other} has no step of {execution.tokens} tokens"
    return f"its step of {execution.tokens} tokens comes before the first of the {other}"


def _group_counters(lines: Mapping[str, Timeline]) -> list[list[str]]:
    """Groups of counters with equal numbers and tokens; a counter with token ids comes first."""
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
    """Index in `goal` of the first execution of `line`, or None to keep the numbers; and a doubt.

    The numbers of an `own` counter are no evidence, because it counts other executions.
    """
    # Limited, because every shift of two timelines is tried.
    goal, line = goal[:_MOST_EXECUTIONS], line[:_MOST_EXECUTIONS]
    by_step = {execution.step: execution.tokens for execution in goal}
    common = [execution for execution in line if execution.step in by_step]
    agrees = bool(common) and all(step.tokens == by_step[step.step] for step in common)
    varied = own or len({step.tokens for step in (*goal, *line)}) > 1
    fits = _fitting(goal, line)
    if agrees and not varied:
        # Training steps of equal length: only their token ids can contradict the numbers.
        by_number = [step.step for step in goal].index(common[0].step) - line.index(common[0])
        if len(fits) == 1 or _same_ids(model, goal, run, line, by_number):
            return None, ""
        return _only_shift_by_ids(model, goal, run, line, fits[:_MOST_FITS]), ""
    # Several shifts fit the lengths: token ids choose, or a doubt is reported.
    if len(fits) > 1 and varied:
        by_ids = _only_shift_by_ids(model, goal, run, line, fits)
        if by_ids is not None:
            fits = [by_ids]
        else:
            return (None if common else fits[0]), (
                f"the sequence lengths fit in {len(fits)} ways, so which step is which is not "
                "known; taken by their numbers, --step-map says it"
            )
    if not fits:
        return None, ""
    shift = fits[0]
    # A shift that changes no number needs no note.
    same = not own and all(
        execution.step == goal[index + shift].step
        for index, execution in enumerate(line)
        if 0 <= index + shift < len(goal)
    )
    return (None if same else shift), ""


def _only_shift_by_ids(
    model: Run, goal: Timeline, run: Run, line: Timeline, shifts: Sequence[int]
) -> int | None:
    """The only shift for which both sides have the same token ids; None if there are others."""
    equal = [shift for shift in shifts if _same_ids(model, goal, run, line, shift)]
    return equal[0] if len(equal) == 1 else None


def _fitting(goal: Timeline, line: Timeline) -> list[int]:
    """The shifts whose overlap has equal lengths throughout; only the longest overlaps."""
    overlaps: list[tuple[int, int]] = []
    # Every possible overlap: from the last execution of one against the first of the other, to the
    # reverse.
    for shift in range(-len(line) + 1, len(goal)):
        first, last = max(0, -shift), min(len(line), len(goal) - shift)
        if all(line[index].tokens == goal[index + shift].tokens for index in range(first, last)):
            overlaps.append((last - first, shift))
    best = max((overlap for overlap, _ in overlaps), default=0)
    return [shift for overlap, shift in overlaps if overlap == best]


def _same_ids(model: Run, goal: Timeline, run: Run, line: Timeline, shift: int) -> bool:
    """Whether both sides have the same token ids in their first common execution."""
    index = max(0, -shift)
    own_ids, model_ids = line[index].ids, goal[index + shift].ids
    if own_ids is None or model_ids is None:
        return False
    own_values, model_values = read_ids(run, own_ids), read_ids(model, model_ids)
    return (
        own_values is not None
        and model_values is not None
        and np.array_equal(own_values.ravel(), model_values.ravel())
    )


def read_ids(run: Run, record: Record) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """Values of a small integer tensor, in its shape; None if they were not kept."""
    if record.kept != "full" or np.prod(record.shape) > _MOST_IDS or run.lost(record):
        return None
    # Four-bit codes are not token ids, and share bytes.
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
    all_steps: bool = False,
) -> Run:
    """The run with other step numbers.

    A step whose new number is -1 is excluded; with `all_steps`, so is every step without a number.
    """
    records: list[Record] = []
    before = origins_of(run)
    excluded = list(excluded_of(run))
    origins: dict[TensorKey, Origin] = {}
    for record in run.records:
        key = record.key
        counter = "" if all_steps else counter_of(key.site)
        new = changes.get((counter, key.step), -1 if all_steps else key.step)
        origin = before.get(key, record)
        if new < 0:
            why = reasons.get((counter, key.step), "the step map leaves its step out")
            excluded.append((record, origin, why))
            continue
        moved = record if new == key.step else record._replace(key=key._replace(step=new))
        # Only changed records are stored; a record that is its own origin needs no entry.
        if moved is not record or origin is not record:
            origins[moved.key] = origin
        records.append(moved)
    # Views do not nest: a view of a view is made of the run behind it, with the origins carried
    # over.
    base = run.base if isinstance(run, AlignedView) else run
    return AlignedView(base, records, origins, excluded)


def _map_text(step_map: Mapping[int, int]) -> str:
    shown = ", ".join(
        f"{reference_step} = {candidate_step}"
        for reference_step, candidate_step in sorted(step_map.items())
    )
    return f"steps as you say, reference = candidate: {shown}"


def _change_text(
    side: str, counters: Sequence[str], line: Timeline, goal: Timeline, shift: int
) -> str:
    whose = f"of the {side}"
    if counters[0]:
        more = f" and {len(counters) - 1} more" if len(counters) > 1 else ""
        whose = f"of '{counters[0]}'{more} in the {side}"
    same = [
        (execution.step, goal[index + shift].step)
        for index, execution in enumerate(line)
        if 0 <= index + shift < len(goal)
    ]
    if len(same) == len(line) and all(own_step == model_step for own_step, model_step in same):
        return ""  # nothing was moved and nothing is left out
    pairs = [f"{own_step} is {model_step}" for own_step, model_step in same]
    shown = ", ".join(pairs[:4]) + (", ..." if len(pairs) > 4 else "")
    how = "numbers of tokens" + (" and their ids" if line[0].ids and goal[0].ids else "")
    text = f"steps {whose}, by their {how}: {shown}"
    lengths = {execution.tokens for execution in goal}
    before = [e for index, e in enumerate(line) if index + shift < 0]
    if before:
        skipped = ", ".join(
            f"{e.step} ({e.tokens} token{'s' if e.tokens != 1 else ''})" for e in before[:4]
        )
        unmatched = all(e.tokens not in lengths for e in before)
        why = "of another length, a warm-up" if unmatched else "before the first common one"
        text += f"; not compared: {skipped}, {why}"
    return text


def align_ranks(reference: Run, candidate: Run) -> tuple[Run, list[str]]:
    """The candidate with the reference's rank numbers, if both have equally many ranks."""
    reference_places, candidate_places = _places(reference.records), _places(candidate.records)
    if reference_places == candidate_places or len(reference_places) != len(candidate_places):
        return candidate, []
    # In order: the nth rank of one run is matched with the nth rank of the other.
    numbers = dict(zip(candidate_places, reference_places, strict=True))
    records: list[Record] = []
    origins: dict[TensorKey, Origin] = {}
    for record in candidate.records:
        key = record.key
        rank, process = numbers[key.rank, key.process]
        moved = record._replace(key=key._replace(rank=rank, process=process))
        if moved.key != key:
            origins[moved.key] = record
        records.append(moved)
    shown = ", ".join(f"{_place(b)} is {_place(a)}" for b, a in list(numbers.items())[:8])
    return AlignedView(candidate, records, origins), [f"ranks of the candidate, in order: {shown}"]


def _places(records: Sequence[Record]) -> list[tuple[int, int]]:
    return sorted({(record.key.rank, record.key.process) for record in records})


def _place(place: tuple[int, int]) -> str:
    return f"{place[0]}" + (f".p{place[1]}" if place[1] else "")
