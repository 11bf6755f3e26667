"""Messages of launched processes to their launcher: small files, read when the program has ended.

A message's kind is the beginning of its file name. A process that was killed leaves its early
messages and no report; the run on disk says the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

# Bounds against a program that writes into the folder itself, or calls modules without end.
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
        pid: Process.
        rank: Its rank.
        calls: Modules called, and operators called outside modules, wanted or not.
        steps_seen: Steps that ran.
        steps_taken: Steps of which something was wanted.
        tensors: Tensors handed to the sink.
        bytes: Bytes the sink took over.
        places: Modules seen, for patterns that matched nothing.
        notes: Sentences for the person.
        failure: Why tensors could not be written, as the system says it; empty if they could.
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
        # Written by another process, maybe of another version: every field is converted.
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
        reached: Python processes that were reached.
        started: Processes that imported the framework, with capture running.
        failed: Why capture could not start, one sentence per process.
        too_old: Pythons that are too old, as they call themselves.
        reports: What processes said at their end.
        experiments: What came of an experiment in each process, as JSON.
        frameworks: Those that were imported, with capture running; torch where none is named.
        apart: Frameworks that were imported and that this command cannot do its work with.
        absent: Frameworks that were asked for and are not installed.
        unasked: Frameworks that were imported and that nobody asked to look at.
        unseen: Commands of Python processes that had not the variables of capture.
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
    # The same text from many ranks is one sentence for the reader.
    """Read all messages; one that was cut short by a kill is passed over."""
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
        # An empty text stands for torch.
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
