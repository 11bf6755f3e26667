"""The error check at module level, which is cheaper but can name only modules, not operators.

The outputs of a module are screened; if they are suspicious, its inputs are read too. The producer
is the innermost module whose inputs were finite and whose output was not. Backward passes are not
observed, but the gradients that an optimizer is about to use are checked.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from driftline.captures.torch.errcheck.devices import DeviceWatch, WatchedCall
from driftline.captures.torch.errcheck.inspect import (
    Origin,
    Origins,
    pattern_of,
    peak,
    plain,
    read,
    shape_of,
)
from driftline.captures.torch.errcheck.reporter import Call, Part, Reporter
from driftline.captures.torch.errcheck.rules import Input, Numbers, judge_module
from driftline.captures.torch.errcheck.source_lines import here, line_of, stack
from driftline.captures.torch.operators.dispatch import break_graphs
from driftline.captures.torch.tensors import undisturbed

Named = Sequence[tuple[str, str, torch.Tensor]]
MOST_GRADIENTS = 8
"""Largest number of gradients kept with a finding, because all gradients may be wrong."""


class _Thread(threading.local):
    """The current module calls, with the numbers of findings and device calls at their start."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int, int]] = []


class ModuleTap:
    """Checks the outputs of modules; see `session.Tap`."""

    def __init__(
        self,
        session: Any,
        reporter: Reporter,
        origins: Origins | None = None,
        device: DeviceWatch | None = None,
    ) -> None:
        self.session = session
        self.reporter = reporter
        self._origins = origins if origins is not None else Origins()
        self._device = device or DeviceWatch(reporter)
        self._found = self._found_before = self._added_before = 0
        self._thread = _Thread()
        self._hook: Any = None
        self._saturation = "saturation" in reporter.options.types

    def install(self) -> None:
        # Zeros in a module's output do not show which operator caused the underflow.
        if "underflow" in self.reporter.options.types:
            self.reporter.remarks.setdefault("underflow is looked for at operator level only")
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        with undisturbed():
            self._device.finish()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        yield

    def before_forward(self, frame: Any, inputs: Named) -> None:
        self._thread.calls.append((frame, self._found, self._device.added))

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        self.reporter.calls += 1
        calls = self._thread.calls
        found_before, added = self._found, self._device.added
        while calls:  # calls that raised have left entries
            begun, found_before, added = calls.pop()
            if begun is frame:
                break
        with undisturbed():
            self._look(frame, inputs, outputs, found_before, added)
        # After an outermost call a step may be over.
        if not calls:
            self._device.step_may_be_over()

    def _look(
        self, frame: Any, inputs: Named, outputs: Named, found_before: int, added: int
    ) -> None:
        suspicious = elsewhere = False
        peaks = self.reporter.peaks
        for _, _, tensor in outputs:
            value = plain(tensor)
            pattern = pattern_of(value.dtype) if value is not None else None
            if value is None or pattern is None or not value.numel():
                continue
            if not value.is_cpu:
                elsewhere = True
                continue
            most = peak(value, pattern)
            if most > pattern.top:
                suspicious = True
                continue
            key = (frame.site, pattern.name)
            if most > peaks.get(key, -1):
                peaks[key] = most
            if most == pattern.top and self._saturation and pattern.narrow:
                suspicious = True
        if elsewhere:
            place = here()
            lines = [line_of(place)] if place is not None else []
            call = self._call(frame, lines)
            allowed = self.reporter.allows(frame.site, frame.class_name)
            named_outputs = [(slot, tensor) for slot, _, tensor in outputs]
            watched = WatchedCall(call, "", None, allowed, added, frame.module)
            self._device.add(watched, inputs, named_outputs)
        elif suspicious:
            with self.reporter.lock:
                self._inspect(frame, inputs, outputs, found_before)

    def _inspect(self, frame: Any, inputs: Named, outputs: Named, found_before: int) -> None:
        parts, judged = self._read(inputs, with_origin=True)
        # A parameter that is not finite is treated like an input.
        for name, parameter in frame.module.named_parameters(recurse=False):
            own, seen = self._read([(name, "", parameter)], with_origin=True)
            if seen and seen[0].reading.nonfinite:
                parts += own
                judged += seen
        outs, _ = self._read(outputs, with_origin=False)
        verdict = judge_module(
            judged,
            [(out.reading, self._known(out)) for out in outs if out.reading is not None],
            self.reporter.options.types,
            inside=found_before != self._found,
            earlier=bool(self._found),
            allowed=self.reporter.allows(frame.site, frame.class_name),
        )
        if verdict.origin is not Origin.UNKNOWN:
            for out in outs:
                value = plain(out.tensor) if out.tensor is not None else None
                if value is not None and out.reading is not None and out.reading.nonfinite:
                    self._origins.add(value, verdict.origin)
        if verdict.types:
            self._found += 1
            self.reporter.report(verdict, self._call(frame, stack()), parts, outs)
        else:
            self._found += int(verdict.propagates)
            self.reporter.note(verdict, frame.site)

    def _known(self, part: Part) -> Origin:
        value = plain(part.tensor) if part.tensor is not None else None
        return self._origins.of(value) if value is not None else Origin.UNKNOWN

    def _read(self, tensors: Named, *, with_origin: bool) -> tuple[list[Part], list[Input]]:
        parts: list[Part] = []
        judged: list[Input] = []
        for slot, alias, tensor in tensors:
            value = plain(tensor)
            pattern = pattern_of(value.dtype) if value is not None else None
            reading = read(value, pattern) if value is not None and pattern is not None else None
            parts.append(Part(slot, tensor, reading, tensor.dtype, shape_of(tensor), alias))
            if with_origin and value is not None and reading is not None:
                single = value.numel() == 1 and not tensor.requires_grad
                origin = self.reporter.origin(self._origins.of(value), single=single)
                judged.append(Input(slot, reading, origin))
        return parts, judged

    def _call(self, frame: Any, lines: Sequence[Any]) -> Call:
        return Call(
            frame.site, frame.site, frame.class_name, frame.phase, frame.step, frame.visit, lines
        )

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            with undisturbed():
                self.session.guarded("optimizer", self._gradients, optimizer)

    def _gradients(self, optimizer: Any) -> None:
        """Check the gradients that an optimizer is about to use; the backward pass is not observed.

        A backward pass has at most one finding, because after the first wrong gradient all later
        ones may be wrong.
        """
        on_device: list[tuple[str, torch.Tensor]] = []
        wrong: list[Part] = []
        reported = False
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            gradient: torch.Tensor | None = parameter.grad
            value = plain(gradient) if gradient is not None else None
            pattern = pattern_of(value.dtype) if value is not None else None
            if gradient is None or value is None or pattern is None or not value.numel():
                continue
            slot = f"grad {index}"
            if not value.is_cpu:
                on_device.append((slot, gradient))
            # If a gradient is finite again, the origin of its memory is forgotten.
            elif peak(value, pattern) <= pattern.top:
                self._origins.overwritten(value)
            else:
                # It was reported before, or is the consequence of another finding.
                reported = reported or self._origins.of(value) is not Origin.UNKNOWN
                self._origins.add(value, Origin.MADE)
                parts, _ = self._read([(slot, "", gradient)], with_origin=False)
                wrong += parts
        findings, self._found_before = self._found_before, self._found
        added, self._added_before = self._added_before, self._device.added
        name = type(optimizer).__name__
        call = Call(name, name, name, "backward", self.session.step, 0, stack())
        reason = "a gradient, as the optimizer got it; --level operator names its maker"
        if on_device:
            watched = WatchedCall(call, "", Numbers(), allowed=False, begun=added, reason=reason)
            self._device.add(watched, (), on_device)
        if not wrong:
            return
        verdict = judge_module(
            (),
            [(part.reading, Origin.UNKNOWN) for part in wrong if part.reading is not None],
            self.reporter.options.types,
            numbers=Numbers(),
            inside=reported or findings != self._found,
            earlier=bool(self._found),
        )
        self._found += 1
        if verdict.types:
            kept = wrong[:MOST_GRADIENTS]
            self.reporter.report(verdict._replace(reason=reason), call, (), kept)
        else:
            self.reporter.note(verdict, name)


break_graphs(ModuleTap._before_optimizer)
