"""The Python entry to the error check: `with watch_errors("out") as watch: ...`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from torch import nn

from driftline import settings
from driftline.captures.errcheck.findings import TYPES, Finding, FindingsFile, wanted_types
from driftline.captures.selection import patterns
from driftline.captures.torch.errcheck.reporter import Reporter, WatchOptions
from driftline.captures.torch.session import CaptureSession
from driftline.errors import BadInput, did_you_mean
from driftline.runs.sinks import Sink

WatchLevel = Literal["operator", "module"]
LEVELS: tuple[WatchLevel, ...] = ("operator", "module")


class ErrorWatch:
    """An error check that runs inside a `with` block; its results are in `findings`."""

    def __init__(self, session: CaptureSession, reporter: Reporter) -> None:
        self.session = session
        self.reporter = reporter

    @property
    def findings(self) -> list[Finding]:
        return self.reporter.findings

    def __enter__(self) -> Self:
        self.session.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.stop()


def watch_errors(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    types: str | Iterable[str] = "overflow",
    level: WatchLevel = "operator",
    allow: str | Iterable[str] = (),
    max_bytes: int = 256 << 20,
) -> ErrorWatch:
    """Find the operators or modules inside a `with` block that produce NaN, Inf and the like.

    Args:
        path: Folder for the findings and for a run with the tensors of each. It is created with the
            first finding.
        model: Watch the calls of this model only; None watches everything.
        types: One or more of overflow, nan, inf, saturation, underflow, all.
        level: operator, or module, which is cheaper and less exact.
        allow: One or more globs on sites and operators that may produce any value.
        max_bytes: The run stores at most this many bytes of tensors.

    Raises:
        BadInput: There is no such type or level.
    """
    from driftline.runs.writer import RunWriter

    # The run is made with the first finding, so a clean program leaves nothing on disk.
    folder = Path(path)
    place = settings.job_place()

    def sink() -> Sink:
        return RunWriter(folder, rank=place.rank, world_size=place.world_size, max_bytes=max_bytes)

    options = watch_options(patterns(types), patterns(allow))
    session, reporter = make_watch(
        sink, FindingsFile(folder, folder), options, level, model=model, rank=place.rank
    )
    return ErrorWatch(session, reporter)


def watch_options(types: Iterable[str], allow: Iterable[str]) -> WatchOptions:
    """Check the types and make options of them.

    Raises:
        BadInput: There is no such type.
    """
    words = tuple(types)
    for word in words:
        if word not in TYPES:
            raise BadInput(f"there is no type '{word}'", hint=did_you_mean(word, TYPES))
    return WatchOptions(wanted_types(words or ("overflow",)), tuple(allow))


def make_watch(
    sink: Sink | Callable[[], Sink],
    file: FindingsFile,
    options: WatchOptions,
    level: WatchLevel,
    *,
    model: nn.Module | None = None,
    rank: int = 0,
    after: Callable[[Finding], None] | None = None,
) -> tuple[CaptureSession, Reporter]:
    """A session for the error check, not started, and the reporter of its findings."""
    if level not in LEVELS:
        raise BadInput(f"there is no level '{level}'", hint=did_you_mean(level, LEVELS))
    # Without levels the session records nothing by itself; the tap below checks values.
    session = CaptureSession(sink, levels=(), model=model, rank=rank)
    session.begins_early = False  # without a finding there is no run
    reporter = Reporter(session, options, file, after)
    # A tap is imported only if needed, because the one for operators loads much of torch.
    if level == "operator":
        from driftline.captures.torch.errcheck.operators import ErrorTap

        session.taps.append(ErrorTap(session, reporter))
    else:
        from driftline.captures.torch.errcheck.modules import ModuleTap

        session.taps.append(ModuleTap(session, reporter))
    return session, reporter
