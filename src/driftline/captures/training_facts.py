"""Facts about how a program trains: the parts that all frameworks write in the same way.

Groups and their values are written at an optimizer's first step and again when they change. The
order of calls between two updates is written when it changes. It shows, for example, gradients that
are clipped before they are unscaled, or never set to zero. `step_states` writes what updates do to
the weights.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.captures.model_facts import FactsFile
from driftline.captures.step_states import Named, StepStates, TensorReader
from driftline.runs.sidecars.model_facts import MODEL, line_of

if TYPE_CHECKING:
    from driftline.captures.session import Session

MOST_RECORDS = 100_000
_MOST_CALLS = 64
_MOST_NAMES = 50_000


class Group(NamedTuple):
    """Parameters that an optimizer updates in the same way.

    Attributes:
        values: The settings, with torch's names.
        parameters: The parameters.
    """

    values: dict[str, Any]
    parameters: Sequence[Any]


class _Optimizer(NamedTuple):
    reference: weakref.ref[Any]
    number: int
    groups: list[dict[str, Any]]


class TrainingRecords:
    """Writes what a framework's watcher observes of a training.

    Args:
        session: The session, which counts the steps.
        file: The file to which lines are written.
        path_of: Returns `site.name` of a parameter; empty if it belongs to no described model.
        reader: Reads the framework's tensors.
    """

    def __init__(
        self,
        session: Session,
        file: FactsFile,
        path_of: Callable[[Any], str],
        reader: TensorReader,
    ) -> None:
        self.states = StepStates(session, file, path_of, reader)
        self._session = session
        self._path_of = path_of
        self._forget(file)

    def _forget(self, file: FactsFile) -> None:
        self._file = file
        self._optimizers: dict[int, _Optimizer] = {}
        self._numbered = 0
        self._order: list[str] = []
        self._written_order: list[str] = []
        self._clipping: dict[str, Any] = {}
        self._clipped: set[int] = set()
        self._records = 0
        # The step of the current update, read before the update, because that may end the step.
        self._updating = 0

    def after_fork(self, file: FactsFile) -> None:
        """Start anew in a forked child, because the lines written so far are the parent's."""
        self.states.after_fork(file)
        self._forget(file)

    def finish(self) -> None:
        self.states.finish()
        if self._order:
            self._write_order(self._session.clock.concluding, final=True)

    # --- Calls between two updates.

    def noted(self, word: str) -> None:
        """Add a call to the order of calls in this step."""
        if len(self._order) < _MOST_CALLS:
            self._order.append(word)

    def clipped(
        self, values: dict[str, Any], norm: float | None, parameters: Sequence[Any]
    ) -> None:
        """Note that gradients of parameters were clipped.

        Args:
            values: The settings of the clipping.
            norm: Norm of the gradients, if it is known.
            parameters: The parameters.
        """
        step = self._session.clock.concluding
        self.states.clipped(step, norm)
        names = self._newly_clipped(parameters)
        if values != self._clipping or names:
            self._clipping = values
            shown = None if norm is None else repr(norm)
            self.write("clipping", step=step, values=values, norm=shown, names=names)

    def _newly_clipped(self, parameters: Sequence[Any]) -> list[str]:
        """Names of parameters that were not clipped before."""
        if len(self._clipped) >= _MOST_NAMES or self._clipped.issuperset(map(id, parameters)):
            return []
        fresh = [parameter for parameter in parameters if id(parameter) not in self._clipped]
        self._clipped.update(map(id, fresh))
        return [name for parameter in fresh if (name := self._path_of(parameter))]

    # --- Updates.

    def number_of(self, optimizer: Any) -> int:
        """Number of an optimizer, in the order of the optimizers' first steps."""
        entry = self._optimizers.get(id(optimizer))
        # A new optimizer may have the id of a dead one.
        is_known = entry is not None and entry.reference() is optimizer
        return entry.number if entry is not None and is_known else self._numbered

    def weights_of(self, groups: Sequence[Sequence[Any]], number: int) -> list[Named]:
        """Parameters of an optimizer's groups, with their names."""
        return [
            (self._path_of(parameter) or f"(optimizer {number}).{group}.{position}", parameter)
            for group, parameters in enumerate(groups)
            for position, parameter in enumerate(parameters)
        ]

    def updated(
        self, optimizer: Any, step: int, groups: Sequence[Group] | None, state: str
    ) -> bool:
        """Note that an optimizer has made a step.

        Args:
            optimizer: The optimizer.
            step: The step of the program to which the update belongs.
            groups: Its groups, which are written if they have changed; None if they are the same.
            state: Names of its state before its first step.

        Returns:
            Whether this was its first step.
        """
        self.noted("step")
        entry = self._optimizers.get(id(optimizer))
        is_first = entry is None or entry.reference() is not optimizer
        if groups is not None or is_first:
            self._note_groups(optimizer, step, groups or (), state)
        self._write_order(step)
        return is_first

    def _note_groups(self, optimizer: Any, step: int, groups: Sequence[Group], state: str) -> None:
        number = self.number_of(optimizer)
        entry = self._optimizers.get(id(optimizer))
        values = [group.values for group in groups]
        is_known = entry is not None and entry.reference() is optimizer
        before = entry.groups if entry is not None and is_known else None
        self._numbered += not is_known
        self._optimizers[id(optimizer)] = _Optimizer(weakref.ref(optimizer), number, values)
        if before is None or len(before) != len(values):
            self._write_optimizer(optimizer, number, step, groups, state)
        if before is not None and before != values:
            changed = [
                {"values": {n: v for n, v in new.items() if old.get(n, self) != v}}
                for old, new in zip(before, values, strict=False)
            ]
            if any(group["values"] for group in changed):
                self.write("optimizer", number=number, step=step, groups=changed)

    def _write_optimizer(
        self, optimizer: object, number: int, step: int, groups: Sequence[Group], state: str
    ) -> None:
        kind = type(optimizer)
        room = _MOST_NAMES
        listed: list[dict[str, Any]] = []
        for group in groups:
            names = [self._path_of(parameter) for parameter in group.parameters[:room]]
            room -= len(names)
            named = [name for name in names if name]
            unknown = len(group.parameters) - len(named)
            listed.append(
                {"values": group.values, "names": named} | ({"unknown": unknown} if unknown else {})
            )
        self.write(
            "optimizer",
            number=number,
            step=step,
            **{"class": f"{kind.__module__}.{kind.__qualname__}"},
            **self._likeness(kind.__name__),
            state=state or "none",
            groups=listed,
        )

    def _likeness(self, name: str) -> dict[str, str]:
        """torch's name for an optimizer of this class, if it differs."""
        del name
        return {}

    # --- Writing.

    def _write_order(self, step: int, *, final: bool = False) -> None:
        order, self._order = self._order, []
        if order != self._written_order and not (final and "backward" not in order):
            self._written_order = order
            self.write("order", step=step, calls=order)

    @property
    def is_full(self) -> bool:
        return self._records >= MOST_RECORDS

    def write(self, kind: str, **fields: Any) -> None:
        if not self.is_full:
            self._records += 1
            self._file.add(MODEL, line_of(kind, **fields))


def caller(passed_by: tuple[str, ...]) -> str:
    """The program's own function and line that began the backward pass.

    Args:
        passed_by: Prefixes of the names of modules that are skipped.
    """
    for frame in _frames():
        module = frame.f_globals.get("__name__", "")
        if not str(module).startswith(passed_by):
            code = frame.f_code
            return f"{module}.{getattr(code, 'co_qualname', code.co_name)}:{frame.f_lineno}"
    return ""


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    for _ in range(40):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
