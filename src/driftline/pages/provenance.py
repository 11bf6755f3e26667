"""What two runs say of themselves, and in what they differ: versions, number formats, devices.

Reads what the runs wrote down; whether a difference explains anything is for the reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from driftline.comparison.table import Side, Table
from driftline.runs.run import Run

_CALLED = {
    "target": "target",
    "dtypes": "number formats",
    "default_dtype": "default number format",
    "devices": "devices",
    "framework": "framework",
    "seed": "seed",
    "deterministic": "deterministic algorithms",
    "threads": "threads",
    "world_size": "processes in the job",
    "machine": "processor",
    "platform": "system",
    "python": "Python",
    "driftline": "captured by driftline",
    "git": "commit",
    "command": "command",
    "argv": "command",
    "created": "made at",
    "format": "kind of dump",
}
"""Facts that are shown, in this order."""
_NUMBERS = frozenset(
    {
        *("dtypes", "default_dtype", "devices", "framework", "seed", "deterministic", "threads"),
        *("world_size", "machine", "git", "target"),
    }
)
"""Facts that can change numbers; so can versions of libraries and environment variables."""
_ALWAYS_OTHER = frozenset({"created"})
_MOST_CLASSES = 12
_A_HABIT = 3
"""From so many sites on another name of a class is a way of naming."""


def sides(table: Table, reference: Run | None = None, candidate: Run | None = None) -> Any:
    """Both sides of a table: their facts, what differs between them, what does not."""
    ours = _facts(table.reference, reference)
    theirs = _facts(table.candidate, candidate)
    differences = _tensors(table)
    same: list[list[str]] = []
    for what in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(what), theirs.get(what)
        kind = _kind(what)
        shown = _CALLED.get(what, what)
        if here == there:
            same.append([shown, here or ""])
        elif what not in _ALWAYS_OTHER:
            differences.append(
                {
                    "what": shown,
                    "reference": here or "not said",
                    "candidate": there or "not said",
                    # What one side does not say is no difference that could be acted upon.
                    "weight": kind if here and there else "other",
                }
            )
    differences.sort(key=lambda each: each["weight"] != "numbers")
    short = _short(table.reference.path) != _short(table.candidate.path)
    return {
        "reference": _side(table.reference, ours, short=short),
        "candidate": _side(table.candidate, theirs, short=short),
        "differences": differences,
        "same": same,
    }


def _short(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _side(side: Side, facts: Mapping[str, str], *, short: bool) -> dict[str, Any]:
    return {
        "name": (_short(side.path) if short else side.path) or "in memory",
        "path": side.path,
        "facts": [[_CALLED.get(what, what), value] for what, value in facts.items()],
        "losses": list(side.losses),
    }


def _kind(what: str) -> str:
    plain = what in _NUMBERS or what not in _CALLED
    return "numbers" if plain else "other"


def _tensors(table: Table) -> list[dict[str, str]]:
    """What the tensors themselves show: number formats of pairs, modules of another class."""
    compared = [row for row in table.rows if row.compared]
    formats = Counter(
        (row.reference_dtype, row.candidate_dtype)
        for row in compared
        if row.reference_dtype != row.candidate_dtype
    )
    found = [
        {
            "what": f"stored tensors ({count} of {len(compared)})",
            "reference": here,
            "candidate": there,
            "weight": "numbers",
        }
        for (here, there), count in formats.most_common(4)
    ]
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    for row in table.rows:
        if row.candidate_class and row.candidate_class != row.class_name:
            kinds.setdefault((row.class_name, row.candidate_class), {})[row.site] = None
    for (here, there), sites in sorted(kinds.items(), key=lambda each: len(each[1]))[
        :_MOST_CLASSES
    ]:
        first = next(iter(sites))
        few = len(sites) < _A_HABIT
        what = f"class of {first}"
        if len(sites) > 1:
            what += f" and {len(sites) - 1} more"
        # What holds for many sites is how another framework calls them; a single one is a clue.
        found.append(
            {
                "what": what,
                "reference": here,
                "candidate": there,
                "weight": "numbers" if few else "other",
            }
        )
    return found


def _facts(side: Side, run: Run | None) -> dict[str, str]:
    """Fact → its value in words, in the order of a reader's interest."""
    said: dict[str, Any] = dict(side.about)
    if run is not None:
        processes = run.processes()
        said |= {**run.manifest, **(processes[0] if processes else {})}
    facts: dict[str, str] = {}
    for what in _CALLED:
        if what in said and (value := _worded(what, said[what])):
            facts[what] = value
        if what == "framework":
            facts |= _several(said.get("versions"))
        if what == "machine":
            facts |= _several(said.get("environment"))
    if "argv" in facts and "command" in facts:
        del facts["argv"]
    return facts


def _several(found: Any) -> dict[str, str]:
    if not isinstance(found, Mapping):
        return {}
    items = cast("Mapping[object, object]", found).items()
    return {str(name): str(value) for name, value in items if value not in (None, "")}


def _worded(what: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if what == "git" and isinstance(value, Mapping):
        told = cast("Mapping[str, Any]", value)
        commit = str(told.get("commit") or "")[:12]
        return f"{commit}{' with changes' if told.get('dirty') else ''}" if commit else ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        joint = " " if what in ("command", "argv") else ", "
        return joint.join(str(each) for each in cast("Iterable[object]", value))
    return str(value)
