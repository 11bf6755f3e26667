"""The error watch of one launched process: begun when torch is imported, ended with the process.

The ways to end are those of a captured process (`begin.py`). With `exit`, the first finding stops
the process and those that wait for it, up to the launcher.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from driftline.adapters.findings import Finding, FindingsFile, headroom_rows
from driftline.launch.begin import Launched
from driftline.launch.plan import CapturePlan
from driftline.launch.wake import leave_mark
from driftline.launch.watch_plan import WatchPlan

if TYPE_CHECKING:
    from driftline.runs.sink import Sink

DOOR = "driftline.adapters.torch.watch_door"
STOPPED = 1
"""Exit status of a process that was stopped at a finding."""
MOST_SITES = 20_000
MOST_UNWRITTEN = 100
_MOST_ANCESTORS = 64


class Watched(Launched):
    """The error watch of one launched process."""

    def __init__(self, watch: WatchPlan, plan_path: str) -> None:
        super().__init__(
            CapturePlan(
                output=watch.folder,
                levels=(),
                max_bytes=watch.max_bytes,
                log_level=watch.log_level,
                command=watch.command,
            ),
            plan_path,
        )
        self.watch = watch
        door = importlib.import_module(DOOR)
        # The probe of the ATB library writes the seed's text itself.
        texts = None if watch.engine == "atb" else Path(watch.output)
        self.file = FindingsFile(Path(watch.folder), texts)
        self.reporter: Any
        self.session, self.reporter = door.make_watch(
            self.sink,
            self.file,
            door.watch_options(watch.types, watch.allow),
            watch.level,
            rank=self.place.rank,
            after=self._found,
        )

    def end(self) -> None:
        if self.ended:
            return
        super().end()
        with contextlib.suppress(OSError):
            leave_mark(self.plan_path, "watched", json.dumps(self._counts()))

    def _counts(self) -> dict[str, Any]:
        reporter = self.reporter
        rows = headroom_rows(reporter.peaks, reporter.device_peaks)
        return {
            "pid": os.getpid(),
            "rank": self._rank()[0],
            "calls": reporter.calls,
            # Those on disk are read there; these are for a disk that takes nothing.
            "unwritten_findings": [one.to_json() for one in reporter.findings[:MOST_UNWRITTEN]]
            if self.file.failure
            else [],
            "propagators": reporter.propagators,
            "repeats": reporter.repeats,
            "remarks": [*reporter.remarks, *filter(None, (self.file.failure,))],
            "headroom": rows[:MOST_SITES],
        }

    def _forked(self) -> None:
        super()._forked()
        self.reporter.after_fork()

    def _make_sink(self) -> Sink:
        from driftline.adapters.torch.provenance import facts
        from driftline.runs.writer import RunWriter

        rank, world_size = self._rank()
        writer = RunWriter(
            self.plan.output,
            rank=rank,
            world_size=world_size,
            command=self.plan.command,
            max_bytes=max(1, self.plan.max_bytes // max(1, world_size)),
            seal_at_exit=False,
        )
        writer.describe(**facts())
        return writer

    def _found(self, finding: Finding) -> None:
        if self.watch.exit:
            self._stop(finding)

    def _stop(self, finding: Finding) -> NoReturn:
        """End this process, and those between it and the launcher, which prints the finding."""
        with contextlib.suppress(Exception):
            leave_mark(self.plan_path, "stopped", finding.to_json())
        with contextlib.suppress(Exception):
            self.end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for pid in ancestors(self.watch.launcher):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        os._exit(STOPPED)


def ancestors(launcher: int) -> list[int]:
    """Processes between the launcher and this one, the launcher's child first.

    None where they cannot be followed up to it.
    """
    found: list[int] = []
    pid = os.getppid()
    while pid != launcher and pid > 1 and len(found) < _MOST_ANCESTORS:
        found.insert(0, pid)
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(after_name[1])
        except (OSError, ValueError, IndexError):
            return []
    return found if pid == launcher else []
