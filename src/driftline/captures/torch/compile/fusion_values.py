"""Values inside of fused kernels, computed beside a compiled program while it runs.

Values come from the kernels as they are called; what is inside of a fusion is computed from them
by torch's own operators, as `fusion_plan` says, passed to the recorder of the graph, and dropped as
soon as it is not needed. What cannot be computed is left out. The program's results, its random
numbers and its dispatch modes are not touched.
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
# An error within so many times the effect of rounding alone proves nothing.
_ROUNDINGS = 16
Show = Callable[[str, str, Any], None]
Tell = Callable[[str, float, bool], None]


class FusionValues:
    """One execution.

    Args:
        fusion_plan: What is computed in which stage.
        show: Takes a node, the kernel it is inside of, and its value.
        tell: Takes a node, the relative_l2 error of its value, and whether it is a generated kernel
            compared with the nodes it was made of.
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
        """Take a value that a kernel has written, or an input of the graph."""
        name = self._fusion_plan.sources.get(buffer)
        if name is not None:
            self._values[name] = value

    def stage(self, number: int) -> None:
        """The kernel of this number is called next."""
        stages = self._fusion_plan.stages
        # Sizes that vary are read off the inputs, which are there before the first kernel.
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
            # Memory of the program's size must not double.
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
        # Read on the host only now: each reading waits for the device.
        for check, distance in self._errors:
            error = float(distance)
            perturbed = self._perturbed.get(check.perturbed, [])
            by_rounding = perturbed[check.slot] if check.slot < len(perturbed) else None
            if error <= check.limit or by_rounding is None:
                continue
            # What rounding of the inputs alone changes as much (terms that cancel) proves nothing.
            if not error <= _ROUNDINGS * float(by_rounding):
                self._tell(check.node, error if error == error else math.inf, check.kernel)

    def _take(self, step: Step) -> None:
        # Something it needs could not be computed.
        if not all(name in self._values for name in step.needs):
            return
        try:
            args, kwargs = self._filled(step.arguments)
            value = self._values[step.name] = step.function(*args, **kwargs)
            # Repeated with perturbed inputs, to see how much rounding does to this operator.
            if (share := self._fusion_plan.perturbed.get(step.name)) is not None:
                args, kwargs = _perturb((args, kwargs), share, step.name)
                self._perturbed[step.name] = _apart_by(step.function(*args, **kwargs), value)
            elif (share := self._fusion_plan.perturbed_chains.get(step.name)) is not None:
                args, kwargs = self._filled(step.arguments, share)
                chain_value = self._chain_values[step.name] = _perturb(
                    step.function(*args, **kwargs), share, step.name
                )
                self._perturbed[step.name] = _apart_by(chain_value, value)
        except Exception:  # an operator that cannot be called here: what needs it is left out, too
            self._values.pop(step.name, None)

    def _filled(self, value: Any, share: float = 0.0) -> Any:
        """Arguments with their values; perturbed ones where a share is given."""
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
    """As kernels are called: no gradients, no casts, no modes of the program."""
    with torch.no_grad(), _dispatch._disable_current_modes(), _C._DisableAutocast():
        yield


def _perturb(value: Any, share: float, name: str) -> Any:
    """Arguments whose floating point values are perturbed by a random share of themselves."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        # A generator of its own, seeded by name: repeatable, and the program's is not touched.
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
    """Relative L2 distance of two tensors; None where it is not defined."""
    if not isinstance(value, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return None
    if value.shape != reference.shape or value.dtype != reference.dtype or not value.numel():
        return None
    if not value.dtype.is_floating_point:
        if value.dtype.is_complex:
            return None
        # Integers are equal or not: the share of elements that differ.
        return (value != reference).sum(dtype=torch.float64) / value.numel()
    wide = torch.promote_types(value.dtype, torch.float32)
    value_wide, reference_wide = value.to(wide), reference.to(wide)
    # Two NaN, or two equal infinities, are no difference.
    same = (value_wide == reference_wide) | (value_wide.isnan() & reference_wide.isnan())
    apart = torch.where(same, 0.0, value_wide - reference_wide)
    size = torch.where(same & ~reference_wide.isfinite(), 0.0, reference_wide)
    norm = torch.linalg.vector_norm(apart, dtype=torch.float64)
    # A reference of zeros must not divide by zero.
    return norm / torch.linalg.vector_norm(size, dtype=torch.float64).clamp_min(1e-300)
