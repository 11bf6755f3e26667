"""Inside a program: a model that was called on a batch is called again on one sequence of it, or on
the batch in another order. The program gets its own result.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from driftline.adapters.torch.repeating import copied, undrawn
from driftline.adapters.torch.session import CaptureSession
from driftline.runs.writer import RunWriter

if TYPE_CHECKING:
    from driftline.adapters.torch.taps import Frame


class LiveBatch:
    """Repeats calls of a model with its batch changed, each captured into a run of its own.

    Args:
        options: `how`: alone or reversed; `output`: folder of that run.
        session: Captures the program's own calls.
        rank: Says rank and world size.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        session: CaptureSession,
        rank: Callable[[], tuple[int, int]],
    ) -> None:
        self._how = str(options["how"])
        self._output = Path(options["output"])
        self._session = session
        self._rank = rank
        self._second: CaptureSession | None = None
        self._batch = 0
        self._problem = ""
        self._calls = 0
        session.stand_in = self._call

    def _call(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if len(self._session.frames()) > 1 or not frame.place.is_root or frame.recompute:
            return call(frame.module, *args, **kwargs)
        again: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        try:
            if self._session.selection.takes_step(frame.step) and not self._problem:
                again = self._changed(args, kwargs)
        except Exception as problem:
            self._problem = f"{type(problem).__name__}: {problem}"
        result = call(frame.module, *args, **kwargs)
        if again is not None:
            try:
                self._repeat(frame, *again)
            except Exception as problem:  # told at the end; the program goes on
                self._problem = f"{type(problem).__name__}: {problem}"
        return result

    def _changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments for one sequence, or in another order; None where there is no batch."""
        size = next((t.shape[0] for t in _tensors((args, kwargs)) if t.dim() > 1), 0)
        if size < 2:
            return None
        self._batch = size

        def give(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tensor.shape[0] != size:
                return tensor.detach().clone()
            return (tensor[:1] if self._how == "alone" else tensor.flip(0)).detach().clone()

        return copied((args, kwargs), give)

    def _repeat(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._second is None:
            rank, world_size = self._rank()
            sink = RunWriter(self._output, rank=rank, world_size=world_size, seal_at_exit=False)
            self._second = CaptureSession(
                sink, self._session.selection, self._session.reduction, model=frame.module
            )
        self._session.running = False
        self._second.start()
        try:
            with undrawn(), torch.no_grad():
                frame.module(*args, **kwargs)
            self._calls += 1
        finally:
            self._second.running = False
            from driftline.adapters.torch import modules

            modules.unwatch(self._second)
            self._session.running = True

    def finish(self) -> Mapping[str, Any]:
        """How large the batch was, and what went wrong."""
        if self._second is not None and self._second.sink is not None:
            self._second.sink.close()
        return {
            "called": bool(self._session.execution_order),
            "batch": self._batch,
            "calls": self._calls,
            "problem": self._problem,
        }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copied(value, keep)
    return iter(found)
