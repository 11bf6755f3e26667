"""Looks inside of fused kernels while a compiled program runs: one execution of its workings.

Values come from the kernels as they are called; what lies inside of a fusion is computed from them
by torch's own operators (`workings.py`), shown to whoever records the graph, and let go as soon as
nobody needs it. What cannot be computed is left out. The program's results, its random numbers and
its modes of dispatch are not touched.
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
from driftline.captures.torch.compile.fusion_plan import Check, Of, Step, Workings

_dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
_C: Any = torch._C
_ROUNDINGS = 16
Show = Callable[[str, str, Any], None]
Tell = Callable[[str, float, bool], None]


class Insight:
    """One execution.

    Args:
        workings: What is computed in which turn.
        show: Takes a node, the kernel it lies inside of, and its value.
        tell: Takes a node, by how much its value is off (relative_l2), and whether it is a
            generated kernel that is off from the nodes it was made of.
    """

    def __init__(self, workings: Workings, show: Show, tell: Tell) -> None:
        self._workings = workings
        self._show = show
        self._tell = tell
        self._values: dict[str, Any] = dict(workings.constants)
        self._errors: list[tuple[Check, torch.Tensor]] = []
        self._shaken: dict[str, list[torch.Tensor | None]] = {}
        self._twins: dict[str, Any] = {}
        self._sizes: dict[Any, int] = {}

    def give(self, buffer: str, value: Any) -> None:
        """A kernel has written this, or the graph was given it."""
        name = self._workings.sources.get(buffer)
        if name is not None:
            self._values[name] = value

    def turn(self, number: int) -> None:
        """The kernel of this number is called next."""
        turns = self._workings.turns
        if number == 0:
            self._measure()
        turn = turns[number]
        with _apart():
            for step in turn.steps:
                self._take(step)
            for name, kernel in turn.shown:
                if name in self._values:
                    self._show(name, kernel, self._values[name])
            for check in turn.checks:
                if check.ours in self._values and check.should in self._values:
                    error = _off(self._values[check.ours], self._values[check.should])
                    if error is not None:
                        self._errors.append((check, error))
            for name in turn.forget:
                self._values.pop(name, None)
                self._twins.pop(name, None)
            if number == len(turns) - 1:
                self._values.clear()
                self._twins.clear()
                self._tell_all()

    def _measure(self) -> None:
        for symbol, name, axis in self._workings.symbols:
            value = self._values.get(name)
            if axis is None and isinstance(value, int):
                self._sizes[symbol] = value
            elif axis is not None and isinstance(value, torch.Tensor):
                self._sizes.setdefault(symbol, value.shape[axis])

    def _tell_all(self) -> None:
        for check, distance in self._errors:
            error = float(distance)
            shaken = self._shaken.get(check.shaken, [])
            by_rounding = shaken[check.slot] if check.slot < len(shaken) else None
            if error <= check.limit or by_rounding is None:
                continue
            # What rounding of the inputs alone changes as much (terms that cancel) proves nothing.
            if not error <= _ROUNDINGS * float(by_rounding):
                self._tell(check.node, error if error == error else math.inf, check.kernel)

    def _take(self, step: Step) -> None:
        if not all(name in self._values for name in step.needs):
            return
        try:
            args, kwargs = self._filled(step.arguments)
            value = self._values[step.name] = step.function(*args, **kwargs)
            if (share := self._workings.shaken.get(step.name)) is not None:
                args, kwargs = _shake((args, kwargs), share, step.name)
                self._shaken[step.name] = _apart_by(step.function(*args, **kwargs), value)
            elif (share := self._workings.twins.get(step.name)) is not None:
                args, kwargs = self._filled(step.arguments, share)
                twin = self._twins[step.name] = _shake(
                    step.function(*args, **kwargs), share, step.name
                )
                self._shaken[step.name] = _apart_by(twin, value)
        except Exception:  # an operator that cannot be called here: what needs it is left out, too
            self._values.pop(step.name, None)

    def _filled(self, value: Any, share: float = 0.0) -> Any:
        """Arguments with their values; those of the twin, off by a share, where one is given."""
        if isinstance(value, Of):
            if not share:
                return self._values[value.name]
            if value.name not in self._twins:
                return _shake(self._values[value.name], share, value.name)
            return self._twins[value.name]
        if isinstance(value, Varying):
            return int(value.formula.subs(self._sizes))
        if isinstance(value, (list, tuple)):
            return type(value)(self._filled(part, share) for part in value)
        if isinstance(value, dict):
            return {key: self._filled(part, share) for key, part in value.items()}
        return value


@contextlib.contextmanager
def _apart() -> Generator[None]:
    """As kernels are called: no gradients, no casts, nobody of the program looks on."""
    with torch.no_grad(), _dispatch._disable_current_modes(), _C._DisableAutocast():
        yield


def _shake(value: Any, share: float, name: str) -> Any:
    """Arguments whose floating point values are off by a random share; draws nobody's numbers."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        numbers = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.rand(value.shape, generator=numbers, device=value.device)
        return (value * (1 + share * (noise * 4 - 2))).to(value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_shake(part, share, f"{name} {at}") for at, part in enumerate(value))
    if isinstance(value, dict):
        return {key: _shake(part, share, f"{name} {key}") for key, part in value.items()}
    return value


def _apart_by(value: Any, other: Any) -> list[torch.Tensor | None]:
    return [_off(one, two) for one, two in zip(_parts(value), _parts(other), strict=True)]


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _off(ours: Any, theirs: Any) -> torch.Tensor | None:
    """How far two tensors are apart, as a part of the second; None where that means nothing."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return None
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not ours.numel():
        return None
    if not ours.dtype.is_floating_point:
        if ours.dtype.is_complex:
            return None
        return (ours != theirs).sum(dtype=torch.float64) / ours.numel()
    wide = torch.promote_types(ours.dtype, torch.float32)
    one, other = ours.to(wide), theirs.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, one - other)
    size = torch.where(same & ~other.isfinite(), 0.0, other)
    norm = torch.linalg.vector_norm(apart, dtype=torch.float64)
    return norm / torch.linalg.vector_norm(size, dtype=torch.float64).clamp_min(1e-300)
