"""What the doors of capture need of torch: a session for one model, and who runs now."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn

from driftline.adapters.door import Capture, capture, step
from driftline.adapters.reduction import Reduction
from driftline.adapters.selection import Selection
from driftline.adapters.torch.provenance import facts
from driftline.adapters.torch.session import CaptureSession
from driftline.adapters.torch.steps import StepsBy
from driftline.runs.calls import CALLS, GRAPHS
from driftline.runs.sink import Sheets, Sink

__all__ = ["Capture", "capture", "facts", "is_model", "session_for", "step", "watch_graphs"]


def is_model(thing: object) -> bool:
    return isinstance(thing, nn.Module)


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


def watch_graphs(session: CaptureSession, sink: Sink, graph: str | None, *, fusion: bool) -> None:
    """Let a session see the graphs that `torch.compile` makes.

    Raises:
        BadInput: No such graph, or levels that cannot be seen at the same time.
    """
    from driftline.adapters.torch.graphs.tap import GraphTap, known_graph

    engine = known_graph(graph, session.levels, fusion=fusion)
    write = functools.partial(sink.sheet, GRAPHS) if isinstance(sink, Sheets) else None
    session.taps.append(GraphTap(session, engine, write, fusion=fusion, afresh=True))
