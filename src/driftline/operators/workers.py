"""Sharing operators among workers: each opens the same source and checks some of its calls.

A call is identified by its position among those that the user's filters leave, which is the same
wherever the same dump is opened.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.execution.codec import decode, encode
from driftline.execution.jobs import Executor, Job, Task, folder_for
from driftline.numerics import kernel
from driftline.operators.result import Figures, OperatorCall, OutputRow
from driftline.operators.source import Checked, CheckOptions, Source, open_source

if TYPE_CHECKING:
    from driftline.execution.jobs import Say

KINDS = (CheckOptions, OperatorCall, Figures)
_ROUNDS = 8
"""Tasks per worker: calls differ much in cost, so small tasks balance the load."""
PLACE = "dump"


class OperatorsWorker:
    """Checks calls of one source."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._source: Source | None = None

    def absent(self) -> list[tuple[str, str]]:
        """What is missing here: the dump must be present and the same on every worker."""
        if fingerprint(self._opened()) != self._about["calls"]:
            return [(PLACE, f"holds another '{self._about['path']}': its operators are others")]
        return []

    def do(self, work: Sequence[int], say: Say) -> Any:
        """Check the calls of a range of positions; returns their encoded rows."""
        del say
        source = self._opened()
        encoded: list[Any] = []
        for number in range(*work):
            checked = source.at(number)
            encoded.append([_encoded_row(checked, row) for row in checked.rows])
        return encoded

    def _opened(self) -> Source:
        if self._source is None:
            # Sums come out the same to the last bit only with as many threads.
            if threads := self._about["threads"]:
                import torch

                torch.set_num_threads(threads)
            options: CheckOptions = decode(self._about["options"], KINDS)
            self._source = open_source(Path(self._about["path"]), options)
        return self._source


def _encoded_row(checked: Checked, row: OutputRow) -> list[Any]:
    # Most rows share the call of their operator, which the receiver knows already.
    own = None if row.call is checked.call else encode(row.call)
    return [own, row.slot, row.dtype, list(row.shape), encode(row.figures), row.path]


def fingerprint(source: Source) -> str:
    """A digest that identifies the calls of a source."""
    # Only what identifies a call goes into the digest; parameters may be large.
    digest = hashlib.sha256()
    for number in range(len(source)):
        call = source.call(number)
        digest.update(repr((call[:8], call.path)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_all(
    source: Source,
    path: Path,
    options: CheckOptions,
    executor: Executor,
    progress: Callable[[int, int], None] | None,
) -> list[Checked]:
    """Check every call of a source by workers; the result is in the order of the source.

    Raises:
        DriftlineError: A worker cannot do it.
    """
    total = len(source)
    calls = fingerprint(source)
    per_task = max(1, total // (_ROUNDS * executor.workers))
    spans = [(start, min(start + per_task, total)) for start in range(0, total, per_task)]
    rows: list[Any] = [None] * total
    done = 0

    def take(task: int, answer: Sequence[Any]) -> None:
        nonlocal done
        first, last = spans[task]
        rows[first:last] = answer
        done += last - first
        if progress is not None:
            progress(done, total)

    # Only if torch is already loaded: an ATB dump does not need it.
    torch = sys.modules.get("torch")
    paths = [str(path), *([str(options.csv)] if options.csv is not None else [])]
    about = {
        "path": str(path),
        "options": encode(options),
        "calls": calls,
        "threads": torch.get_num_threads() if torch is not None else 0,
    }
    # Labels of tasks are shown when a worker fails.
    tasks = [
        Task(list(span), needs=(PLACE,), called=str(source.call(span[0]).site)) for span in spans
    ]
    executor.run(Job("operators", about, folder_for(*paths), kernel.active()), tasks, take)
    return [
        Checked(
            source.call(number), tuple(_row(source.call(number), encoded) for encoded in call_rows)
        )
        for number, call_rows in enumerate(rows)
    ]


def _row(call: OperatorCall, encoded: Sequence[Any]) -> OutputRow:
    own, slot, dtype, shape, figures, path = encoded
    whose = call if own is None else decode(own, KINDS)
    return OutputRow(whose, slot, dtype, tuple(shape), decode(figures, KINDS), path)
