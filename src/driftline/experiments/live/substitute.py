"""Inside the candidate program: some modules give what the reference's gave."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from driftline.adapters.torch import flatten
from driftline.adapters.torch.candidate import Candidate
from driftline.adapters.torch.flatten import cache_part
from driftline.adapters.torch.names import unwrapped
from driftline.adapters.torch.repeating import copied
from driftline.experiments.live.replay import matching
from driftline.formats.opening import open_run

if TYPE_CHECKING:
    from driftline.adapters.torch.session import CaptureSession
    from driftline.adapters.torch.taps import Frame


class LiveSubstitution:
    """Lets modules run, and puts the reference's captured outputs in place of theirs.

    Args:
        options: `run`, the reference; `sites` of it whose outputs are taken; `inputs`, those whose
            inputs are; `links` of names.
        session: Captures the end result.
        rank: Says rank and world size.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        session: CaptureSession,
        rank: Callable[[], tuple[int, int]],
    ) -> None:
        self._options = options
        self._session = session
        self._rank = rank
        self._wanted = set(options["sites"])
        self._inputs = set(options.get("inputs", ()))
        self._reference: Candidate | None = None
        self._names = -1
        self._links: Mapping[str, str] = {}
        self._done: set[str] = set()
        self._trouble: dict[str, str] = {}
        self._match = matching(options.get("links", {}))
        session.stand_in = self._call

    def _call(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inputs:
            try:
                args, kwargs = self._given(frame, args, kwargs)
            except Exception as problem:  # told at the end; the program goes on as it is
                self._trouble.setdefault(frame.site, f"{type(problem).__name__}: {problem}")
        result = call(frame.module, *args, **kwargs)
        if not self._wanted:
            return result
        try:
            return self._replaced(frame, result)
        except Exception as problem:
            self._trouble.setdefault(frame.site, f"{type(problem).__name__}: {problem}")
            return result

    def _given(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with the reference's tensors among them."""
        site = self._site(frame)
        held = self._known().calls.get((site, frame.step, frame.visit))
        if site not in self._inputs or held is None:
            return args, kwargs
        binding = flatten.binding_of(unwrapped(frame.module).forward)
        slots = {
            id(t): slot for slot, _, t in flatten.inputs(binding, args, kwargs, flatten.NO_CACHE)
        }

        def give(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            record = held.inputs.get(slots.get(id(value), ""))
            if record is None or record.shape != tuple(value.shape):
                return value
            self._done.add(site)
            return self._known().tensor(record, value.device).to(value.dtype)

        return tuple(map(give, args)), {name: give(value) for name, value in kwargs.items()}

    def _known(self) -> Candidate:
        if self._reference is None:
            self._reference = Candidate(open_run(Path(self._options["run"])), self._rank()[0])
        return self._reference

    def _site(self, frame: Frame) -> str:
        """The reference's site of a call; empty if it has none."""
        names = self._session.names
        if names.count != self._names:
            self._names = names.count
            here = [place.site for place in names.places()]
            self._links = self._match(here, self._known().sites)
        return self._links.get(frame.site, "")

    def _replaced(self, frame: Frame, result: Any) -> Any:
        site = self._site(frame)
        if site not in self._wanted:
            return result
        reference = self._known()
        held = reference.calls.get((site, frame.step, frame.visit))
        if held is None:
            self._trouble.setdefault(frame.site, f"the reference has no step {frame.step} of it")
            return result
        part = cache_part(frame.module, self._session.frames())
        slots = {id(t): slot for slot, _, t in flatten.outputs(result, part)}

        def give(tensor: torch.Tensor) -> torch.Tensor:
            record = held.outputs.get(slots.get(id(tensor), ""))
            if record is None or not tensor.is_floating_point():
                return tensor
            if record.shape != tuple(tensor.shape):
                raise ValueError(f"shape {tuple(tensor.shape)}, the reference gave {record.shape}")
            self._done.add(site)
            return reference.tensor(record, tensor.device).to(tensor.dtype)

        # A cache in the result stays the program's own object.
        if isinstance(result, torch.Tensor):
            return give(result)
        if type(result) is tuple:
            values = cast("tuple[Any, ...]", result)
            return tuple([give(v) if isinstance(v, torch.Tensor) else v for v in values])
        return copied(result, give)

    def finish(self) -> Mapping[str, Any]:
        """What was replaced, and what could not be."""
        return {
            "called": bool(self._session.execution_order),
            "replaced": sorted(self._done),
            "trouble": self._trouble,
        }
