"""Level ops: the tensors of every aten call of a program, with the module it ran in.

The dispatch mode is below all modes of the program. It is on in the thread that began the capture,
and in other threads around outermost module calls and backward passes. In a capture of the whole
process it stays on in every thread that has called a module.

The site of an operator is `<module>/<operator>`, such as `model.layers.0.mlp/aten.mm`. Its visit
counts the calls of that operator in that module, step and phase. If no module is running, the
module part is the class of the optimizer that is stepping, or of a module that is not watched, or
otherwise `(program)`; the step is the current one. A backward operator belongs to the module whose
forward made the graph node that runs; without such a module, the module part is `(backward)`.

Operators outside all modules before the first call of a model are left out, unless no model is ever
called; see `build_phase`.

Views, and memory that was allocated but not written, have no values of their own and are left out.
Arguments that an operator overwrites without reading them (`out=`, `bernoulli_`) are left out too,
as are parameters, which belong to the level `params`. If operators can be executed again from the
run (it has a list of calls, and full values), a parameter that an operator reads is kept with the
port `param`, in memory order, so that its bytes are stored once for all operators that read it.
Inputs are read before the call and outputs after it; arguments that an operator has written are
outputs.

Compiled regions stay compiled: their kernels are not seen, only operators that they call back. This
file does not know how tensors are stored; the session's `emit` does that.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from driftline.captures.recorder import TensorAddress
from driftline.captures.torch.operators.build_phase import (
    BufferedTensor,
    BuildPhaseBuffer,
    a_model_is_there,
)
from driftline.captures.torch.operators.dispatch import (
    begin_watching,
    end_watching,
    has_values,
    hide_from_compiler,
    unwatch_mode_sensitive,
    watch_mode_sensitive,
    watching,
)
from driftline.captures.torch.operators.schema import Operator, memory_order, with_tensors
from driftline.captures.torch.operators.sites import OperatorSite, SiteTracker
from driftline.captures.torch.tensors import is_zero, undisturbed
from driftline.runs.records import usual_moment

Named = Sequence[tuple[str, str, torch.Tensor]]


class OperatorTap:
    """Captures the operators of the program.

    `module_calls` enters `around_root` around an outermost call. It calls `before_forward` and
    `on_forward` around each module call, by which the modules of backward operators become known.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.active = False
        self._operators: dict[Any, Operator] = {}
        self._where = SiteTracker(session)
        # A `with` block begins where the user wants it; a whole program begins by building a model.
        self._held: BuildPhaseBuffer | None = BuildPhaseBuffer() if session.global_scope else None
        self._building = False
        self._roots: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self._weights: set[int] = set()
        # To execute an operator again, the parameters that it read are needed, as they were then.
        asked = session.for_replay or "params" in session.levels
        self._keeps_weights = session.replayable and asked

    def install(self) -> None:
        self.active = True
        self._where.install()
        # Done before the mode is on, because mode-sensitive functions must be wrapped by then.
        encloses_backward = watch_mode_sensitive(self)
        begin_watching(self)
        if not encloses_backward:
            self.session.event_once(
                "backward-unseen",
                "operators of backward passes are not captured: this version of torch does not "
                "show them",
            )

    def remove(self) -> None:
        self.active = False
        end_watching(self)
        unwatch_mode_sensitive(self)
        self._where.remove()
        self._release(outside=True)
        if self._building:
            self.session.event(
                "operators-left-out",
                "a model was built and not called: of the operators that ran, those outside "
                "modules were taken for its building and left out",
            )
        self._roots.clear()
        self._weights.clear()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """A context around each outermost module call."""
        if not self.active:
            yield
            return
        self._learn_weights(module)
        # A helper such as a loss does not end the build phase; a model does.
        if self._held is not None or self._building:
            frame = self.session.current_frame()
            if frame is not None and not frame.place.root.helper:
                self._begin()
        depth = self._where.depth()
        try:
            with watching(self, lasting=self.session.global_scope):
                yield
        finally:
            self._where.back_to(depth)

    def _begin(self) -> None:
        """End the build phase at a model's first call; drop operators that ran outside modules."""
        self._release(outside=False)
        self._building = False
        self._where.count_anew()

    def _release(self, *, outside: bool) -> None:
        """Emit the buffered tensors; those of operators outside modules only if `outside`."""
        # The lock is held, because another thread may be adding a tensor.
        with self.session.recorder.lock:
            held, self._held = self._held, None
            for waiting in held.release() if held is not None else ():
                if outside or not waiting.outside:
                    self._show(waiting)

    @contextmanager
    def around_backward(self) -> Generator[None]:
        self._where.enter_backward()
        with watching(self):
            yield

    def unseen(self, what: str) -> None:
        self.session.event_once(
            "operators-unseen",
            f"the operators of {what} are not captured: torch computes it differently when it is "
            "watched",
        )

    def before_forward(self, frame: Any, inputs: Named) -> None:
        self._where.enter(frame.site)

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        self._where.leave(frame.site)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and show its tensors to the session."""
        if not self.active:
            return func(*args, **kwargs)
        operator_site = operator = None
        visit = 0
        # Capture must not raise into the program; an operator that cannot be described only runs.
        try:
            operator = self._operators.get(func)
            if operator is None:
                operator = self._operators[func] = Operator(func)
            if operator.tensors:
                args = with_tensors(args, operator.tensors)
            if not operator.silent:
                operator_site = self._where.operator_site(func, operator)
            if operator_site is not None:
                # Visits are counted even if nothing is captured, so that they are the same in every
                # capture.
                visit = operator_site.next_visit()
                if operator_site.outside and self._building:
                    operator_site = None
                elif operator_site.input:
                    with undisturbed():
                        self._emit_inputs(operator_site, operator, visit, args, kwargs)
        except Exception as error:
            operator_site = None
            self._lost(func, error)
        result = func(*args, **kwargs)
        # The outputs of a running collective have no values yet; `wait_tensor` returns them.
        if operator_site is None or operator is None or operator.in_flight:
            return result
        if operator_site.output:
            try:
                with undisturbed():
                    self._emit_outputs(operator_site, operator, visit, result)
                    if operator.written:
                        self._emit_written(operator_site, operator, visit, args, kwargs)
            except Exception as error:
                self._lost(func, error)
        return result

    def _learn_weights(self, root: nn.Module) -> None:
        try:
            held = {
                tensor.untyped_storage().data_ptr()
                for tensor in (*root.parameters(), *root.buffers())
                if type(tensor) in (torch.Tensor, nn.Parameter)
            }
            # All tensors without memory have the address 0.
            held.discard(0)
            self._roots[root] = held
            self._weights = set[int]().union(*self._roots.values())
        except Exception as error:
            self.session.event_once("weights-unknown", f"parameters are read as inputs: {error}")

    def _emit_inputs(
        self,
        operator_site: OperatorSite,
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
                    self._emit(operator_site, operator, visit, "input", name, str(index), value)
        for name, value in kwargs.items():
            if name not in operator.unread and isinstance(value, (torch.Tensor, list, tuple)):
                self._emit(operator_site, operator, visit, "input", name, "", value)

    def _emit_outputs(
        self, operator_site: OperatorSite, operator: Operator, visit: int, result: Any
    ) -> None:
        if isinstance(result, torch.Tensor):
            self._emit(operator_site, operator, visit, "output", "0", "", result)
        elif isinstance(result, (list, tuple)):
            for index, value in enumerate(cast("Sequence[Any]", result)):
                if index not in operator.scratch:
                    self._emit(operator_site, operator, visit, "output", str(index), "", value)

    def _emit_written(
        self,
        operator_site: OperatorSite,
        operator: Operator,
        visit: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for index, name in operator.written:
            value = args[index] if index < len(args) else kwargs.get(name)
            self._emit(operator_site, operator, visit, "output", name, "", value)

    def _emit(
        self,
        operator_site: OperatorSite,
        operator: Operator,
        visit: int,
        port: str,
        slot: str,
        alias: str,
        value: Any,
    ) -> None:
        if isinstance(value, (list, tuple)):
            for index, part in enumerate(cast("Sequence[Any]", value)):
                self._emit(operator_site, operator, visit, port, f"{slot}.{index}", alias, part)
            return
        if not isinstance(value, torch.Tensor) or not has_values(value):
            return
        # Parameters are recognised by their memory, which their views and transposes share.
        if port == "input" and self._weights and value.layout is torch.strided:
            plain = type(value) in (torch.Tensor, nn.Parameter) and not is_zero(value)
            if plain and value.untyped_storage().data_ptr() in self._weights:
                if not self._keeps_weights:
                    return
                # In memory order, a transposed weight has the same bytes as the weight itself.
                port, value = (
                    "param",
                    value.permute(memory_order(value) or tuple(range(value.dim()))),
                )
        address = TensorAddress(
            operator_site.site,
            port,
            slot,
            operator_site.step,
            visit,
            operator_site.phase,
            usual_moment(port),
            alias,
            operator.full_name,
        )
        waiting = BufferedTensor(operator_site.outside, address, value)
        if self._held is None:
            self._show(waiting)
        else:
            self._hold(waiting)

    def _hold(self, waiting: BufferedTensor) -> None:
        with self.session.recorder.lock:
            held = self._held
            if held is None:
                self._show(waiting)
                return
            held.keep(waiting)
            if held.full:
                # If a model exists, the buffered operators have built it; otherwise there is no
                # build phase.
                self._building = a_model_is_there()
                self._release(outside=not self._building)

    def _show(self, waiting: BufferedTensor) -> None:
        self.session.emit(waiting.address, waiting.tensor)

    def _lost(self, func: Any, error: Exception) -> None:
        self.session.event_once(
            "operator-lost", f"{func} not captured: {error}", operator=str(func)
        )


hide_from_compiler(OperatorTap.around_backward)
