"""A backend for `torch.compile` that executes graphs node by node and records every node.

    graphs = RecordedGraphs("run")
    model = torch.compile(model, backend=graphs.backend)

The run is written while the program runs; it appears with the first graph and is sealed when the
program ends, or by `close`.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from driftline import settings
from driftline.adapters.torch.graphs import stamps
from driftline.adapters.torch.graphs.fx import compile_by_nodes
from driftline.adapters.torch.graphs.recorder import Recorder
from driftline.adapters.torch.graphs.tap import WHAT_RAN
from driftline.adapters.torch.provenance import facts
from driftline.adapters.torch.session import CaptureSession
from driftline.runs.calls import GRAPHS
from driftline.runs.manifest import create_run
from driftline.runs.writer import RunWriter

NAME = "driftline"


class RecordedGraphs:
    """Records the graphs that are compiled with its backend.

    Args:
        path: The run's folder; made when the first graph is compiled.

    Raises:
        AlreadyThere: The folder exists; raised where the first graph is compiled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: RunWriter | None = None
        # No level: modules are watched for their names and for the steps, and not recorded.
        self._session = CaptureSession(self._make_writer, levels=())
        self._session.sees_graphs = True
        self._recorder = Recorder(
            self._session, lambda line: self._make_writer().sheet(GRAPHS, line)
        )
        stamps.install()
        self._session.start()
        atexit.register(self.close)

    def backend(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What `torch.compile(model, backend=...)` takes."""
        return compile_by_nodes(graph, inputs, NAME, lambda: (self._recorder,))

    def close(self) -> None:
        """Seal the run; graphs that are executed later are not recorded."""
        if not self._session.running:
            return
        atexit.unregister(self.close)
        stamps.remove()
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
