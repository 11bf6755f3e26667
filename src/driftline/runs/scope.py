"""The scope of a run: how its program ended, which steps ran, and what was left out or not seen.

A comparison stores these facts in its table, because they limit what agreement means; `show` prints
them. The launcher records the end of a program here (`note_end`); each process stores its own facts
in `process.json` under `capture`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.runs.json_values import count_of, list_of, object_of
from driftline.runs.layout import ORPHAN_EVENTS, folder_name

if TYPE_CHECKING:
    from driftline.runs.run import Run
    from driftline.runs.sinks import JSON

VERSION = 1
"""Version of the JSON form; a reader ignores fields that it does not know."""
ENDED = "ended"
"""Kind of the event that the launcher writes when the program has ended."""
LIMITING = (
    # Parts of the model that were not seen.
    *("compiled", "graph-unseen", "inside", "operators-unseen", "backward-unseen", "cuda-graph"),
    # Tensors that were not kept, or not kept completely.
    *("refused", "lost", "operator-lost", "gradient-lost", "parameters-lost", "too-large"),
    *("limit", "disk", "dropped", "degraded", "device-failed", "calls-limit", "capture-fault"),
)
"""Kinds of events that say what a run cannot show."""
_MOST_NOTES = 8
_LONGEST = 300
_MOST_STEPS = 1 << 40


class RunScope(NamedTuple):
    """The scope of one run.

    Attributes:
        captured: Whether Driftline captured it; dumps of other tools lack all other facts.
        status: Exit status of its program as a shell reports it; None if unknown.
        exception: The exception that ended the program, in words; empty if there was none.
        unfinished: Steps that a process began and did not finish, in words.
        unsealed: Processes that did not close their part: killed, or still running.
        growing: Whether a process was still writing when the run was read.
        steps_ran: Number of steps that ran, captured or not; 0 if unknown.
        filters: What the selection left out on purpose, in words.
        notes: What the capture reported that it could not see or keep.
        compiled: Modules that were compiled, so that their parts were not seen.
        hidden: These modules and all modules inside them, each with its number of leaves.
        ranks: Number of ranks of the job; 0 if unknown.
        engine: Framework that computed it, as far as known: torch, paddle, onnxruntime.
        updates: Number of optimizer steps; -1 if unknown.
        levels: What was captured in addition to calls: gradients, params.
    """

    captured: bool = False
    status: int | None = None
    exception: str = ""
    unfinished: tuple[str, ...] = ()
    unsealed: tuple[str, ...] = ()
    growing: bool = False
    steps_ran: int = 0
    filters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    ranks: int = 0
    engine: str = ""
    updates: int = -1
    hidden: tuple[tuple[str, int], ...] = ()
    levels: tuple[str, ...] = ()

    @property
    def has_modules(self) -> bool:
        """Whether its tensors belong to modules, and not to graph nodes or another tool's names."""
        return self.captured and self.engine in ("torch", "paddle")

    @property
    def ending(self) -> str:
        """How the program ended, in words; empty if it ended well or nothing is known."""
        if self.growing:
            return "is still running"
        if self.exception:
            return f"ended with {self.exception}"
        if self.status:
            return ending_words(self.status)
        if self.unsealed:
            return f"was killed before it closed its run ({', '.join(self.unsealed)})"
        return ""

    def to_json(self) -> dict[str, JSON]:
        """The facts that differ from their defaults."""
        facts: dict[str, JSON] = {
            name: list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
            if value != RunScope._field_defaults[name]
        }
        return {"version": VERSION, **facts}

    @classmethod
    def from_json(cls, shown: Any) -> RunScope:
        """The inverse of `to_json`; invalid values are ignored."""
        if not isinstance(shown, Mapping):
            return cls()
        facts = cast("Mapping[str, Any]", shown)
        status = facts.get("status")
        return cls(
            facts.get("captured") is True,
            status if type(status) is int else None,
            str(facts.get("exception") or ""),
            _words(facts.get("unfinished")),
            _words(facts.get("unsealed")),
            facts.get("growing") is True,
            count_of(facts.get("steps_ran"), _MOST_STEPS),
            _words(facts.get("filters")),
            _words(facts.get("notes")),
            _words(facts.get("compiled")),
            count_of(facts.get("ranks"), _MOST_STEPS),
            str(facts.get("engine") or ""),
            _updates(facts),
            tuple(_hidden(facts.get("hidden"))),
            _words(facts.get("levels")),
        )


def ending_words(status: int) -> str:
    """How a program ended, from its status as a shell reports it.

    >>> ending_words(3), ending_words(137)
    ('ended with status 3', 'was ended by signal 9 (SIGKILL)')
    """
    # A shell adds 128 to the signal; a larger number may still be a plain status.
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by signal {status - 128} ({signal.Signals(status - 128).name})"
    return f"ended with status {status}"


def note_end(folder: Path, status: int) -> None:
    """Record the exit status of a program in its run, unless the disk is full."""
    from driftline.runs.files.owned_file import OwnedFile
    from driftline.runs.provenance import event_line

    line = event_line(ENDED, f"the program {ending_words(status)}", 0, {"status": status})
    with contextlib.suppress(OSError), OwnedFile(folder / ORPHAN_EVENTS, "shared") as file:
        file.append_all(line)


