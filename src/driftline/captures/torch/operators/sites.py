"""The site, phase, step and visit of an operator.

Inside a module's call an operator belongs to the module. Outside all modules, the module part of
its site is the class of the optimizer that is stepping, or of a module that is not watched, or
otherwise `(program)`; the step is that of the model called last. In a backward pass, the module
part is the module whose forward made the graph node that runs, or `(backward)` without one. This
file reads no tensors.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from driftline.captures.torch.layers import must_not_watch
from driftline.captures.torch.operators.dispatch import break_graphs
from driftline.captures.torch.operators.schema import Operator

BACKWARD = "(backward)"
PROGRAM = "(program)"
# Private parts of torch, which are not in its type stubs.
_C: Any = torch._C
_autograd: Any = torch.autograd

# Sequence number of all nodes of leaves; other nodes are counted.
_LEAF = 2**64 - 1
# Limits the memory used by programs that run for days without a backward pass.
_BOUNDARIES = 1_000_000


class OperatorSite:
    """One operator overload in one module, phase and step, and which of its ports are captured.

    Attributes:
        outside: Whether it runs outside all modules.
        calls: Number of the operator's calls there so far, shared by its overloads.
        input: Whether inputs are captured.
        output: Whether outputs are captured.
    """

    __slots__ = ("calls", "input", "output", "outside", "phase", "site", "step")

    def __init__(
        self,
        site: str,
        phase: str,
        step: int,
        calls: list[int],
        *,
        outside: bool,
        wants_input: bool,
        wants_output: bool,
    ) -> None:
        self.site = site
        self.phase = phase
        self.step = step
        self.calls = calls
        self.outside = outside
        self.input = wants_input
        self.output = wants_output

    def next_visit(self) -> int:
        visit = self.calls[0]
        self.calls[0] = visit + 1
        return visit


class _Marks:
    """The module that was running at each autograd sequence number, in one thread."""

    __slots__ = ("numbers", "sites")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.sites: list[str] = []

    def put(self, site: str) -> None:
        self.numbers.append(_autograd._get_sequence_nr())
        self.sites.append(site)
        # The oldest half is dropped, because nodes of old steps do not run any more.
        if len(self.numbers) > _BOUNDARIES:
            del self.numbers[: _BOUNDARIES // 2], self.sites[: _BOUNDARIES // 2]

    def site(self, number: int) -> str:
        index = bisect_right(self.numbers, number) - 1
        return self.sites[index] if index >= 0 else ""


class _Step(NamedTuple):
    """A running step of an optimizer, identified by its Python frame.

    torch's hooks are called when a step begins and when it is done, but not if it raises. So an
    operator is inside a step exactly if the step's frame is below it on the stack. The frame itself
    is not stored, because it would keep the program's tensors alive.
    """

    frame: int
    code: CodeType
    name: str


class _Steps:
    """The running optimizer steps of one thread, outermost first; a step may contain another."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def begin(self, frame: FrameType, name: str) -> None:
        self._forget_over(frame.f_back)
        self._steps.append(_Step(id(frame), frame.f_code, name))

    def end(self, frame: FrameType) -> None:
        self._forget_over(frame.f_back)

    def current(self, frame: FrameType | None) -> str:
        """Name of the innermost optimizer in whose step `frame` is; empty without one."""
        if not self._steps:
            return ""
        self._forget_over(frame)
        return self._steps[-1].name if self._steps else ""

    def _forget_over(self, frame: FrameType | None) -> None:
        """Forget the steps that are not below `frame`: they are done, or have raised."""
        while self._steps:
            last, below = self._steps[-1], frame
            # The id is not enough, because another function's frame may have a dead frame's id.
            while below is not None and (id(below) != last.frame or below.f_code is not last.code):
                below = below.f_back
            if below is not None:
                return
            self._steps.pop()


