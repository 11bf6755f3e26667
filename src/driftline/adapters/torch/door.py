"""What the doors of capture need of torch: a session for one model, and who runs now."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from torch import nn

from driftline.adapters.door import Capture, capture, step
from driftline.adapters.reduction import Reduction
from driftline.adapters.selection import Selection
from driftline.adapters.torch.provenance import facts
from driftline.adapters.torch.session import CaptureSession
from driftline.adapters.torch.steps import StepsBy
from driftline.runs.calls import CALLS, GRAPHS
from driftline.runs.sink import Sheets, Sink

__all__ = [
    "Capture",
    "capture",
    "check_graph",
    "check_levels",
    "facts",
    "is_model",
    "session_for",
    "step",
    "watch_graphs",
]


def is_model(thing: object) -> bool:
    return isinstance(thing, nn.Module)


def check_levels(levels: Sequence[str]) -> None:
    """torch shows every level there is."""
    del levels


def session_for(
    sink: Sink,
    selection: Selection,
    reduction: Reduction,
    levels: Sequence[str],
    *,
    model: nn.Module,
    rank: int,
    steps_by: StepsBy,
    to_folder: bool,
) -> CaptureSession:
    """A session of one model, not started yet; a run in a folder can have operators replayed."""
    session = CaptureSession(
        sink, selection, reduction, levels, model=model, rank=rank, steps_by=steps_by
    )
    if to_folder and session.replayable and isinstance(sink, Sheets):
        from driftline.adapters.torch.calls import CallTap

        session.taps.append(CallTap(session, functools.partial(sink.sheet, CALLS)))
        session.for_replay = True
    return session


def check_graph(graph: str | None, levels: Sequence[str], *, fusion: bool) -> None:
    """Whether compiled graphs can be seen as a person asked for it.

    Raises:
        BadInput: No such graph, or levels that cannot be seen at the same time.
    """
    from driftline.adapters.torch.graphs.tap import known_graph

    known_graph(graph, levels, fusion=fusion)


def watch_graphs(
    session: CaptureSession, sink: Sink, graph: Literal["fx", "inductor"], *, fusion: bool
) -> None:
    """Let a session see the graphs that `torch.compile` makes."""
    from driftline.adapters.torch.graphs.tap import GraphTap

    write = functools.partial(sink.sheet, GRAPHS) if isinstance(sink, Sheets) else None
    session.taps.append(GraphTap(session, graph, write, fusion=fusion, afresh=True))
