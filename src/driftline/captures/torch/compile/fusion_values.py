"""Compute the values inside fused kernels, while a compiled program runs.

Kernels' results are received as the kernels are called. Values inside a fusion are computed from
them by torch's own operators, according to a `fusion_plan`, passed to the recorder of the graph,
and dropped as soon as they are not needed. Values that cannot be computed are left out. The
program's results, random numbers and dispatch modes do not change.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import importlib
import math
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from driftline.captures.torch.compile.call_origins import Varying
from driftline.captures.torch.compile.fusion_plan import Check, FusionPlan, Of, Step

_dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
_C: Any = torch._C
# An error up to this many times the effect of rounding alone proves nothing.
_ROUNDINGS = 16
Show = Callable[[str, str, Any], None]
Tell = Callable[[str, float, bool], None]


class FusionValues:
    """The computed values of one execution of a graph.

    Args:
        fusion_plan: What is computed in each stage.
        show: Called with a node, the kernel that contains it, and its value.
        tell: Called with a node, the relative_l2 error of its value, and whether the error is that
            of a generated kernel compared with its nodes.
    """

    def __init__(self, fusion_plan: FusionPlan, show: Show, tell: Tell) -> None:
        self._fusion_plan = fusion_plan
        self._show = show
        self._tell = tell
        self._values: dict[str, Any] = dict(fusion_plan.constants)
        self._errors: list[tuple[Check, torch.Tensor]] = []
        self._perturbed: dict[str, list[torch.Tensor | None]] = {}
        self._chain_values: dict[str, Any] = {}
        self._sizes: dict[Any, int] = {}

    def give(self, buffer: str, value: Any) -> None:
        """Receive a value that a kernel has written, or an input of the graph."""
        name = self._fusion_plan.sources.get(buffer)
        if name is not None:
            self._values[name] = value

    def stage(self, number: int) -> None:
        """Carry out a stage; call it just before the kernel of this number, and after the last."""
        stages = self._fusion_plan.stages
        # Symbolic sizes are read from the inputs, which all exist before the first kernel.
        if number == 0:
            self._measure()
        stage = stages[number]
        with _apart():
            for step in stage.steps:
                self._take(step)
            for name, kernel in stage.shown:
                if name in self._values:
                    self._show(name, kernel, self._values[name])
            for check in stage.checks:
                if check.actual in self._values and check.should in self._values:
                    error = _off(self._values[check.actual], self._values[check.should])
                    if error is not None:
                        self._errors.append((check, error))
            # Values are dropped early, so that the program's memory does not double.
            for name in stage.forget:
                self._values.pop(name, None)
                self._chain_values.pop(name, None)
            if number == len(stages) - 1:
                self._values.clear()
                self._chain_values.clear()
                self._tell_all()

    def _measure(self) -> None:
        for symbol, name, axis in self._fusion_plan.symbols:
            value = self._values.get(name)
            if axis is None and isinstance(value, int):
                self._sizes[symbol] = value
            elif axis is not None and isinstance(value, torch.Tensor):
                self._sizes.setdefault(symbol, value.shape[axis])

    def _tell_all(self) -> None:
        # Errors are read only at the end, because each reading waits for the device.
        for check, distance in self._errors:
            error = float(distance)
            perturbed = self._perturbed.get(check.perturbed, [])
            by_rounding = perturbed[check.slot] if check.slot < len(perturbed) else None
            if error <= check.limit or by_rounding is None:
                continue
            # If rounding of the inputs alone changes the value as much (terms that cancel), the
            # error proves nothing.
            if not error <= _ROUNDINGS * float(by_rounding):
                self._tell(check.node, error if error == error else math.inf, check.kernel)

    def _take(self, step: Step) -> None:
        # A step is skipped if a value that it needs could not be computed.
        if not all(name in self._values for name in step.needs):
            return
        try:
            args, kwargs = self._filled(step.arguments)
            value = self._values[step.name] = step.function(*args, **kwargs)
            # The step is repeated with perturbed inputs, to measure the effect of rounding.
            if (share := self._fusion_plan.perturbed.get(step.name)) is not None:
                args, kwargs = _perturb((args, kwargs), share, step.name)
                self._perturbed[step.name] = _apart_by(step.function(*args, **kwargs), value)
            elif (share := self._fusion_plan.perturbed_chains.get(step.name)) is not None:
                args, kwargs = self._filled(step.arguments, share)
                chain_value = self._chain_values[step.name] = _perturb(
                    step.function(*args, **kwargs), share, step.name
                )
                self._perturbed[step.name] = _apart_by(chain_value, value)
        except Exception:  # the operator cannot be called here; steps that need it are skipped too
            self._values.pop(step.name, None)

    def _filled(self, value: Any, share: float = 0.0) -> Any:
        """Arguments with names replaced by values, which are perturbed if `share` is not zero."""
        if isinstance(value, Of):
            if not share:
                return self._values[value.name]
            if value.name not in self._chain_values:
                return _perturb(self._values[value.name], share, value.name)
            return self._chain_values[value.name]
        if isinstance(value, Varying):
            return int(value.formula.subs(self._sizes))
        if isinstance(value, (list, tuple)):
            return type(value)(self._filled(part, share) for part in value)
        if isinstance(value, dict):
            return {key: self._filled(part, share) for key, part in value.items()}
        return value


@contextlib.contextmanager
def _apart() -> Generator[None]:
    """A context as for kernels: without gradients, autocast and the program's dispatch modes."""
    with torch.no_grad(), _dispatch._disable_current_modes(), _C._DisableAutocast():
        yield


def _perturb(value: Any, share: float, name: str) -> Any:
    """Perturb floating point values by a random fraction of themselves, from -2 to 2 times `share`.

    Args:
        value: A tensor, or a container of arguments.
        share: Size of the perturbation.
        name: Seed of the random numbers.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        # A separate generator, so that the program's does not change; its seed is the name, so that
        # results can be repeated.
        numbers = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.rand(value.shape, generator=numbers, device=value.device)
        return (value * (1 + share * (noise * 4 - 2))).to(value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(
            _perturb(part, share, f"{name} {index}") for index, part in enumerate(value)
        )
    if isinstance(value, dict):
        return {key: _perturb(part, share, f"{name} {key}") for key, part in value.items()}
    return value


def _apart_by(value: Any, other: Any) -> list[torch.Tensor | None]:
    return [
        _off(part, other_part)
        for part, other_part in zip(_parts(value), _parts(other), strict=True)
    ]


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _off(value: Any, reference: Any) -> torch.Tensor | None:
    """Relative L2 distance of two tensors; None if it is not defined."""
    if not isinstance(value, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return None
    if value.shape != reference.shape or value.dtype != reference.dtype or not value.numel():
        return None
    if not value.dtype.is_floating_point:
        if value.dtype.is_complex:
            return None
        # For integers it is the fraction of elements that differ.
        return (value != reference).sum(dtype=torch.float64) / value.numel()
    wide = torch.promote_types(value.dtype, torch.float32)
    value_wide, reference_wide = value.to(wide), reference.to(wide)
    # Two NaN, or two equal infinities, count as equal.
    same = (value_wide == reference_wide) | (value_wide.isnan() & reference_wide.isnan())
    apart = torch.where(same, 0.0, value_wide - reference_wide)
    size = torch.where(same & ~reference_wide.isfinite(), 0.0, reference_wide)
    norm = torch.linalg.vector_norm(apart, dtype=torch.float64)
    # A reference of zeros must not divide by zero.
    return norm / torch.linalg.vector_norm(size, dtype=torch.float64).clamp_min(1e-300)
