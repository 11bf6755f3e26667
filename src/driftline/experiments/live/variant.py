"""Inside a program: the same model executed otherwise, in ways that are all right.

Another number format, rounding once where a fused kernel would, another attention, inputs moved by
one unit in the last place, another number of threads. Each is done when a model is called from
outside; the program is not changed.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from driftline.adapters.torch.repeating import copied
from driftline.adapters.torch.rounding import dithered, rounded_once
from driftline.errors import DriftlineError

if TYPE_CHECKING:
    from driftline.adapters.torch.session import CaptureSession
    from driftline.adapters.torch.taps import Frame

_ROUND_ONCE = ("Norm", "SiLU", "GELU", "Activation", "Tanh", "Sigmoid", "Softmax", "Mish")


class LiveVariant:
    """Changes how the program's models are executed.

    Args:
        options: `dtype`, `fused`, `attention` (eager or math), `dither` (a seed), `threads`.
        session: Captures as usual.
        rank: Not asked.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        session: CaptureSession,
        rank: Callable[[], tuple[int, int]],
    ) -> None:
        del rank
        name = str(options.get("dtype") or "")
        self._dtype: torch.dtype | None = getattr(torch, name) if name else None
        self._fused = bool(options.get("fused"))
        self._attention = str(options.get("attention") or "")
        self._dither = options.get("dither")
        self._threads = int(options.get("threads") or 0)
        self._session = session
        self._ready: set[int] = set()
        self._done: set[str] = set()
        self._problem = ""
        self._draw = torch.Generator().manual_seed(int(self._dither or 0))
        session.stand_in = self._call

    def _call(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module = frame.module
        if len(self._session.frames()) > 1:
            if self._fused and _rounds(module):
                with contextlib.suppress(TypeError, RuntimeError, ValueError):
                    result = rounded_once(call, module, args, kwargs)
                    self._done.add("fused")
                    return result
            result = call(module, *args, **kwargs)
            return self._moved(result) if self._is_table(module) else result
        try:
            args, kwargs = self._prepared(frame, args, kwargs)
        except DriftlineError as reason:  # told at the end; the program goes on as it is
            self._problem = self._problem or str(reason)
        except Exception as problem:
            self._problem = self._problem or f"{type(problem).__name__}: {problem}"
        with self._around():
            return call(module, *args, **kwargs)

    def _is_table(self, module: nn.Module) -> bool:
        return self._dither is not None and isinstance(module, nn.Embedding)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        self._done.add("dither")
        return dithered(value, self._draw)

    def _around(self) -> contextlib.AbstractContextManager[Any]:
        if self._attention != "math":
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._done.add("attention")
        return sdpa_kernel(SDPBackend.MATH)

    def _prepared(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring a model into shape at its first call, and its inputs at every one."""
        root = frame.place.root.module()
        if root is not None and id(root) not in self._ready:
            self._ready.add(id(root))
            if self._threads:
                torch.set_num_threads(self._threads)
                self._done.add("threads")
            if self._dtype is not None:
                root.to(self._dtype)
                self._done.add("dtype")
            if self._attention == "eager":
                self._make_eager(root)
        if self._dtype is None and self._dither is None:
            return args, kwargs

        def give(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            value = tensor if self._dtype is None else tensor.to(self._dtype)
            return value if self._dither is None else self._moved(value)

        if any(_is_object(value) for value in (*args, *kwargs.values())):
            # A cache must stay the program's own object: only plain tensors are changed.
            def alone(value: Any) -> Any:
                return give(value) if isinstance(value, torch.Tensor) else value

            return tuple(map(alone, args)), {name: alone(v) for name, v in kwargs.items()}
        return copied((args, kwargs), give)

    def _make_eager(self, root: nn.Module) -> None:
        """Not a reason to stop: a model that has its format already must be given such inputs."""
        switch = getattr(root, "set_attn_implementation", None)
        if switch is None:
            why = f"{type(root).__name__} has no other attention to switch to"
            self._problem = self._problem or why
            return
        switch("eager")
        self._done.add("attention")

    def finish(self) -> Mapping[str, Any]:
        """What was really done."""
        wanted = {
            "dtype": self._dtype is not None,
            "fused": self._fused,
            "attention": bool(self._attention),
            "dither": self._dither is not None,
            "threads": bool(self._threads),
        }
        missing = [name for name, asked in wanted.items() if asked and name not in self._done]
        return {
            "called": bool(self._session.execution_order),
            "problem": self._problem,
            "missing": missing,
        }


def _is_object(value: Any) -> bool:
    return not isinstance(
        value, torch.Tensor | tuple | list | dict | str | int | float | bool | type(None)
    )


def _rounds(module: nn.Module) -> bool:
    return not module._modules and any(word in type(module).__name__ for word in _ROUND_ONCE)
