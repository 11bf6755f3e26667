"""Sees the graphs of `torch.compile`: node by node (`fx`), or kernel by kernel (`inductor`)."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import nn

from driftline.adapters.torch.graphs import compiling, inductor, stamps
from driftline.adapters.torch.graphs.arrival import when_imported
from driftline.adapters.torch.graphs.fx import compile_by_nodes
from driftline.adapters.torch.graphs.nodes import compile_id
from driftline.adapters.torch.graphs.recorder import Recorder, Write
from driftline.errors import BadInput, did_you_mean

_TOLD = 3
GraphEngine = Literal["fx", "inductor"]
WHAT_RAN = {
    "fx": "every compiled graph was executed node by node by torch's own operators; the backend of "
    "the program ({backends}) compiled none of them",
    "inductor": "kernels ran as inductor made them; each result was read where its kernel had "
    "written it",
    "inductor --no-fusion": "inductor was told to fuse nothing: every node has a kernel of its "
    "own, which is not what the program runs otherwise",
}


def known_graph(name: str | None, levels: Sequence[str], *, fusion: bool) -> None:
    """What a person asked to see of compiled graphs.

    Raises:
        BadInput: It does not exist, or does not go with the levels.
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
        engine: `fx` or `inductor`.
        write: Takes the lines of the list of graphs.
        fusion: For inductor: whether kernels may be fused, as they are without us.
        afresh: What was compiled before and what is compiled meanwhile is forgotten: for a capture
            of a part of a program.
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
        self.recorder = Recorder(session, write)
        self._afresh = afresh
        self._backends: dict[str, int] = {}
        self._failures = 0
        self._begun = False
        self._call_off: Callable[[], None] = lambda: None
        session.sees_graphs = True

    def install(self) -> None:
        if self._afresh:
            _forget_compiled()
        self._call_off = when_imported(compiling.MODULE, self._compiler_is_here)

    def _compiler_is_here(self) -> None:
        if not compiling.install(self):
            self._unseen()

    def _begin(self) -> None:
        """The first graph is about to be compiled."""
        if self._begun:
            return
        self._begun = True
        if not stamps.install():
            self._unseen()
        if self.engine == "inductor":
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
        self._call_off()
        compiling.remove(self)
        if self._begun:
            if self.engine == "inductor":
                inductor.remove(self)
            stamps.remove()
        if self._afresh:
            _forget_compiled()
        self._say_what_ran()

    def _say_what_ran(self) -> None:
        recorder, session = self.recorder, self.session
        said = f"--graph {self.engine}" + ("" if self.fusion else " --no-fusion")
        if not recorder.graphs:
            asked = ", ".join(sorted(self._backends))
            why = (
                f"the program compiled with {asked}, not with inductor"
                if asked and self.engine == "inductor"
                else "the program compiled no graph"
            )
            if not self._failures and session.execution_order:
                session.event("no-graph", f"{said}: {why}")
            return
        names = ", ".join(sorted(self._backends)) or "unknown"
        what = WHAT_RAN[said.removeprefix("--graph ")].format(backends=names)
        counts = recorder.totals()
        if self.engine == "inductor":
            counts += f", kernels: {recorder.kernels}"
            if recorder.inside:
                counts += f"; {recorder.inside} values inside of fusions were computed beside them"
        session.event("graphs", f"{said}: {what} ({counts})", **self.counts())
        if recorder.off:
            told = [
                f"{operator} at {line or site} (relative_l2 {error:.3g})"
                for (site, _), (operator, line, error) in list(recorder.off.items())[:_TOLD]
            ]
            more = f" and {len(recorder.off) - _TOLD} more" if len(recorder.off) > _TOLD else ""
            session.event(
                "operators-off",
                "what the compiler made of some operators gives something else than torch's own "
                f"for the same inputs: {', '.join(told)}{more}",
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

    # --- a graph is compiled

    def backend(
        self, name: str, inputs: Sequence[Any], models: Sequence[nn.Module]
    ) -> Callable[..., Any] | None:
        self._backends[name] = self._backends.get(name, 0) + 1
        self.session.shielded("graphs", self._begin)
        self.session.shielded("graphs", self.recorder.meet, compile_id(), inputs, models)
        if self.engine != "fx":
            return None

        def by_nodes(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_by_nodes(graph, inputs, name, lambda: (self.recorder,))

        return by_nodes

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

    # --- module calls are not our business

    def around_root(self, module: nn.Module) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def before_forward(self, frame: Any, inputs: Any) -> None:
        """Graphs are seen where they are compiled and run."""

    def on_forward(self, frame: Any, inputs: Any, outputs: Any) -> None:
        """The same."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text}"[:300]


def _forget_compiled() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
