# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The experiments inside a program: batch, replay, substitution and variants.

Each class replaces the plain call of the program's modules (`session.stand_in`) and reports at the
end with `finish()`. The program always gets a result of the expected kind: the failure of an
experiment is noted and never raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from driftline.alignment.rules.names import link_names
from driftline.captures.selection import Selection
from driftline.captures.torch import layers
from driftline.captures.torch.layers import cache_part, unwrapped
from driftline.captures.torch.session import CaptureSession
from driftline.diagnosis.experiments.experiment_folders import EXACT, NATIVE
from driftline.diagnosis.experiments.live.captured_calls import Candidate
from driftline.diagnosis.experiments.live.repeat import copied, dithered, rounded_once, undrawn
from driftline.diagnosis.experiments.replay_method import ReplayMethod
from driftline.errors import DriftlineError
from driftline.formats.registry import open_run
from driftline.runs.sinks import Late
from driftline.runs.writer import RunWriter

if TYPE_CHECKING:
    from driftline.captures.torch.session import CaptureSession, Frame
    from driftline.diagnosis.experiments.live.replay import Replayer


class LiveBatch:
    """Calls a model again on one sequence of its batch, or on the batch in another order.

    Args:
        options: `how`: alone or reversed; `output`: folder for the run of the repeated calls.
        session: Captures the program's own calls.
        rank: Function that returns rank and world size.
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
        # Only the outermost call of a model gets the batch that its caller passes.
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
            except Exception as problem:  # reported at the end; the program continues
                self._problem = f"{type(problem).__name__}: {problem}"
        return result

    def _changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of one sequence, or in reversed order; None if there is no batch."""
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
            # The program's own session must not record the repeated call.
            with undrawn(), torch.no_grad():
                frame.module(*args, **kwargs)
            self._calls += 1
        finally:
            self._second.running = False
            from driftline.captures.torch import module_calls

            module_calls.unwatch(self._second)
            self._session.running = True

    def finish(self) -> Mapping[str, Any]:
        """Report the size of the batch, the number of repeated calls and the last problem."""
        if self._second is not None and self._second.sink is not None:
            self._second.sink.close()
        return {
            "called": bool(self._session.execution_order),
            "batch": self._batch,
            "calls": self._calls,
            "problem": self._problem,
        }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    copied(value, keep)
    return iter(tensors)


# Replay: modules of the reference program are also applied to the candidate's inputs.


