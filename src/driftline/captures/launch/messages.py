"""Messages of launched processes to their launcher: small files, read when the program has ended.

A message's file name begins with its kind. A process that was killed leaves its early messages and
no report; the run on disk tells the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

# Limits, in case the program writes into the folder itself or calls very many modules.
LARGEST_MESSAGE = 16 << 20
MOST_PLACES = 20_000


@dataclass(frozen=True, slots=True)
class Place:
    """A module that was called."""

    site: str
    class_name: str
    ids: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """Report of one process about its capture, written when the process ends.

    Attributes:
        pid: Its process id.
        rank: Its rank.
        calls: Number of called modules, and of operators called outside modules, selected or not.
        steps_seen: Steps that ran.
        steps_taken: Steps that ran and were selected.
        tensors: Number of tensors passed to the sink.
        bytes: Number of bytes that the sink wrote.
        places: Called modules, to explain patterns that matched nothing.
        notes: Sentences for the user.
        failure: The system's reason why tensors could not be written; empty if they could.
    """

    pid: int
    rank: int = 0
    calls: int = 0
    steps_seen: tuple[int, ...] = ()
    steps_taken: tuple[int, ...] = ()
    tensors: int = 0
    bytes: int = 0
    places: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProcessReport:
        # Every field is converted, because a process of another version may have written it.
        data = cast("dict[str, Any]", json.loads(text))
        return cls(
            pid=int(data["pid"]),
            rank=int(data["rank"]),
            calls=int(data["calls"]),
            steps_seen=tuple(map(int, data["steps_seen"])),
            steps_taken=tuple(map(int, data["steps_taken"])),
            tensors=int(data["tensors"]),
            bytes=int(data["bytes"]),
            places=tuple(Place(**place) for place in data["places"]),
            notes=tuple(map(str, data["notes"])),
            failure=str(data.get("failure", "")),
        )


@dataclass(frozen=True, slots=True)
class Messages:
    """All messages of one launch.

    Attributes:
        reached: Number of Python processes that were reached.
        started: Number of captures that were started, one per process and framework.
        failed: Reasons why capture could not start; equal ones once.
        too_old: Versions of Python that are too old, such as `Python 3.9.2`.
        reports: Reports that processes wrote at their end.
        experiments: The result of the experiment in each process, as JSON.
        frameworks: Frameworks for which capture was started; torch if none is named.
        apart: Frameworks that were imported and that this command does not support.
        absent: Frameworks that the program looked for and that are not installed.
        unasked: Frameworks that were imported but excluded by the user's options.
        unseen: Commands of Python processes that lacked the variables of capture.
    """

    reached: int = 0
    started: int = 0
    failed: tuple[str, ...] = ()
    too_old: tuple[str, ...] = ()
    reports: tuple[ProcessReport, ...] = field(default=())
    experiments: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ("torch",)
    apart: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def places(self) -> set[Place]:
        return {place for report in self.reports for place in report.places}


def read_messages(folder: Path) -> Messages:
    """Read all messages; a report that was cut off by a kill is skipped."""
    # A text that many ranks sent is kept once.
    texts: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        if path.stat().st_size > LARGEST_MESSAGE:
            continue
        texts.setdefault(path.name.partition(".")[0], []).append(
            path.read_text(encoding="utf-8", errors="replace")
        )
    return Messages(
        reached=len(texts.get("reached", [])),
        started=len(texts.get("started", [])),
        failed=tuple(dict.fromkeys(texts.get("failed", []))),
        too_old=tuple(dict.fromkeys(texts.get("too-old", []))),
        reports=tuple(_reports(texts.get("report", []))),
        experiments=tuple(texts.get("experiment", [])),
        # An empty text means torch.
        frameworks=tuple(sorted(set(filter(None, texts.get("started", []))))) or ("torch",),
        apart=tuple(sorted(set(texts.get("apart", [])))),
        absent=tuple(sorted(set(texts.get("absent", [])))),
        unasked=tuple(sorted(set(texts.get("unasked", [])))),
    )


def _reports(texts: Iterable[str]) -> Iterable[ProcessReport]:
    for text in texts:
        try:
            yield ProcessReport.from_json(text)
        except (ValueError, TypeError, KeyError):
            continue
