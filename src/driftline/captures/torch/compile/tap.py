# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
"""Record the graphs of `torch.compile` when Dynamo passes them to a backend.

Dynamo calls every backend in one method, no matter when `torch.compile` was called. An exception of
the program's backend is the program's own error and is not changed. An exception in recording
becomes an event, and the program's own backend compiles the graph instead. `GraphTap` belongs to a
capture; `RecordedGraphs` is itself a backend.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args

import torch
from torch import nn

from driftline import settings
from driftline.captures.patching import when_imported
from driftline.captures.torch.compile import call_origins, inductor
from driftline.captures.torch.compile.fx import compile_by_nodes
from driftline.captures.torch.compile.graph_recorder import GraphRecorder, Write
from driftline.captures.torch.compile.nodes import compile_id
from driftline.captures.torch.framework import facts
from driftline.captures.torch.layers import unwrapped
from driftline.captures.torch.operators.dispatch import hide_from_compiler
from driftline.captures.torch.session import CaptureSession
from driftline.errors import BadInput, did_you_mean
from driftline.runs.provenance import create_run
from driftline.runs.sidecars.calls import GRAPHS
from driftline.runs.writer import RunWriter

MODULE = "torch._dynamo.output_graph"
_METHOD = "call_user_compiler"
_output_graph: Any = None
_original: Callable[..., Any] | None = None
_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()


class Listener(Protocol):
    """Is notified of graphs that are compiled."""

    def backend(
        self, name: str, inputs: Sequence[Any], models: Sequence[nn.Module]
    ) -> Callable[..., Any] | None:
        """A backend to use instead of the program's own; None to use the program's.

        Args:
            name: Name of the program's backend.
            inputs: Inputs for which the graph is compiled.
            models: Models that the compiled code calls.
        """
        ...

    def not_recorded(self, error: Exception) -> None:
        """Report that the backend used instead failed; the program's own compiles the graph."""
        ...

    def failed(self, name: str, error: BaseException) -> None:
        """Report that the program's own backend could not compile a graph."""
        ...


def install(listener: Listener) -> bool:
    """Notify a listener of every graph from now on.

    Returns:
        False if this version of torch lacks the method that has to be replaced.
    """
    global _output_graph, _original, _listeners
    with _lock:
        module: Any = importlib.import_module(MODULE)
        _output_graph = getattr(module, "OutputGraph", None)
        # It is a private method of torch, which another version may not have.
        if not hasattr(_output_graph, _METHOD):
            return False
        if _original is None:
            _original = getattr(_output_graph, _METHOD)
            setattr(_output_graph, _METHOD, _call)
        _listeners = (*_listeners, listener)
        return True


def remove(listener: Listener) -> None:
    global _original, _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        if _listeners or _original is None:
            return
        # If another library has wrapped our method since, ours stays and does nothing.
        if getattr(_output_graph, _METHOD) is _call:
            setattr(_output_graph, _METHOD, _original)
            _original = None


