"""The error check at operator level: find the aten call that made the first value not finite.

Every output is screened by one pass for the largest magnitude. Only if an output is suspicious, the
call's inputs are read too; arguments that the call overwrites were copied before. On devices other
than the CPU nothing is waited for (see `devices`). `rules` decides which call is a producer.

Nothing here changes what the program computes: tensors are read, never written.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from driftline.captures.torch.errcheck.devices import DeviceWatch, Tests, WatchedCall
from driftline.captures.torch.errcheck.inspect import (
    UNREAD,
    Origin,
    Origins,
    Reading,
    is_mask,
    pattern_of,
    peak,
    plain,
    read,
    shape_of,
    tensors_in,
)
from driftline.captures.torch.errcheck.modules import ModuleTap
from driftline.captures.torch.errcheck.reporter import Call, Part, Reporter
from driftline.captures.torch.errcheck.rules import CLAMPS, LOGARITHMS, UNDERFLOWS, Input, judge
from driftline.captures.torch.errcheck.source_lines import LineMarks, here, line_of, stack
from driftline.captures.torch.layers import is_compiled
from driftline.captures.torch.operators.dispatch import (
    begin_watching,
    end_watching,
    hide_from_compiler,
    unwatch_mode_sensitive,
    watch_mode_sensitive,
    watching,
)
from driftline.captures.torch.operators.schema import (
    WatchedOperator,
    inputs_of,
    numbers_in,
    outputs_of,
    parameters_in,
    with_tensors,
)
from driftline.captures.torch.operators.sites import OperatorSite, SiteTracker
from driftline.captures.torch.tensors import undisturbed

Named = Sequence[tuple[str, str, torch.Tensor]]
COPIED = 64 << 20
"""Largest number of bytes that are copied of the arguments which one call is about to overwrite."""
_ORDINARY = (torch.Tensor, nn.Parameter)
_current_node: Any = torch._C._current_autograd_node
_LEAF = 2**64 - 1
Gone = dict[str, tuple[torch.Tensor | None, Reading | None]]
"""The arguments that a call has overwritten, by slot: a copy, or a reading."""


class _Executed(NamedTuple):
    """One operator call that has run.

    Attributes:
        before: The arguments that it has overwritten; None if there are none.
        tested: Results of tests of arguments that it has overwritten on a device.
    """

    operator: WatchedOperator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    before: Gone | None
    tested: Tests

    def inputs(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        return inputs_of(self.operator, self.args, self.kwargs)

    def outputs(self) -> Iterator[tuple[str, torch.Tensor]]:
        return outputs_of(self.operator, self.args, self.kwargs, self.result)


class _ReadInput(NamedTuple):
    """An input of a suspicious call: for the report, for the rules, and its plain tensor."""

    part: Part
    judged: Input
    value: torch.Tensor | None


class ErrorTap:
    """The error check at operator level: both a `session.Tap` and a `dispatch.Watcher`."""

    def __init__(self, session: Any, reporter: Reporter) -> None:
        self.session = session
        self.reporter = reporter
        self.active = False
        self._operators: dict[Any, WatchedOperator] = {}
        self._where = SiteTracker(session)
        self._origins = Origins()
        self._device = DeviceWatch(reporter)
        self._regions = ModuleTap(session, reporter, self._origins, self._device)
        self._lines = LineMarks()
        types = reporter.options.types
        self._saturation = "saturation" in types
        self._closely = (CLAMPS if self._saturation else frozenset[str]()) | (
            UNDERFLOWS if "underflow" in types else frozenset[str]()
        )

    def install(self) -> None:
        self.active = True
        self._where.install()
        # Done before the mode is on, because mode-sensitive functions must be wrapped by then.
        if not watch_mode_sensitive(self):
            self.reporter.remarks.setdefault(
                "backward passes are not watched: this version of torch does not show them"
            )
        begin_watching(self)

    def remove(self) -> None:
        self.active = False
        end_watching(self)
        unwatch_mode_sensitive(self)
        self._where.remove()
        with undisturbed():
            # Waits for the device, because the last verdicts need the last figures.
            self._device.finish()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        if not self.active:
            yield
            return
        depth = self._where.depth()
        try:
            with watching(self, lasting=self.session.global_scope):
                yield
        finally:
            self._where.back_to(depth)

    @contextmanager
    def around_backward(self) -> Generator[None]:
        self._where.enter_backward()
        self._lines.enter_backward()
        with watching(self):
            yield

    def unseen(self, what: str) -> None:
        self.reporter.remarks.setdefault(
            f"{what} is not watched: torch computes it differently when it is"
        )

    def before_forward(self, frame: Any, inputs: Named) -> None:
        self._where.enter(frame.site)

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        self._where.leave(frame.site)
        if is_compiled(frame.module):  # its operators are not observed, but its outputs are checked
            self._regions.on_forward(frame, inputs, outputs)
        self._device.step_may_be_over()

    # --- One operator.

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and check its outputs."""
        if not self.active:
            return func(*args, **kwargs)
        operator = before = None
        tested = Tests({}, {})
        looking = True
        try:
            operator = self._operators.get(func)
            if operator is None:
                operator = self._operators[func] = WatchedOperator(func)
            if operator.tensors:
                args = with_tensors(args, operator.tensors)
            # Views and allocations compute nothing, but new memory has to be marked as unwritten.
            if operator.silent or operator.collective:
                looking = operator.allocates or operator.collective
            elif operator.overwrites:
                with undisturbed():
                    before = self._about_to_go(operator, args, kwargs)
                    tested = self._device.before(operator, args, kwargs)
        except Exception as error:
            looking = False
            self._lost(func, error)
        result = func(*args, **kwargs)
        if not looking or operator is None:
            return result
        # Read before `undisturbed` switches it off.
        recording = torch.is_grad_enabled()
        try:
            with undisturbed():
                if operator.allocates:
                    self._unwritten(result)
                elif operator.collective:
                    self._received((*args, *kwargs.values(), result))
                else:
                    executed = _Executed(operator, args, kwargs, result, before, tested)
                    self._look(func, executed, recording=recording)
        except Exception as error:
            self._lost(func, error)
        return result

    def _look(self, func: Any, executed: _Executed, *, recording: bool) -> None:
        operator, args, kwargs = executed.operator, executed.args, executed.kwargs
        operator_site = self._where.operator_site(func, operator)
        if operator_site is None:
            return
        visit = operator_site.next_visit()
        self.reporter.calls += 1
        # Only a forward pass makes nodes whose lines are needed in a backward pass.
        if recording and operator_site.phase == "forward":
            self._lines.mark()
        suspicious, on_device = self._screen(executed, operator_site)
        if on_device:
            call = self._call(
                operator_site,
                operator,
                visit,
                parameters_in(operator, args, kwargs),
                full_stack=False,
            )
            watched = WatchedCall(
                call,
                operator.short,
                numbers_in(args, kwargs),
                self.reporter.allows(operator_site.site, operator.full_name),
            )
            inputs, outputs = list(executed.inputs()), list(executed.outputs())
            self._device.add(watched, inputs, outputs, executed.tested)
        elif suspicious:
            with self.reporter.lock:
                self._inspect(executed, operator_site, visit)

    def _screen(self, executed: _Executed, operator_site: OperatorSite) -> tuple[bool, bool]:
        """Whether the outputs of a call are suspicious, and whether some are on a device."""
        operator = executed.operator
        reporter, origins = self.reporter, self._origins
        suspicious = operator.short in self._closely
        on_device = False
        for _, tensor in executed.outputs():
            value: torch.Tensor | None = tensor
            # The test for ordinary tensors is inlined, because a call would take longer than it.
            if (
                type(tensor) not in _ORDINARY
                or tensor.layout is not torch.strided
                or tensor.is_nested
            ):
                value = plain(tensor)
                if value is None:
                    continue
            pattern = pattern_of(value.dtype)
            if pattern is None or not value.numel():
                continue
            if not value.is_cpu:
                on_device = on_device or not value.is_meta
                continue
            # This is the only pass over the values of most outputs.
            most = peak(value, pattern)
            if most > pattern.top:
                suspicious = True
                continue
            key = (operator_site.site, pattern.name)
            if most > reporter.peaks.get(key, -1):
                reporter.peaks[key] = most
            if most == pattern.top and self._saturation and pattern.narrow:
                suspicious = True
            # New finite values replace those that an earlier operator left in this memory.
            if operator.mutates and origins:
                origins.overwritten(value)
        return suspicious, on_device

    def _inspect(self, executed: _Executed, operator_site: OperatorSite, visit: int) -> None:
        operator, args, kwargs = executed.operator, executed.args, executed.kwargs
        reporter, origins = self.reporter, self._origins
        inputs = [self._read_input(executed, *named) for named in executed.inputs()]
        outputs = _read_outputs(executed)
        verdict = judge(
            operator.short,
            [read_input.judged for read_input in inputs],
            [out.reading for out in outputs if out.reading is not None],
            numbers_in(args, kwargs),
            reporter.options.types,
            allowed=reporter.allows(operator_site.site, operator.full_name),
        )
        # Later calls that read these outputs are recognised as consequences.
        if verdict.origin is not Origin.UNKNOWN:
            for out in outputs:
                if out.tensor is not None and out.reading is not None and out.reading.nonfinite:
                    origins.add(out.tensor, verdict.origin)
        for read_input in inputs:
            if read_input.value is not None and read_input.judged.name in verdict.entered:
                origins.add(read_input.value, Origin.MADE)
        if verdict.types:
            param = parameters_in(operator, args, kwargs)
            call = self._call(operator_site, operator, visit, param, full_stack=True)
            reporter.report(verdict, call, [read_input.part for read_input in inputs], outputs)
        else:
            reporter.note(verdict, operator_site.site)

    def _read_input(
        self, executed: _Executed, name: str, alias: str, tensor: torch.Tensor
    ) -> _ReadInput:
        """Read one input as it was before the call, and look up its origin."""
        operator, before = executed.operator, executed.before
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is None or pattern is None:
            part = Part(name, tensor, None, tensor.dtype, shape_of(tensor), alias)
            return _ReadInput(part, Input(name, UNREAD), None)
        source, reading = tensor, None
        if before is not None and name in before:
            source, reading = before[name]
        # The plain tensor is read, because the operators of a subclass cannot be called here.
        shown = value if source is None or source is tensor else source
        if reading is None:
            reading = read(shown, pattern)
        part = Part(name, source, reading, tensor.dtype, shape_of(tensor), alias)
        single = value.numel() == 1 and not tensor.requires_grad
        origin = self.reporter.origin(self._origins.of(value), single=single)
        mask = operator.short in LOGARITHMS and source is not None and bool(is_mask(shown))
        return _ReadInput(part, Input(name, reading, origin, mask), value)

    # --- Inputs and outputs of a call.

    def _about_to_go(
        self, operator: WatchedOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Gone:
        """The arguments that a call is about to overwrite: copies, or readings of large ones."""
        kept: Gone = {}
        room = COPIED
        for index, name in operator.overwrites:
            value_given = args[index] if index < len(args) else kwargs.get(name)
            for slot, tensor in tensors_in(value_given, name):
                value = plain(tensor)
                pattern = pattern_of(value.dtype) if value is not None else None
                if value is None or pattern is None or not value.is_cpu or not value.numel():
                    continue
                # To copy more would slow down programs that update large weights in place.
                size = value.numel() * value.element_size()
                if size <= room:
                    room -= size
                    kept[slot] = value.detach().clone(), None
                else:
                    kept[slot] = None, read(value, pattern)
        return kept

    def _unwritten(self, result: Any) -> None:
        for _, tensor in tensors_in(result, ""):
            if type(tensor) in _ORDINARY and tensor.layout is torch.strided and tensor.numel():
                if tensor.is_cpu:
                    if pattern_of(tensor.dtype) is not None:
                        self._origins.add(tensor, Origin.RAW)
                elif not tensor.is_meta:
                    self._device.unread(tensor, Origin.RAW)

    def _received(self, values: tuple[Any, ...]) -> None:
        """Mark the tensors of a collective, whose values will be made by other ranks too."""
        for value_given in values:
            for _, tensor in tensors_in(value_given, ""):
                value = plain(tensor)
                if value is None or pattern_of(value.dtype) is None or not value.numel():
                    continue
                if not value.is_cpu:
                    self._device.unread(value, Origin.RECEIVED)
                # The consequence of a finding stays one, even if it is sent.
                elif self._origins.of(value) is not Origin.MADE:
                    self._origins.put(value, Origin.RECEIVED)

    # --- Description of a call.

    def _call(
        self,
        operator_site: OperatorSite,
        operator: WatchedOperator,
        visit: int,
        param: dict[str, Any],
        *,
        full_stack: bool,
    ) -> Call:
        if full_stack:
            lines = stack()
        else:
            place = here()
            lines = [line_of(place)] if place is not None else []
        return Call(
            operator_site.site,
            operator_site.site.rpartition("/")[0],
            operator.full_name,
            operator_site.phase,
            operator_site.step,
            visit,
            lines,
            self._forward_line() if operator_site.phase == "backward" else "",
            param,
        )

    def _forward_line(self) -> str:
        node = _current_node()
        number = node._sequence_nr() if node is not None else _LEAF
        line = self._lines.line(number) if number != _LEAF else None
        if line is None:
            return ""
        return f"{line}: {line.text}" if line.text else str(line)

    def _lost(self, func: Any, error: Exception) -> None:
        self.reporter.remarks.setdefault(f"{func} could not be looked at: {error}")


def _read_outputs(executed: _Executed) -> list[Part]:
    outputs: list[Part] = []
    for slot, tensor in executed.outputs():
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is not None and pattern is not None:
            reading = read(value, pattern)
            outputs.append(Part(slot, value, reading, tensor.dtype, shape_of(tensor)))
    return outputs


hide_from_compiler(ErrorTap.around_backward)
