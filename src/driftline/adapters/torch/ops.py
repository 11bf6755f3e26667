"""Every aten call of a model, with the module it ran in.

A dispatch mode sits around each call of a root module and around each backward pass, and is taken
off again when that is over: a mode that stayed would be popped in place of the program's own. The
site of an operator is `<module>/<operator>`, such as `model.layers.0.mlp/aten.mm`; its visit is the
nth call of that operator in that module, in that step and phase, whether selected or not. Backward
operators belong to the module whose forward made the graph node that runs; without one, the module
part is `(backward)`.

Views, and memory that was allocated but not yet written, have no values of their own and are left
out; so is what an operator overwrites unread (`out=`, `bernoulli_`), and parameters as inputs: they
are the parameter level's. Inputs are read before the call, outputs after it, and what an operator
wrote into its arguments counts as output.

Compiled regions stay compiled: their kernels run unseen, only what they call back is seen.
How a tensor is kept is not known here; the session's `emit` does that.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from driftline.adapters.torch.dispatch import (
    has_values,
    hide_from_compiler,
    unwatch_backward,
    watch_backward,
    watching,
)
from driftline.adapters.torch.schemas import Operator
from driftline.adapters.torch.snapshot import undisturbed

Named = Sequence[tuple[str, str, torch.Tensor]]

BACKWARD = "(backward)"
OUTSIDE = "(outside)"
# Private parts of torch, of which the stubs know nothing.
_C: Any = torch._C
_autograd: Any = torch.autograd

_LEAF = 2**64 - 1
_BOUNDARIES = 1_000_000


class _Place:
    """One operator overload in one module, phase and step: what is wanted of it.

    Attributes:
        calls: How often the operator was called there so far, shared by its overloads.
    """

    __slots__ = ("calls", "input", "output", "phase", "site", "step")

    def __init__(
        self,
        site: str,
        phase: str,
        step: int,
        calls: list[int],
        *,
        wants_input: bool,
        wants_output: bool,
    ) -> None:
        self.site = site
        self.phase = phase
        self.step = step
        self.input = wants_input
        self.output = wants_output
        self.calls = calls


class _Marks:
    """Which module was running from which autograd sequence number on, in one thread."""

    __slots__ = ("numbers", "sites")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.sites: list[str] = []

    def put(self, site: str) -> None:
        self.numbers.append(_autograd._get_sequence_nr())
        self.sites.append(site)
        if len(self.numbers) > _BOUNDARIES:
            del self.numbers[: _BOUNDARIES // 2], self.sites[: _BOUNDARIES // 2]

    def site(self, number: int) -> str:
        index = bisect_right(self.numbers, number) - 1
        return self.sites[index] if index >= 0 else ""


class _Thread(threading.local):
    """The modules under way in this thread, and the marks they left."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.marks = _Marks()