def _call(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the method with which Dynamo calls a backend."""
    original = _original
    assert original is not None
    # An exported graph is not run by the program.
    if not _listeners or getattr(self, "export", False) or self.compiler_fn is None:
        return original(self, graph, inputs, *args, **kwargs)
    backend = self.compiler_fn
    name = name_of(backend)
    models = _models(self, graph)
    replacements = [
        (watcher, replacement)
        for watcher in _listeners
        if (replacement := watcher.backend(name, inputs, models)) is not None
    ]
    for listener, instead in replacements:
        self.compiler_fn = instead
        try:
            return original(self, graph, inputs, *args, **kwargs)
        except Exception as error:
            # A restart of the analysis is not a failure: Dynamo traces again and calls this again.
            if _is_restart(error):
                raise
            listener.not_recorded(error)
        finally:
            # The program's own backend is always restored.
            self.compiler_fn = backend
    try:
        return original(self, graph, inputs, *args, **kwargs)
    except BaseException as error:
        if not _is_restart(error):
            for listener in _listeners:
                listener.failed(name, error)
        raise


def _models(output: Any, graph: Any) -> list[nn.Module]:
    """Models in the local and global names of the compiled code whose modules it calls.

    If a function that calls a model is compiled, no call of the model is intercepted, so the model
    has to be found here.
    """
    stacks = [node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes]
    met = {str(key).partition("@")[0] for stack in stacks for key in stack}
    seen: list[nn.Module] = []
    for scope in (getattr(output, "local_scope", {}), getattr(output, "global_scope", {})):
        for value in list(scope.values()):
            # Module stacks name modules by their ids.
            if isinstance(value, nn.Module) and str(id(unwrapped(value))) in met:
                seen.append(value)
    return seen


def _is_restart(error: BaseException) -> bool:
    return any(kind.__name__ == "RestartAnalysis" for kind in type(error).__mro__)


def name_of(backend: Any) -> str:
    """Name of a backend, as a program would write it."""
    inner = getattr(backend, "_torchdynamo_orig_backend", None) or backend
    # For a distributed model the backend is wrapped in one that splits graphs at its buckets.
    cutting = getattr(getattr(inner, "__self__", None), "backend_compile_fn", None)
    if cutting is not None and cutting is not backend:
        return name_of(cutting)
    for name in ("compiler_name", "__name__"):
        text = getattr(inner, name, None)
        if isinstance(text, str) and text:
            return text
    return type(inner).__name__


hide_from_compiler(_call)


# The tap: node by node (`fx`), or kernel by kernel (`inductor`).


# Three examples are enough for a message; the events list all sites.
_TOLD = 3
GraphEngine = Literal["auto", "fx", "inductor"]
INDUCTOR = "inductor"
WHAT_RAN = {
    "fx": "every compiled graph was executed node by node by torch's own operators; the backend of "
    "the program ({backends}) compiled none of them",
    "inductor": "kernels ran as inductor made them; each result was read where its kernel had "
    "written it",
    "inductor --no-fusion": "inductor was told to fuse nothing: every node has a kernel of its "
    "own, which is not what the program runs otherwise",
}


def check_graph_engine(name: str | None, levels: Sequence[str], *, fusion: bool) -> None:
    """Check the user's options for compiled graphs.

    Raises:
        BadInput: There is no such graph option, or it cannot be combined with the levels.
    """
    if not fusion and name != "inductor":
        raise BadInput("only inductor fuses kernels", hint="graph='inductor', fusion=False")
    if name not in get_args(GraphEngine):
        raise BadInput(
            f"there is no graph '{name}'", hint=did_you_mean(str(name), get_args(GraphEngine))
        )
    if "ops" in levels:
        raise BadInput(
            f"graph '{name}' shows the operators of compiled graphs, level 'ops' those of a "
            "program that is not compiled",
            hint="make two runs",
        )


class GraphTap:
    """Records compiled graphs of one session.

    Args:
        session: The capture.
        engine: `fx`, `inductor`, or `auto`, which depends on the program's backend for a graph.
        write: Writes the lines of the list of graphs.
        fusion: For inductor: whether kernels may be fused, as without capture.
        afresh: Whether to discard what was compiled before and, at the end, during the capture; for
            a capture of a part of a program.
    """

    def __init__(
        self,
        session: Any,
        engine: GraphEngine,
        write: Write | None,
        *,
        fusion: bool = True,
        afresh: bool = False,
    ) -> None:
        self.session = session
        self.engine = engine
        self.fusion = fusion
        self.recorder = GraphRecorder(session, write)
        self._afresh = afresh
        self._backends: dict[str, int] = {}
        self._failures = 0
        self._begun = self._kernels_watched = False
        self._call_off: Callable[[], None] = lambda: None
        session.sees_graphs = True

    def install(self) -> None:
        if self._afresh:
            _forget_compiled()
        # The program itself imports the compiler if it needs it; the import takes seconds.
        self._call_off = when_imported(MODULE, self._compiler_is_here)

    def _compiler_is_here(self) -> None:
        if not install(self):
            self._unseen()

    def _begin(self) -> None:
        """Begin to stamp nodes, before the first graph is compiled."""
        if self._begun:
            return
        self._begun = True
        if not call_origins.install():
            self._unseen()

    def _watch_kernels(self) -> None:
        """Begin to watch inductor, before it compiles its first graph."""
        if self._kernels_watched:
            return
        self._kernels_watched = True
        # A graph from a cache would not be compiled, and so not be seen.
        inductor.forget_graphs()
        self._call_off = when_imported(inductor.MODULE, self._inductor_is_here)

    def _inductor_is_here(self) -> None:
        if not inductor.install(self):
            self._unseen()

    def _unseen(self) -> None:
        self.session.event_once(
            "graphs-unseen",
            f"torch {torch.__version__} does not show its graphs where they are looked for: some "
            "are not recorded",
        )

    def remove(self) -> None:
        # In case the compiler was never imported.
        self._call_off()
        remove(self)
        if self._kernels_watched:
            inductor.remove(self)
        if self._begun:
            call_origins.remove()
        if self._afresh:
            _forget_compiled()
        self._say_what_ran()

    def _say_what_ran(self) -> None:
        recorder, session = self.recorder, self.session
        option = f"--graph {self.engine}" + ("" if self.fusion else " --no-fusion")
        if not recorder.graphs:
            asked = ", ".join(sorted(self._backends))
            why = (
                f"the program compiled with {asked}, not with inductor"
                if asked and self.engine == "inductor"
                else "the program compiled no graph"
            )
            # A failed compiler, or a program that ran nothing, is reported elsewhere. With `auto` a
            # program that compiles nothing is no problem, because its modules are captured.
            if not self._failures and session.execution_order and self.engine != "auto":
                session.event("no-graph", f"{option}: {why}")
            return
        ways = {self._way(name): None for name in sorted(self._backends)}
        names = ", ".join(name for name in sorted(self._backends) if self._way(name) == "fx")
        what = "; ".join(
            WHAT_RAN[way if self.fusion else f"{way} --no-fusion"].format(backends=names)
            for way in ways
        )
        counts = recorder.totals()
        if INDUCTOR in ways:
            counts += f", kernels: {recorder.kernels}"
            if recorder.inside:
                counts += f"; {recorder.inside} values inside of fusions were computed separately"
        session.event("graphs", f"{option}: {what} ({counts})", **self.counts())
        if recorder.off:
            examples = [
                f"{operator} at {line or site} (relative_l2 {error:.3g})"
                for (site, _), (operator, line, error) in list(recorder.off.items())[:_TOLD]
            ]
            more = f" and {len(recorder.off) - _TOLD} more" if len(recorder.off) > _TOLD else ""
            session.event(
                "operators-off",
                "what the compiler made of some operators gives something else than torch's own "
                f"for the same inputs: {', '.join(examples)}{more}",
                sites=[site for site, _ in recorder.off][:100],
            )

    def counts(self) -> dict[str, Any]:
        recorder = self.recorder
        return {
            "engine": self.engine,
            "fusion": self.fusion,
            "graphs": recorder.graphs,
            "nodes": recorder.nodes,
            "kernels": recorder.kernels,
        }

    # --- Notifications about compiled graphs.

    def backend(
        self, name: str, inputs: Sequence[Any], models: Sequence[nn.Module]
    ) -> Callable[..., Any] | None:
        self._backends[name] = self._backends.get(name, 0) + 1
        self.session.guarded("graphs", self._begin)
        way = self._way(name)
        if way == INDUCTOR:
            self.session.guarded("graphs", self._watch_kernels)
        self.session.guarded("graphs", self.recorder.meet, compile_id(), inputs, models)
        if way == INDUCTOR:
            return None

        def by_nodes(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_by_nodes(graph, inputs, name, lambda: (self.recorder,))

        return by_nodes

    def _way(self, backend: str) -> Literal["fx", "inductor"]:
        """How the graphs of a backend are recorded."""
        by_kernels = backend == INDUCTOR if self.engine == "auto" else self.engine == INDUCTOR
        return "inductor" if by_kernels else "fx"

    def not_recorded(self, error: Exception) -> None:
        self.session.event_once(
            "graph-unseen",
            f"a graph could not be executed node by node ({_first_line(error)}); the program's own "
            "backend compiled it, and its nodes are not recorded",
        )

    def failed(self, name: str, error: BaseException) -> None:
        self._failures += 1
        self.session.event_once(
            "compile-failed",
            f"{name} could not compile a graph, which is not recorded: {_first_line(error)}",
        )

    # --- Module calls, which this tap ignores.

    def around_root(self, module: nn.Module) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def before_forward(self, frame: Any, inputs: Any) -> None:
        """Do nothing."""

    def on_forward(self, frame: Any, inputs: Any, outputs: Any) -> None:
        """Do nothing."""


def _first_line(error: BaseException) -> str:
    # Messages of the compiler may be pages long; the first line or two name the problem.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text}"[:300]


def _forget_compiled() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


# A backend for `torch.compile` that executes graphs node by node and records every node.


NAME = "driftline"


class RecordedGraphs:
    """Records the graphs that are compiled with its backend.

    Args:
        path: The run's folder, which is made when the first graph is compiled.

    Raises:
        AlreadyThere: The folder exists; raised when the first graph is compiled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: RunWriter | None = None
        # Without levels, modules are watched for their names and for steps, but not recorded.
        self._session = CaptureSession(self._make_writer, levels=())
        self._session.sees_graphs = True
        self._recorder = GraphRecorder(
            self._session, lambda line: self._make_writer().sheet(GRAPHS, line)
        )
        call_origins.install()
        self._session.start()
        atexit.register(self.close)

    def backend(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend, to be passed as in `torch.compile(model, backend=recorded.backend)`."""
        return compile_by_nodes(graph, inputs, NAME, lambda: (self._recorder,))

    def close(self) -> None:
        """Seal the run; graphs that are executed later are not recorded."""
        if not self._session.running:
            return
        atexit.unregister(self.close)
        call_origins.remove()
        recorder = self._recorder
        if recorder.graphs:
            ran = WHAT_RAN["fx"].format(backends=NAME)
            self._session.event(
                "graphs", f"{ran} ({recorder.totals()})", engine="fx", graphs=recorder.graphs
            )
        self._session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make_writer(self) -> RunWriter:
        if self._writer is None:
            place = settings.job_place()
            folder = create_run(self.path, force=False, world_size=place.world_size)
            self._writer = RunWriter(folder, rank=place.rank, world_size=place.world_size)
            self._writer.describe(**facts())
        return self._writer
