"""Operators are shared out among workers: each opens the same source and checks some of its calls.

A call is known by its place among those that the user's filters leave, which is the same wherever
the same dump is opened.
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
from driftline.operators.source import Ask, Checked, Source, open_source

if TYPE_CHECKING:
    from driftline.execution.jobs import Say

KINDS = (Ask, OperatorCall, Figures)
_ROUNDS = 8
"""Tasks for each worker: calls differ much in what they cost."""
PLACE = "dump"


class OperatorsWorkshop:
    """Checks calls of one source."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._source: Source | None = None

    def absent(self) -> list[tuple[str, str]]:
        """Whether the dump is here, and the same."""
        if fingerprint(self._opened()) != self._about["calls"]:
            return [(PLACE, f"holds another '{self._about['path']}': its operators are others")]
        return []

    def do(self, work: Sequence[int], say: Say) -> Any:
        """The rows of calls from one place to another."""
        del say
        source = self._opened()
        found: list[Any] = []
        for number in range(*work):
            checked = source.at(number)
            found.append([_told(checked, row) for row in checked.rows])
        return found

    def _opened(self) -> Source:
        if self._source is None:
            # Sums come out the same to the last bit only with as many threads.
            if threads := self._about["threads"]:
                import torch

                torch.set_num_threads(threads)
            ask: Ask = decode(self._about["ask"], KINDS)
            self._source = open_source(Path(self._about["path"]), ask)
        return self._source


def _told(checked: Checked, row: OutputRow) -> list[Any]:
    own = None if row.call is checked.call else encode(row.call)
    return [own, row.slot, row.dtype, list(row.shape), encode(row.figures), row.path]


def fingerprint(source: Source) -> str:
    """What tells the calls of one source from those of another."""
    found = hashlib.sha256()
    for number in range(len(source)):
        call = source.call(number)
        found.update(repr((call[:8], call.path)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_all(
    source: Source,
    path: Path,
    ask: Ask,
    executor: Executor,
    progress: Callable[[int, int], None] | None,
) -> list[Checked]:
    """Every call of a source, in its order, checked by workers.

    Raises:
        DriftlineError: A worker cannot do it.
    """
    total = len(source)
    calls = fingerprint(source)
    each = max(1, total // (_ROUNDS * executor.workers))
    spans = [(at, min(at + each, total)) for at in range(0, total, each)]
    rows: list[Any] = [None] * total
    done = 0

    def take(task: int, answer: Sequence[Any]) -> None:
        nonlocal done
        first, last = spans[task]
        rows[first:last] = answer
        done += last - first
        if progress is not None:
            progress(done, total)

    torch = sys.modules.get("torch")
    paths = [str(path), *([str(ask.csv)] if ask.csv is not None else [])]
    about = {
        "path": str(path),
        "ask": encode(ask),
        "calls": calls,
        "threads": torch.get_num_threads() if torch is not None else 0,
    }
    tasks = [
        Task(list(span), needs=(PLACE,), called=str(source.call(span[0]).site)) for span in spans
    ]
    executor.run(Job("operators", about, folder_for(*paths), kernel.active()), tasks, take)
    return [
        Checked(source.call(number), tuple(_row(source.call(number), told) for told in found))
        for number, found in enumerate(rows)
    ]


def _row(call: OperatorCall, told: Sequence[Any]) -> OutputRow:
    own, slot, dtype, shape, figures, path = told
    whose = call if own is None else decode(own, KINDS)
    return OutputRow(whose, slot, dtype, tuple(shape), decode(figures, KINDS), path)