class LiveReplay:
    """Replays one or several runs in one execution of the program.

    Args:
        options: The experiment that `experiments.replay` put into the plan.
        session: Names the calls.
        rank: Function that returns rank and world size.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        session: CaptureSession,
        rank: Callable[[], tuple[int, int]],
    ) -> None:
        self._session = session
        self._replays = [_RunReplay({**options, **run}, session, rank) for run in options["runs"]]
        session.stand_in = self._call

    def _call(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first, *others = self._replays
        # Each replay wraps the call of the one before; the innermost calls the module.
        for replay in others:
            call = replay.around(frame, call)
        return first(frame, call, args, kwargs)

    def finish(self) -> Mapping[str, Any]:
        """Report the outcome of each run."""
        runs = [replay.finish() for replay in self._replays]
        return {
            "called": bool(self._session.execution_order),
            "shortened": next((r["shortened"] for r in runs if r.get("shortened")), ""),
            "runs": runs,
        }


class _RunReplay:
    """The replay of one run, which is opened at the first call, when the rank is known."""

    def __init__(
        self,
        options: Mapping[str, Any],
        session: CaptureSession,
        rank: Callable[[], tuple[int, int]],
    ) -> None:
        self._options = options
        self._session = session
        self._rank = rank
        self._replayer: Replayer | None = None
        self._candidate: Candidate | None = None
        self._sinks: tuple[Late, ...] = ()
        self._problem = ""

    def around(self, frame: Frame, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the signature of `call` that calls it and also replays the call."""

        def replayed(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return self(frame, call, args, kwargs)

        return replayed

    def __call__(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._replayer is None and not self._problem:
            try:
                self._replayer = self._opened()
            except Exception as problem:  # reported at the end; the program continues
                self._problem = f"{type(problem).__name__}: {problem}"
        if self._replayer is None:
            return call(frame.module, *args, **kwargs)
        return self._replayer(frame, call, args, kwargs)

    def _opened(self) -> Replayer:
        from driftline.diagnosis.experiments.live.replay import Replayer

        options = self._options
        rank, _ = self._rank()
        self._candidate = Candidate(open_run(Path(options["candidate"])), rank)
        self._sinks = tuple(Late(lambda name=name: self._writer(name)) for name in (EXACT, NATIVE))
        return Replayer(
            self._session,
            self._candidate,
            matching(options.get("links", {})),
            *self._sinks,
            selection=Selection.from_json(options["selection"]),
            method=ReplayMethod.from_json(options),
        )

    def _writer(self, name: str) -> RunWriter:
        rank, world_size = self._rank()
        writer = RunWriter(
            Path(self._options["output"]) / name,
            rank=rank,
            world_size=world_size,
            command=self._options["command"],
            seal_at_exit=False,
        )
        writer.describe(replay=name, candidate=str(self._options["candidate"]))
        return writer

    def finish(self) -> dict[str, Any]:
        """Close both runs and report the outcome of each site."""
        for sink in self._sinks:
            if sink.tensors_written:
                from driftline.captures.torch.layers import module_tree

                tree = module_tree(self._session.names, self._session.execution_order)
                sink.topology(tree.to_json())
            sink.close()
        if self._replayer is None or self._candidate is None:
            return {"problem": self._problem}
        self._replayer.close()
        return {
            "rank": self._rank()[0],
            "shortened": self._candidate.shortened(),
            **self._replayer.report.to_json(),
        }


def matching(
    links: Mapping[str, str],
) -> Callable[[Iterable[str], Iterable[str]], Mapping[str, str]]:
    """A function that pairs sites: by the user's links, then equal names, then similar names."""

    def match(program_sites: Iterable[str], captured_sites: Iterable[str]) -> Mapping[str, str]:
        free = dict.fromkeys(captured_sites)
        sites = list(program_sites)
        partners = {site: links[site] for site in sites if links.get(site) in free}
        used = set(partners.values())
        partners |= {s: s for s in sites if s not in partners and s in free and s not in used}
        used = set(partners.values())
        # Only sites without a partner are matched by similar names: an equal name is always right.
        rest = [site for site in sites if site not in partners]
        if rest and len(used) < len(free):
            partners |= link_names(rest, [site for site in free if site not in used])
        return partners

    return match


# Substitution: outputs of some modules of the candidate are replaced by the reference's.


class LiveSubstitution:
    """Replaces outputs or inputs of modules by those that the reference captured.

    Args:
        options: `run`, the reference; `sites` of it whose outputs are used; `inputs`, sites whose
            inputs are used; `links`, the user's pairs of names.
        session: Captures the end result.
        rank: Function that returns rank and world size.
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
            except Exception as problem:  # reported at the end; the program continues unchanged
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
        """The arguments of a call, with the reference's tensors instead of the program's."""
        site = self._site(frame)
        held = self._known().calls.get((site, frame.step, frame.visit))
        if site not in self._inputs or held is None:
            return args, kwargs
        binding = layers.binding_of(unwrapped(frame.module).forward)
        slots = {
            id(t): slot for slot, _, t in layers.inputs(binding, args, kwargs, layers.NO_CACHE)
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
        # Models may be built late, so the names are matched again whenever there are new modules.
        if names.count != self._names:
            self._names = names.count
            program_sites = [place.site for place in names.places()]
            self._links = self._match(program_sites, self._known().sites)
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
        slots = {id(t): slot for slot, _, t in layers.outputs(result, part)}

        def give(tensor: torch.Tensor) -> torch.Tensor:
            record = held.outputs.get(slots.get(id(tensor), ""))
            if record is None or not tensor.is_floating_point():
                return tensor
            if record.shape != tuple(tensor.shape):
                raise ValueError(f"shape {tuple(tensor.shape)}, the reference gave {record.shape}")
            self._done.add(site)
            return reference.tensor(record, tensor.device).to(tensor.dtype)

        # A tuple is not copied deeply, so that a cache in it remains the program's own object.
        if isinstance(result, torch.Tensor):
            return give(result)
        if type(result) is tuple:
            values = cast("tuple[Any, ...]", result)
            return tuple([give(v) if isinstance(v, torch.Tensor) else v for v in values])
        return copied(result, give)

    def finish(self) -> Mapping[str, Any]:
        """Report which sites were replaced, and why others could not be."""
        return {
            "called": bool(self._session.execution_order),
            "replaced": sorted(self._done),
            "trouble": self._trouble,
            "shortened": "" if self._reference is None else self._reference.shortened(),
        }


# Variants: the same model executed in other ways, all of which are correct.


# Modules that fused kernels compute with a single rounding.
_ROUND_ONCE = ("Norm", "SiLU", "GELU", "Activation", "Tanh", "Sigmoid", "Softmax", "Mish")


class LiveVariant:
    """Changes how the program's models are executed, in ways that are all correct.

    Args:
        options: `dtype`, `fused`, `attention` (eager or math), `dither` (a seed), `threads`.
        session: Captures as usual.
        rank: Unused.
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
        except DriftlineError as reason:  # reported at the end; the program continues unchanged
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
        """Prepare a model at its first call, and its inputs at every call."""
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
            # A cache must remain the program's own object, so only plain tensors are changed.
            def alone(value: Any) -> Any:
                return give(value) if isinstance(value, torch.Tensor) else value

            return tuple(map(alone, args)), {name: alone(v) for name, v in kwargs.items()}
        return copied((args, kwargs), give)

    def _make_eager(self, root: nn.Module) -> None:
        """Switch to eager attention; a failure is noted, and the inputs are still converted."""
        switch = getattr(root, "set_attn_implementation", None)
        if switch is None:
            why = f"{type(root).__name__} has no other attention to switch to"
            self._problem = self._problem or why
            return
        switch("eager")
        self._done.add("attention")

    def finish(self) -> Mapping[str, Any]:
        """Report which of the requested changes could not be made."""
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