class OperatorTap:
    """Reads the operators of every root call and every backward pass.

    `modules.py` calls `around_root` around a root's call, and `before_forward` and `on_forward`
    around each module's, which tells the backward operators' modules.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.active = False
        self._operators: dict[Any, Operator] = {}
        self._places: dict[tuple[str, Any, str], _Place] = {}
        self._calls: dict[tuple[str, str], list[int]] = {}
        self._step = -1
        self._thread = _Thread()
        self._backward = self._thread.marks
        self._roots: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self._weights: set[int] = set()

    def install(self) -> None:
        self.active = True
        if not watch_backward(self):
            self.backward_unseen("this version of torch does not show its backward passes")

    def remove(self) -> None:
        self.active = False
        unwatch_backward(self)
        self._places.clear()
        self._roots.clear()
        self._weights.clear()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """Called by `modules.py` around each call of a root module."""
        if not self.active:
            yield
            return
        self._learn_weights(module)
        stack = self._thread.stack
        depth = len(stack)
        try:
            with watching(self):
                yield
        finally:
            del stack[depth:]  # what an exception left

    @contextmanager
    def around_backward(self) -> Generator[None]:
        # The engine may run nodes in threads of its own, which see this mode but no table.
        self._backward = self._thread.marks
        with watching(self):
            yield

    def backward_unseen(self, reason: str) -> None:
        self.session.event_once(
            "backward-unseen", f"operators of a backward pass are not captured: {reason}"
        )

    def before_forward(self, frame: Any, inputs: Named) -> None:
        thread = self._thread
        thread.stack.append(frame.site)
        thread.marks.put(frame.site)

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        thread = self._thread
        while thread.stack and thread.stack.pop() != frame.site:
            pass
        thread.marks.put(thread.stack[-1] if thread.stack else "")

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and show its tensors to the session."""
        if not self.active:
            return func(*args, **kwargs)
        place = operator = None
        visit = 0
        try:
            operator = self._operators.get(func)
            if operator is None:
                operator = self._operators[func] = Operator(func)
            if not operator.silent:
                place = self._place(func, operator)
                visit = place.calls[0]
                place.calls[0] = visit + 1
                if place.input:
                    with undisturbed():
                        self._emit_inputs(place, operator, visit, args, kwargs)
        except Exception as error:
            place = None
            self._lost(func, error)
        result = func(*args, **kwargs)
        if place is not None and operator is not None and place.output:
            try:
                with undisturbed():
                    self._emit_outputs(place, operator, visit, result)
                    if operator.written:
                        self._emit_written(place, operator, visit, args, kwargs)
            except Exception as error:
                self._lost(func, error)
        return result

    def _place(self, func: Any, operator: Operator) -> _Place:
        session = self.session
        frame = session.current_frame()
        if frame is not None:
            site, phase, step = frame.site, frame.phase, frame.step
        else:
            site, phase = self._site_of_node()
            step = session.step
        if step != self._step:
            self._step = step
            self._places.clear()
            self._calls.clear()
        place = self._places.get((site, func, phase))
        if place is None:
            full = f"{site}/{operator.name}"
            wanted: bool = session.wants_step(step)
            place = self._places[(site, func, phase)] = _Place(
                full,
                phase,
                step,
                self._calls.setdefault((full, phase), [0]),
                wants_input=wanted and session.wants(full, operator.full_name, "input"),
                wants_output=wanted and session.wants(full, operator.full_name, "output"),
            )
        return place

    def _site_of_node(self) -> tuple[str, str]:
        node = _C._current_autograd_node()
        if node is None:
            return OUTSIDE, "forward"
        number = node._sequence_nr()
        marks = self._thread.marks if self._thread.marks.numbers else self._backward
        return (marks.site(number) if number != _LEAF else "") or BACKWARD, "backward"

    def _learn_weights(self, root: nn.Module) -> None:
        try:
            held = {
                tensor.untyped_storage().data_ptr()
                for tensor in (*root.parameters(), *root.buffers())
                if type(tensor) in (torch.Tensor, nn.Parameter)
            }
            held.discard(0)
            self._roots[root] = held
            self._weights = set[int]().union(*self._roots.values())
        except Exception as error:
            self.session.event_once("weights-unknown", f"parameters are read as inputs: {error}")

    def _emit_inputs(
        self,
        place: _Place,
        operator: Operator,
        visit: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        names = operator.arguments
        for index, value in enumerate(args):
            if isinstance(value, (torch.Tensor, list, tuple)):
                name = names[index] if index < len(names) else str(index)
                if name not in operator.unread:
                    self._emit(place, operator, visit, "input", name, str(index), value)
        for name, value in kwargs.items():
            if name not in operator.unread and isinstance(value, (torch.Tensor, list, tuple)):
                self._emit(place, operator, visit, "input", name, "", value)

    def _emit_outputs(self, place: _Place, operator: Operator, visit: int, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._emit(place, operator, visit, "output", "0", "", result)
        elif isinstance(result, (list, tuple)):
            for index, value in enumerate(cast("Sequence[Any]", result)):
                if index not in operator.scratch:
                    self._emit(place, operator, visit, "output", str(index), "", value)

    def _emit_written(
        self,
        place: _Place,
        operator: Operator,
        visit: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for index, name in operator.written:
            value = args[index] if index < len(args) else kwargs.get(name)
            self._emit(place, operator, visit, "output", name, "", value)

    def _emit(
        self,
        place: _Place,
        operator: Operator,
        visit: int,
        port: str,
        slot: str,
        alias: str,
        value: Any,
    ) -> None:
        if isinstance(value, (list, tuple)):
            for index, part in enumerate(cast("Sequence[Any]", value)):
                self._emit(place, operator, visit, port, f"{slot}.{index}", alias, part)
            return
        if not isinstance(value, torch.Tensor) or not has_values(value):
            return
        if port == "input" and self._weights and value.layout is torch.strided:
            plain = type(value) in (torch.Tensor, nn.Parameter)
            if plain and value.untyped_storage().data_ptr() in self._weights:
                return
        self.session.emit(
            place.site,
            port,
            slot,
            value,
            alias=alias,
            class_name=operator.full_name,
            visit=visit,
            phase=place.phase,
            step=place.step,
        )

    def _lost(self, func: Any, error: Exception) -> None:
        self.session.event_once(
            "operator-lost", f"{func} not captured: {error}", operator=str(func)
        )


hide_from_compiler(OperatorTap.around_backward)