def scope_of(run: Run) -> RunScope:
    """The scope of a run; that of a view is the run's own."""
    own = [facts for facts in run.processes() if _is_captured(run.manifest, facts)]
    if not own:
        return RunScope()
    captures = [object_of(facts.get("capture")) for facts in own]
    status, raised, notes, compiled = _facts_of_events(run)
    unsealed = [facts for facts in own if facts.get("sealed") is not True]
    exceptions = (str(capture.get("exception") or "") for capture in captures)
    exception = next(filter(None, exceptions), "")
    # The parent kills a worker of a pool when the worker has delivered; that is its usual end.
    killed = [facts for facts in unsealed if not _is_pool_worker(facts, status)]
    ended_well = status == 0 and not exception
    return RunScope(
        True,
        status,
        exception,
        () if ended_well else tuple(_unfinished(own, raised)),
        tuple(_name(facts) for facts in killed),
        run.growing,
        max((count_of(capture.get("steps_ran"), _MOST_STEPS) for capture in captures), default=0),
        tuple(_filters(captures[0], own[0])),
        notes,
        compiled,
        run.facts.world,
        run.facts.framework,
        max(map(_updates, captures), default=-1),
        tuple(_hidden_leaves(run, compiled)),
        tuple(level for level in _OTHER_LEVELS if level in list_of(captures[0].get("levels"))),
    )


def _hidden_leaves(run: Run, compiled: Container[str]) -> Iterable[tuple[str, int]]:
    """Modules in compiled regions, each with its number of leaves in the module tree."""
    tree = (run.topology() or {}) if compiled else {}
    counts: dict[str, int] = {}

    def leaves_inside(node: Mapping[str, Any], within: bool) -> int:
        site = str(node.get("site", ""))
        within = within or site in compiled
        children = _nodes(node.get("children"))
        count = sum(leaves_inside(child, within) for child in children)
        if within and children:
            counts[site] = count
        return count or 1

    for root in _nodes(tree.get("roots")):
        # No model has a tree deeper than Python's stack.
        with contextlib.suppress(RecursionError):
            leaves_inside(root, False)
    return counts.items()


def _nodes(listed: Any) -> list[Mapping[str, Any]]:
    entries = list_of(listed)
    return [cast("Mapping[str, Any]", entry) for entry in entries if isinstance(entry, Mapping)]


def _hidden(shown: Any) -> Iterable[tuple[str, int]]:
    for entry in list_of(shown):
        match entry:
            case [str() as site, int() as leaves] if 0 < leaves < _MOST_STEPS:
                yield site, leaves
            case _:
                continue


class _EventFacts(NamedTuple):
    """What the events of a run say about its scope."""

    status: int | None
    raised: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    compiled: tuple[str, ...]


def _facts_of_events(run: Run) -> _EventFacts:
    status: int | None = None
    # Dictionaries keep the order, and each note once.
    notes: dict[str, None] = {}
    compiled: dict[str, None] = {}
    raised: list[Mapping[str, Any]] = []
    for event in run.events():
        kind = event.get("kind")
        details = object_of(event.get("details"))
        if kind == ENDED and type(details.get("status")) is int:
            status = details["status"]
        elif kind == "exception":
            raised.append(event)
        elif kind in LIMITING:
            if len(notes) < _MOST_NOTES:
                notes.setdefault(str(event.get("message", ""))[:_LONGEST])
            if kind == "compiled" and isinstance(details.get("site"), str):
                compiled.setdefault(details["site"])
    return _EventFacts(status, tuple(raised), tuple(notes), tuple(compiled))


def _is_captured(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether Driftline captured a process, rather than converted its dump."""
    return "sealed" in facts and "converted_from" not in manifest and "converted_from" not in facts


def _is_pool_worker(facts: Mapping[str, Any], status: int | None) -> bool:
    return status == 0 and object_of(facts.get("capture")).get("daemon") is True


def _unfinished(
    processes: Iterable[Mapping[str, Any]], raised: Iterable[Mapping[str, Any]]
) -> Iterable[str]:
    """Steps whose model was left by an exception that ended the program."""
    events = list(raised)
    for facts in processes:
        step = object_of(facts.get("capture")).get("unfinished_step")
        if type(step) is not int:
            continue
        place = (facts.get("rank", 0), facts.get("process", 0))
        reasons = [
            str(event.get("message"))[:_LONGEST]
            for event in events
            if object_of(event.get("details")).get("step") == step
            and (event.get("rank", 0), event.get("process", 0)) == place
        ]
        where = f" of {_name(facts)}" if place != (0, 0) else ""
        yield f"step {step}{where}" + (f" ({reasons[-1]})" if reasons else "")


def _filters(capture: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    """The selection in words, without steps, which the step numbers show."""
    selection = dict(object_of(capture.get("selection")))
    # A selection of ranks may apply when files are made, if the rank is known only then.
    if facts.get("only_ranks"):
        selection["ranks"] = facts["only_ranks"]
    for name, value in selection.items():
        if name == "steps":
            continue
        shown = ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else value
        yield f"{_OPTIONS.get(name, name)} {shown}"[:_LONGEST]


_OTHER_LEVELS = ("gradients", "params")
RANKS = "--rank"
_OPTIONS = {
    "sites": "--site",
    "classes": "--class",
    "ports": "ports",
    "ranks": RANKS,
    "ids": "-ids",
    "opnames": "-opname",
    "device": "-device",
}


def _name(facts: Mapping[str, Any]) -> str:
    return folder_name(
        count_of(facts.get("rank"), _MOST_STEPS), count_of(facts.get("process"), _MOST_STEPS)
    )


def _updates(facts: Mapping[str, Any]) -> int:
    count = facts.get("updates")
    return count if type(count) is int and 0 <= count < _MOST_STEPS else -1


def _words(value: Any) -> tuple[str, ...]:
    return tuple(str(word)[:_LONGEST] for word in list_of(value)[:_MOST_NOTES])