class _Thread(threading.local):
    """The running modules and optimizer steps of this thread, and the marks of its modules."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.marks = _Marks()
        self.optimizers = _Steps()


class SiteTracker:
    """Follows modules, optimizers and backward passes, and finds the site of each operator."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._sites: dict[tuple[str, Any, str], OperatorSite] = {}
        self._calls: dict[tuple[str, str], tuple[int, list[int]]] = {}
        self._outside_calls: dict[tuple[str, str, int], list[int]] = {}
        self._thread = _Thread()
        self._backward = self._thread.marks
        self._hooks: list[Any] = []

    def install(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._sites.clear()

    def operator_site(self, func: Any, operator: Operator) -> OperatorSite | None:
        """The site of an operator that is about to run; None if it must not be captured."""
        session = self._session
        frame = session.current_frame()
        if frame is not None:
            site, phase, step, outside = frame.site, frame.phase, frame.step, False
        else:
            site, phase, outside = self._without_frame()
            # Data workers and traced scripts run operators that belong to no step.
            if outside and must_not_watch():
                return None
            step = session.step
        operator_site = self._sites.get((site, func, phase))
        # A new step needs new decisions; the same step is served from the cache.
        if operator_site is None or operator_site.step != step:
            full = f"{site}/{operator.name}"
            wanted: bool = session.wants_step(step)
            operator_site = self._sites[(site, func, phase)] = OperatorSite(
                full,
                phase,
                step,
                # Visits are not counted in a step that is not captured.
                self._count(full, phase, step, framed=frame is not None) if wanted else [0],
                outside=outside,
                wants_input=wanted and session.wants(full, operator.full_name, "input"),
                wants_output=wanted and session.wants(full, operator.full_name, "output"),
            )
            if outside:
                session.ran_outside(step)
        return operator_site

    def count_anew(self) -> None:
        """Reset the counts of operators outside modules."""
        self._sites.clear()
        self._outside_calls.clear()

    def depth(self) -> int:
        return len(self._thread.stack)

    def back_to(self, depth: int) -> None:
        """Remove entries that an exception left, after an outermost call."""
        del self._thread.stack[depth:]

    def enter(self, site: str) -> None:
        thread = self._thread
        thread.stack.append(site)
        thread.marks.put(site)

    def leave(self, site: str) -> None:
        thread = self._thread
        # An exception skips the `leave` of inner modules.
        while thread.stack and thread.stack.pop() != site:
            pass
        thread.marks.put(thread.stack[-1] if thread.stack else "")

    def enter_backward(self) -> None:
        # The engine may run nodes in its own threads, which have the mode but no marks.
        self._backward = self._thread.marks

    def _count(self, full: str, phase: str, step: int, *, framed: bool) -> list[int]:
        """The counter of an operator's calls in one step.

        Inside a module, steps only increase. Outside, the step is that of the model called last, so
        a step may occur again.
        """
        if not framed:
            return self._outside_calls.setdefault((full, phase, step), [0])
        last, calls = self._calls.get((full, phase), (-1, [0]))
        if last != step:
            calls = [0]
            self._calls[(full, phase)] = (step, calls)
        return calls

    def _without_frame(self) -> tuple[str, str, bool]:
        """Module part, phase, and whether it is outside all modules, if no module is running."""
        node = _C._current_autograd_node()
        thread = self._thread
        if node is None:
            site = self._session.unwatched_module() or thread.optimizers.current(sys._getframe())
            return site or PROGRAM, "forward", True
        number = node._sequence_nr()
        # A thread of the engine has no marks; those of the thread that began the pass are used.
        marks = thread.marks if thread.marks.numbers else self._backward
        return (marks.site(number) if number != _LEAF else "") or BACKWARD, "backward", False

    # torch calls both hooks from the frame of the optimizer's step.

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._thread.optimizers.begin(sys._getframe(1), type(optimizer).__name__)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._thread.optimizers.end(sys._getframe(1))


break_graphs(SiteTracker._before_optimizer, SiteTracker._after_optimizer)
