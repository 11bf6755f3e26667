"""`driftline repeat`: is a program deterministic, and does the batch affect its sequences?

An unchanged program is run several times and its digests are compared. On request it is also run
with other numbers of threads, with one sequence of the batch alone, and with the batch in another
order.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.diagnosis.experiments.run_program import Ended, run_with
from driftline.errors import BadInput, did_you_mean
from driftline.formats.registry import open_run
from driftline.runs.records import Record
from driftline.runs.run import Run, TensorHandle

SCHEMA = 1
VARIES = ("threads", "batch", "order")
_NAMES = {"batch": "alone", "order": "reversed"}


class Side(NamedTuple):
    """The answer to one question.

    Attributes:
        question: repeats, threads, batch or order.
        same: Whether nothing differs; None if that could not be examined.
        tensors: Number of compared tensors.
        differing: Number of tensors that differ.
        first_site: The first site that differs, in execution order; empty if none.
        first_key: The tensor of that site that differs.
        largest: The largest relative difference (L2) of a tensor, if values were kept.
        reason: Why it could not be examined, or a remark.
    """

    question: str
    same: bool | None
    tensors: int = 0
    differing: int = 0
    first_site: str = ""
    first_key: str = ""
    largest: float = 0.0
    reason: str = ""


class Repeated(NamedTuple):
    """The answers, and the number of executions of the program."""

    sides: tuple[Side, ...]
    executions: int

    @property
    def same(self) -> bool:
        return all(side.same is not False for side in self.sides)

    def to_json(self) -> dict[str, Any]:
        by = {side.question: side for side in self.sides}
        first = next((side for side in self.sides if side.same is False), None)
        return {
            "schema": SCHEMA,
            "deterministic": by["repeats"].same,
            "batch_invariant": by["batch"].same if "batch" in by else None,
            "first_site": first.first_site if first is not None else "",
            "first_key": first.first_key if first is not None else "",
            "executions": self.executions,
            "questions": [side._asdict() for side in self.sides],
        }


def repeat(
    argv: Sequence[str],
    *,
    times: int = 5,
    vary: Sequence[str] = (),
    selection: Selection | None = None,
    tell: Callable[[str], None] | None = None,
) -> Repeated:
    """Run a program several times and find the first site that differs.

    Args:
        argv: The program.
        times: Number of unchanged executions.
        vary: Any of threads, batch, order.
        selection: What is compared.
        tell: Called with a sentence before each unchanged execution and each variation.

    Raises:
        DriftlineError: `times` is below two, a word of `vary` is unknown, or the program fails.
    """
    if times < 2:
        raise BadInput(f"repeating needs at least 2 executions, not {times}", hint="-k 5")
    for word in vary:
        if word not in VARIES:
            raise BadInput(f"there is no --vary {word}", hint=did_you_mean(word, VARIES))

    def say(sentence: str) -> None:
        if tell is not None:
            tell(sentence)

    with tempfile.TemporaryDirectory(prefix="driftline-repeat-") as folder:
        program = _ProgramRuns(argv, selection or Selection(), Path(folder))
        runs: list[Run] = []
        for number in range(times):
            say(f"execution {number + 1} of {times}")
            # Digests suffice to compare executions, so only they are stored.
            runs.append(program.run("digest"))
        sides = [_repeats(runs)]
        for word in dict.fromkeys(vary):
            say(f"with other {word}" if word == "threads" else f"with another {word}")
            sides.append(program.threads(runs[0]) if word == "threads" else program.batch(word))
        return Repeated(tuple(sides), program.executions)


class _ProgramRuns:
    """Runs the program, each time into a folder of its own."""

    def __init__(self, argv: Sequence[str], selection: Selection, folder: Path) -> None:
        self._argv = argv
        self._selection = selection
        self._folder = folder
        self.executions = 0
        self._batch = 0

    def run(self, keep: str, experiment: dict[str, Any] | None = None, threads: int = 0) -> Run:
        self.executions += 1
        place = self._folder / str(self.executions)
        plan = CapturePlan(
            output=str(place),
            selection=self._selection,
            reduction=Reduction.parse(keep),
            command=tuple(self._argv),
            experiment=experiment or {},
        )
        # The variable must be set before the program starts, because OpenMP reads it only once.
        cores = {"OMP_NUM_THREADS": str(threads)} if threads else None
        ended = run_with(self._argv, plan, cores, to_stderr=True)
        self._require(ended, place)
        self._batch = max((int(r.get("batch", 0)) for r in ended.reports), default=0)
        return open_run(place)

    def _require(self, ended: Ended, place: Path) -> None:
        if ended.status:
            raise BadInput(
                f"the program ended with status {ended.status} in execution {self.executions}",
                hint="its own messages above say why",
            )
        if not (place / "run.json").is_file():
            why = "no module was called" if ended.messages.started else ended.why_not
            raise BadInput(f"nothing was captured: {why}", hint="is this the command that runs it?")

    def threads(self, base: Run) -> Side:
        cores = os.cpu_count() or 1
        # On one core there is no other number of threads to compare with.
        if cores == 1:
            return Side("threads", None, reason="this machine has one core")
        sides: list[Side] = []
        for count in dict.fromkeys((1, 2, cores)):
            other = self.run("digest", {"kind": "variant", "threads": count}, count)
            side = _compared("threads", [base, other])
            if side.same is False:
                return side._replace(reason=f"with {count} threads")
            sides.append(side)
        return sides[-1]

    def batch(self, word: str) -> Side:
        second = self._folder / f"second-{word}"
        experiment = {"kind": "batch", "how": _NAMES[word], "output": str(second)}
        # Batches are compared by values, because their shapes differ and digests cannot match.
        base = self.run("full", experiment)
        size = self._batch
        if size < 2 or not (second / "run.json").is_file():
            return Side(
                word, None, reason="no call with a batch of two or more sequences could be repeated"
            )
        return _slices(word, base, open_run(second), size)


def _repeats(runs: Sequence[Run]) -> Side:
    return _compared("repeats", runs)


def _compared(question: str, runs: Sequence[Run]) -> Side:
    """Compare digests of the same tensors, and report the first difference in execution order."""
    others = [{record.key: record for record in run.records} for run in runs[1:]]
    keys = [record.key for record in runs[0].records]
    differing = 0
    first = None
    for record in runs[0].records:
        if any(_digest(other.get(record.key)) != record.digest for other in others):
            differing += 1
            first = first or record.key
    extra = [key for other in others for key in other if key not in set(keys)]
    # An extra tensor is a difference too: the program took another path.
    if first is None and extra:
        return Side(
            question,
            False,
            len(keys),
            len(extra),
            extra[0].site,
            str(extra[0]),
            reason="an execution called modules that another did not",
        )
    return Side(
        question, first is None, len(keys), differing, first.site if first else "",
        str(first) if first else "",
    )  # fmt: skip


def _digest(record: Record | None) -> str:
    return "" if record is None else record.digest


def _slices(question: str, base: Run, other: Run, size: int) -> Side:
    """Compare sequences of a batch with the same ones alone, or at other places in the batch."""
    partners = {record.key: record for record in other.records}
    compared = differing = 0
    largest, first = 0.0, None
    for record in base.records:
        partner = partners.get(record.key)
        if partner is None or record.kept != "full" or partner.kept != "full":
            continue
        pair = _aligned(question, TensorHandle(base, record), TensorHandle(other, partner), size)
        if pair is None:
            continue
        compared += 1
        base_values, other_values = pair
        if base_values.tobytes() != other_values.tobytes():
            differing += 1
            first = first or record.key
            largest = max(largest, _relative(record, base_values, other_values))
    if not compared:
        return Side(question, None, reason="no tensor has the batch as its first dimension")
    return Side(
        question, first is None, compared, differing, first.site if first else "",
        str(first) if first else "", largest,
    )  # fmt: skip


def _aligned(question: str, base: TensorHandle, other: TensorHandle, size: int) -> Any:
    """Values of the same sequences in both runs; None if the batch is not the first dimension."""
    # A first axis that is no multiple of the batch size has another meaning, such as positions.
    if not base.shape or not base.shape[0] or base.shape[0] % size:
        return None
    rows = base.shape[0] // size
    sequences = base.raw().reshape(size, rows, -1)
    if question == "order":
        if other.shape != base.shape:
            return None
        return sequences, other.raw().reshape(size, rows, -1)[::-1]
    if other.shape != (rows, *base.shape[1:]):
        return None
    return sequences[0], other.raw().reshape(rows, -1)


def _relative(record: Record, base: Any, other: Any) -> float:
    from driftline.numerics.dtypes import DTYPES, to_float64

    dtype = DTYPES[record.dtype]
    # Formats narrower than a byte are packed; a difference is counted but not measured.
    if dtype.bits < 8:
        return 0.0
    decoded: list[Any] = [
        to_float64(np.ascontiguousarray(values).reshape(-1), dtype, values.size)
        for values in (base, other)
    ]
    first, second = decoded
    norm = float(np.linalg.norm(first))
    error = float(np.linalg.norm(np.subtract(first, second))) / norm if norm else math.inf
    return error if math.isfinite(error) else 0.0


def lines(repeated: Repeated) -> Iterator[str]:
    """The answers as lines of text."""
    asked = {
        "repeats": ("deterministic", "not deterministic"),
        "threads": ("the number of threads changes nothing", "the number of threads matters"),
        "batch": ("batch-invariant", "not batch-invariant: a sequence alone gives other bits"),
        "order": ("the order of the batch changes nothing", "the order of the batch matters"),
    }
    for side in repeated.sides:
        good, bad = asked[side.question]
        if side.same is None:
            yield f"{side.question}: not known, {side.reason}"
        elif side.same:
            yield f"{good}: {side.tensors} tensors, equal to the bit"
        else:
            more = f", relative L2 up to {side.largest:.2g}" if side.largest else ""
            why = f" ({side.reason})" if side.reason else ""
            yield f"{bad}{why}: first at {side.first_site}, {side.first_key}"
            yield f"  {side.differing} of {side.tensors} tensors differ{more}"
    yield f"{repeated.executions} executions"
