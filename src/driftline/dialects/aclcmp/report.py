"""Compares labels and writes `{task_id}_cmp_result.csv`, the 13 columns of the aclcmp tool.

Labels of one round (task) with the same id are paired, whichever process set them and in whichever
order. A label without a partner, or whose file is missing, is a row with a reason. `run_labelled`
starts a program whose labels are compared afterwards.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from driftline import settings
from driftline.alignment.plan import Pair, Plan
from driftline.captures.launch.child import require_command, run_child
from driftline.comparison.options import CompareOptions
from driftline.comparison.pipeline import run_comparison
from driftline.comparison.table.row import LOST, Row
from driftline.comparison.table.table import Table
from driftline.dialects.aclcmp.label_store import (
    Label,
    file_stem,
    find_dumped,
    read_dumped,
    read_labels,
    read_value,
)
from driftline.dialects.ait.compare_report import Cell, figures_leave_out, write_whole
from driftline.errors import BadInput, DriftlineError
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run, Storage, no_values

COLUMNS = (
    "data_id",
    "pta_data_path",
    "pta_dtype",
    "pta_shape",
    "acl_data_path",
    "acl_dtype",
    "acl_shape",
    "cmp_flag",
    "cosine_similarity",
    "max_relative_error",
    "mean_relative_error",
    "relative_euclidean_distance",
    "cmp_fail_reason",
)
_MEASURED = ("cosine", "max_rel_error", "mean_rel_error", "relative_l2")
# A file next to the labels, because files of labels are never rewritten.
_LOCK = "lock"
_NO_ACL = "no acl label belongs to it"
_NO_PTA = "no pta label belongs to it"


Couple = tuple[Label | None, Label | None]
"""A pta label and its acl label; one of them may be missing."""


class Outcome(NamedTuple):
    """One compared round.

    Attributes:
        task: Its id; empty if `set_task_id` was never called.
        csv: The file that was written.
        table: The judged comparison: `pta` is the reference.
    """

    task: str
    csv: Path
    table: Table

    def __str__(self) -> str:
        where = f"task {self.task}" if self.task else "labels"
        return f"{where}: {self.table.finding or self.table.verdict}; {self.csv}"


class Labelled(NamedTuple):
    """A label and its tensor, if the tensor can be read.

    Attributes:
        path: The path of the tensor, or its expected path.
        trouble: Why it cannot be read; empty if it can.
        fetch: Returns its values, flat, of the storage type.
    """

    label: Label
    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    trouble: str = ""
    fetch: Callable[[], npt.NDArray[Any]] | None = None


def report_tasks(
    store: Path, folder: Path, tasks: Sequence[str] | None = None, *, threads: int | None = None
) -> list[Outcome]:
    """Compare the labels of a store and write one csv per round.

    Processes that end at the same time take turns, and each reads the store again, so the last csv
    of a round has all its labels.

    Args:
        store: Folder of the labels.
        folder: Where the csv files go.
        tasks: Only these rounds; all of the store, in the order they began, when not given.
        threads: Worker threads; by default, one per usable core.

    Raises:
        BadInput: A csv cannot be written.
    """
    outcomes: list[Outcome] = []
    with _turn(store):
        rounds = rounds_of(read_labels(store))
        # A process reports the rounds that it took part in, and those where its labels found
        # their partners; others report theirs.
        chosen = [
            task
            for task, couples in rounds.items()
            if tasks is None or not couples or any(_of_tasks(pair, tasks) for pair in couples)
        ]
        for task in chosen:
            csv = folder / f"{file_stem(task) if task else ''}_cmp_result.csv"
            if not rounds[task]:
                # All its labels have partners in another process's round by now.
                csv.unlink(missing_ok=True)
                continue
            sides = [_opened(store, pta, acl) for pta, acl in rounds[task]]
            table = _measured(sides, task, threads)
            try:
                write_whole(csv, COLUMNS, _lines(table, sides))
            except OSError as trouble:
                raise BadInput(
                    f"cannot write {csv}: {trouble.strerror or trouble}",
                    hint=f"the labels are kept; try: driftline labels --from {store}",
                ) from trouble
            outcomes.append(Outcome(task, csv, table))
    return outcomes


def rounds_of(labels: Sequence[Label]) -> dict[str, list[Couple]]:
    """The couples of every round, in the order in which rounds began.

    `set_task_id()` names a round after its process. If two processes call it, labels of one id are
    in rounds with two names. A label without a partner in its own round is therefore paired with
    one in a round of the same number in another process; the couple belongs to the round of the
    `pta` label.
    """
    by_task: dict[str, list[Label]] = {}
    for label in labels:
        by_task.setdefault(label.task, []).append(label)
    rounds = {task: paired(own) for task, own in by_task.items()}
    waiting: dict[tuple[str, str], list[tuple[str, Couple]]] = {}
    for task, couples in rounds.items():
        for couple in couples:
            if couple[0] is None and couple[1] is not None:
                place = (_number(task), couple[1].data_id)
                waiting.setdefault(place, []).append((task, couple))
    for task, couples in rounds.items():
        for index, (pta, acl) in enumerate(couples):
            if pta is None or acl is not None:
                continue
            lone = waiting.get((_number(task), pta.data_id), [])
            other = next((entry for entry in lone if entry[0] != task), None)
            if other is not None:
                lone.remove(other)
                rounds[other[0]].remove(other[1])
                couples[index] = pta, other[1][1]
    return rounds


def _number(task: str) -> str:
    """The number of a task among the rounds of its process, from `{pid}_{number}`."""
    return task.rpartition("_")[2]


def _of_tasks(couple: Couple, tasks: Sequence[str]) -> bool:
    return any(label is not None and label.task in tasks for label in couple)


@contextmanager
def _turn(store: Path) -> Generator[None]:
    """A lock for one process at a time; the system releases the lock of a process that dies."""
    with (store / _LOCK).open("a") as lock:
        with suppress(OSError):  # some network file systems have no locks: better a csv than none
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def paired(labels: Sequence[Label]) -> list[Couple]:
    """Couples of one round, (pta, acl), in the order of their first label.

    For an id, the nth `pta` label is paired with the nth `acl` label of the same process; the
    remaining ones are paired across processes, in the order of time.
    """
    groups: dict[str, dict[str, list[Label]]] = {}
    for label in labels:
        sides = groups.setdefault(label.data_id, {"pta": [], "acl": []})
        sides[label.source].append(label)
    couples: list[Couple] = []
    for sides in groups.values():
        own: list[tuple[Label, Label]] = []
        # Ranks use the same ids, so a partner in the same process is the right one.
        for process in dict.fromkeys(label.process for label in sides["pta"]):
            by_side = [
                [entry for entry in side if entry.process == process] for side in sides.values()
            ]
            own += zip(*by_side, strict=False)
        paired_names = {label for couple in own for label in map(_name, couple)}
        ptas, acls = (
            [entry for entry in side if _name(entry) not in paired_names] for side in sides.values()
        )
        couples += own
        count = min(len(ptas), len(acls))
        couples += zip(ptas[:count], acls[:count], strict=True)
        couples += [(pta, None) for pta in ptas[count:]]
        couples += [(None, acl) for acl in acls[count:]]
    return sorted(
        couples, key=lambda couple: min(entry.time for entry in couple if entry is not None)
    )


def _name(label: Label) -> tuple[str, int]:
    return label.process, label.number


Sides = tuple[Labelled | None, Labelled | None]


def _opened(store: Path, pta: Label | None, acl: Label | None) -> Sides:
    reference = None if pta is None else _from_store(store, pta)
    # A label with a value is in the store; the file of a label with a path is searched now.
    if acl is None or acl.file:
        return reference, None if acl is None else _from_store(store, acl)
    return reference, _from_dump(acl, reference)


def _from_store(store: Path, label: Label) -> Labelled:
    path = str(store / label.file)
    try:
        # Read once now, so that a damaged file is a row with a reason and not a crash
        # later.
        read_value(store, label)
    except (DriftlineError, OSError, ValueError) as trouble:
        return Labelled(label, path, label.dtype, label.shape, str(trouble))
    return Labelled(label, path, label.dtype, label.shape, "", partial(read_value, store, label))


def _from_dump(label: Label, partner: Labelled | None) -> Labelled:
    try:
        path = find_dumped(label)
    except (DriftlineError, OSError) as trouble:
        return Labelled(label, label.tensor_path, trouble=str(trouble))
    # Bare bytes carry no type: the partner's is assumed.
    expected = None if partner is None else (partner.dtype, partner.shape)
    try:
        dumped = read_dumped(path, expected)
    except (DriftlineError, OSError, ValueError) as trouble:
        return Labelled(label, str(path), trouble=str(trouble))
    return Labelled(label, str(path), dumped.dtype, dumped.shape, dumped.trouble, dumped.fetch)


def _measured(couples: Sequence[Sides], task: str, threads: int | None) -> Table:
    reference = _LabelRun(f"pta labels of task {task}" if task else "pta labels")
    candidate = _LabelRun(f"acl labels of task {task}" if task else "acl labels")
    pairs: list[Pair] = []
    missing: list[Record] = []
    extra: list[Record] = []
    reasons: dict[tuple[str, TensorKey], str] = {}
    for order, (key, (pta, acl)) in enumerate(zip(_keys(couples), couples, strict=True)):
        if pta is not None and acl is not None:
            # The same numbers with and without an axis of one are still the same numbers.
            shape = pta.shape if _squeezed(pta.shape) == _squeezed(acl.shape) else acl.shape
            reference_record, candidate_record = (
                reference.add(key, order, pta, pta.shape),
                candidate.add(key, order, acl, shape),
            )
            why = "; ".join(
                f"{side.label.source}: {side.trouble}" for side in (pta, acl) if side.trouble
            )
            # Judged as a tensor that should have been compared but could not be read.
            pairs.append(
                Pair(
                    reference_record,
                    candidate_record,
                    "map",
                    trouble=f"{LOST}: {why}" if why else "",
                )
            )
        # A lone label is part of the report, as missing or extra.
        elif pta is not None:
            missing.append(reference.add(key, order, pta, pta.shape))
            reasons["reference", key] = _NO_ACL
        elif acl is not None:
            extra.append(candidate.add(key, order, acl, acl.shape))
            reasons["candidate", key] = _NO_PTA
    plan = Plan(tuple(pairs), tuple(missing), tuple(extra), reasons=reasons)
    table = run_comparison(reference, candidate, CompareOptions.of(threads=threads), plan=plan)
    lone = len(missing) + len(extra)
    # Every label asks for a comparison, so one without a partner makes the result incomplete.
    if lone and table.verdict == "pass":
        count = "1 label has" if lone == 1 else f"{lone} labels have"
        first = (*missing, *extra)[0].key.site
        finding = f"{count} no partner, '{first}'{'' if lone == 1 else ' for one'}"
        table = table.changed(verdict="incomplete", finding=f"{finding}; {table.finding}")
    return table


def _keys(couples: Sequence[Sides]) -> list[TensorKey]:
    """The key of each couple: the id is the site, and its nth use the visit."""
    seen: dict[str, int] = {}
    keys: list[TensorKey] = []
    for couple in couples:
        data_id = next(side.label.data_id for side in couple if side is not None)
        visit = seen[data_id] = seen.get(data_id, -1) + 1
        keys.append(TensorKey.of(data_id, "output", visit=visit))
    return keys


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _lines(table: Table, couples: Sequence[Sides]) -> Iterator[list[Cell]]:
    # Rows come sorted by the engine; the csv keeps the order of labels.
    rows: Mapping[TensorKey, Row] = {row.key: row for row in table.rows}
    for key, (pta, acl) in zip(_keys(couples), couples, strict=True):
        row = rows[key]
        line: list[Cell] = [key.site]
        for side in (pta, acl):
            if side is None:
                line += ["", "", ""]
            else:
                readable = bool(side.dtype)
                line += [
                    side.path,
                    side.dtype if readable else "",
                    str(tuple(side.shape)) if readable else "",  # as numpy prints it
                ]
        line.append(str(row.compared))
        for name in _MEASURED:
            value = row.metrics.get(name)
            line.append("" if value is None else float(value))
        line.append(_reason(row, alone=pta is None or acl is None))
        yield line


def _reason(row: Row, *, alone: bool) -> str:
    if alone:
        return _NO_ACL if row.status == "missing" else _NO_PTA
    if not row.compared:
        return row.reason.removeprefix(f"{LOST}: ")
    return figures_leave_out(row)


class _LabelRun(Run):
    """One side of a round as a run, for the comparison."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._records: list[Record] = []
        self._fetch: dict[TensorKey, Callable[[], Storage]] = {}

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    def add(self, key: TensorKey, order: int, side: Labelled, shape: tuple[int, ...]) -> Record:
        trouble = side.trouble
        # A record needs a type even if the tensor could not be read; it is marked as lost.
        record = Record(key, order, side.dtype or "uint8", shape, lost=trouble)
        self._records.append(record)
        if side.fetch is not None and not trouble:
            self._fetch[key] = side.fetch
        return record

    def raw(self, record: Record) -> Storage:
        fetch = self._fetch.get(record.key)
        return no_values(record) if fetch is None else fetch()


# Running a program that sets labels.


def run_labelled(argv: Sequence[str], store: Path) -> int:
    """Run a program whose labels go into a folder; returns its exit status.

    Args:
        argv: The program, word by word.
        store: Folder of the labels; the program creates it with its first label.

    Raises:
        BadInput: There is no such program.
    """
    environment = {
        **settings.environment(),
        settings.LABELS: str(store),
        # Tells the program's processes that they need not compare.
        settings.LABELS_AWAITED: "1",
    }
    require_command(argv, environment)
    return run_child(argv, environment)
