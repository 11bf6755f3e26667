"""Which tensors are captured: patterns over site, class, port, step and rank.

A selection is a pure value, which is passed as JSON to the program that is captured. This file
knows no framework. A tensor is captured if every filter accepts it; a filter that is not set
accepts everything. `ids`, `opnames`, `time`, `part` and `device` are filters of the tool that this
project replaces, kept for its users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Self, cast

from driftline.captures.ladder import LADDER, is_rung
from driftline.errors import BadInput, did_you_mean
from driftline.runs.records import PORTS, Moment, usual_moment

_IDS = re.compile(r"\d+(_\d+)*")
_RANGE = re.compile(r"(\d+)-(\d*)")
# Digits only, or a glob that can match digits: `1?`, `[0-3]`, `*`.
_NUMBER_GLOB = re.compile(r"\d+|(?=.*[*?\[])[\d*?\[\]!-]+")
_INPUT_PORTS = ("input", "grad_input")
_OUTPUT_PORTS = ("output", "grad_output")

LEVEL_PORTS: Mapping[str, tuple[str, ...]] = {
    "modules": ("input", "output"),
    "ops": ("input", "output"),
    "gradients": ("grad_input", "grad_output", "param_grad", "optimizer_grad"),
    "params": ("param",),
}
"""The ports that are captured at each level."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to capture.

    Attributes:
        sites: Globs on the site (`model.layers.*.mlp`); any of them.
        classes: Globs on the class name of the module, or the name of the operator.
        ports: Globs on the port.
        steps: Numbers (`3`), closed ranges (`3-5`), open ranges (`3-`), globs (`1?`), or `ladder`
            for the steps that are looked at when nobody names any.
        ranks: The same for ranks.
        ids: Places in the module tree: child indices joined by `_`, matched on whole components.
        children: Whether an id also stands for everything below it.
        opnames: Beginnings, in any case, of the class name or of the site's last component. With
            `ids` given too, a place is taken when either takes it.
        time: 0 before the call, 1 after it, 2 both; None takes inputs before and outputs after.
        part: 0 inputs, 1 outputs, 2 both.
        device: Index of the only wanted device; tensors on the host are always taken.
    """

    sites: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    children: bool = True
    opnames: tuple[str, ...] = ()
    time: int | None = None
    part: int = 2
    device: int | None = None

    def __post_init__(self) -> None:
        for ids in self.ids:
            if not _IDS.fullmatch(ids):
                raise BadInput(
                    f"'{ids}' is not an id",
                    hint="ids are child indices joined by '_', such as 2 or 3_1",
                )
        if self.time not in (None, 0, 1, 2):
            raise BadInput(f"time is 0 (before), 1 (after) or 2 (both), not {self.time}")
        if self.part not in (0, 1, 2):
            raise BadInput(f"part is 0 (inputs), 1 (outputs) or 2 (both), not {self.part}")
        for kind, numbers in (("step", self.steps), ("rank", self.ranks)):
            for pattern in numbers:
                _require_numbers(kind, pattern)
        # With a misspelt port nothing would be captured, without a message.
        for pattern in self.ports:
            if not any(fnmatchcase(port, pattern) for port in PORTS):
                raise BadInput(f"no port matches '{pattern}'", hint=did_you_mean(pattern, PORTS))

    def takes_place(self, site: str, class_name: str, ids: str | None = None) -> bool:
        """Whether a place is selected; `ids` is its position in the tree, None if it has none."""
        return (
            (not self.sites or any(fnmatchcase(site, p) for p in self.sites))
            and (not self.classes or any(fnmatchcase(class_name, p) for p in self.classes))
            and self._takes_operation(site, class_name, ids)
        )

    def _takes_operation(self, site: str, class_name: str, ids: str | None) -> bool:
        # Without these two filters every place is accepted.
        if not self.ids and not self.opnames:
            return True
        if ids is not None and any(
            ids == wanted or (self.children and ids.startswith(wanted + "_")) for wanted in self.ids
        ):
            return True
        # A name matches the class or the last part of the site, as users of the old tool expect.
        last, kind = site.rsplit(".", 1)[-1].lower(), class_name.lower()
        return any(
            kind.startswith(name.lower()) or last.startswith(name.lower()) for name in self.opnames
        )

    def takes_port(self, port: str) -> bool:
        if self.part == 0 and port in _OUTPUT_PORTS:
            return False
        if self.part == 1 and port in _INPUT_PORTS:
            return False
        if self.time == 0 and port == "output":  # an output does not exist before the call
            return False
        return not self.ports or any(fnmatchcase(port, p) for p in self.ports)

    def moments(self, port: str) -> tuple[Moment, ...]:
        """The moments at which a port is captured; only inputs can be captured twice."""
        if port != "input" or self.time is None:
            return (usual_moment(port),)
        wanted: dict[int, tuple[Moment, ...]] = {
            0: ("before",),
            1: ("after",),
            2: ("before", "after"),
        }
        return wanted[self.time]

    def takes_step(self, step: int) -> bool:
        return not self.steps or any(_number_matches(step, p) for p in self.steps)

    def takes_rank(self, rank: int) -> bool:
        return not self.ranks or any(_number_matches(rank, p) for p in self.ranks)

    def takes_device(self, index: int | None) -> bool:
        return self.device is None or index is None or index == self.device

    def step_count(self) -> int | None:
        """Largest number of steps that can be captured; None if it is unlimited."""
        wanted: set[int] = set()
        for pattern in self.steps:
            match = _RANGE.fullmatch(pattern)
            if pattern.isdigit() or pattern == LADDER:
                # Only step 0 of a ladder is counted, because the others need little space.
                wanted.add(int(pattern) if pattern != LADDER else 0)
            elif match and match[2]:
                wanted.update(range(int(match[1]), int(match[2]) + 1))
            # An open range or a glob has no last step.
            else:
                return None
        return len(wanted) if self.steps else None

    def unmatched(
        self, places: Iterable[tuple[str, str, str | None]]
    ) -> list[tuple[str, str, str]]:
        """Find the filters that matched none of the places that were seen.

        Args:
            places: (site, class name, ids) of every place that was seen.

        Returns:
            (name of the filter, its pattern, a hint) for each pattern without a match.
        """
        seen = list(places)
        sites = {site for site, _, _ in seen}
        classes = {name for _, name, _ in seen}
        known_ids = {ids for _, _, ids in seen if ids}
        misses: list[tuple[str, str, str]] = []
        for kind, patterns, vocabulary in (
            ("site", self.sites, sites),
            ("class", self.classes, classes),
        ):
            misses += [
                (kind, p, did_you_mean(p, vocabulary))
                for p in patterns
                if not any(fnmatchcase(word, p) for word in vocabulary)
            ]
        misses += [("ids", i, did_you_mean(i, known_ids)) for i in self.ids if i not in known_ids]
        words = classes | {site.rsplit(".", 1)[-1] for site in sites}
        misses += [
            ("opname", name, did_you_mean(name, words))
            for name in self.opnames
            if not any(word.lower().startswith(name.lower()) for word in words)
        ]
        return misses

    def in_words(self) -> str:
        """A description of the selection for users.

        >>> Selection(steps=("3-5",), ids=("2",), part=1).in_words()
        'ids 2 and all below them; steps 3-5; outputs only'
        """
        filters = (
            ("sites", self.sites),
            ("classes", self.classes),
            ("ports", self.ports),
            ("names that begin with", self.opnames),
            ("steps", self.steps),
            ("ranks", self.ranks),
        )
        parts = [f"{name} {', '.join(patterns)}" for name, patterns in filters if patterns]
        if self.ids:
            below = " and all below them" if self.children else ""
            parts.insert(0, f"ids {', '.join(self.ids)}{below}")
        if not any((self.sites, self.classes, self.opnames, self.ids)):
            parts.insert(0, "every module")
        moments = {0: "before the call only", 1: "after the call only", 2: "before and after"}
        parts += [moments[self.time]] if self.time is not None else []
        parts += [("inputs only", "outputs only")[self.part]] if self.part != 2 else []
        parts += [f"device {self.device}"] if self.device is not None else []
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Fields that differ from the defaults, so that a plan shows only what was requested."""
        defaults = Selection()
        return {
            f.name: list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
            for f in fields(self)
            if (value := getattr(self, f.name)) != getattr(defaults, f.name)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        names = {f.name for f in fields(cls)}
        for name in data:
            if name not in names:
                raise BadInput(f"a selection has no '{name}'", hint=did_you_mean(name, names))
        values: dict[str, Any] = {
            name: tuple(cast("list[str]", value)) if isinstance(value, list) else value
            for name, value in data.items()
        }
        return cls(**values)


def require_visible(ports: Iterable[str], levels: Iterable[str]) -> None:
    """Check that each selected port is captured at one of the levels.

    Raises:
        BadInput: A port is not.
    """
    chosen = tuple(levels)
    wanted = tuple(ports)
    seen = {port for level in chosen for port in LEVEL_PORTS[level]}
    call_ports = ("input", "output")
    if "ops" in chosen and all(any(fnmatchcase(p, w) for w in wanted) for p in call_ports):
        seen.add("param")  # operators that can be executed again also keep their parameters
    for pattern in wanted:
        if not any(fnmatchcase(port, pattern) for port in seen):
            shown = next(
                level
                for level, those in LEVEL_PORTS.items()
                if any(fnmatchcase(port, pattern) for port in those)
            )
            raise BadInput(
                f"port '{pattern}' is not seen at level {', '.join(chosen)}",
                hint=f"add the level {shown}",
            )


def _require_numbers(kind: str, pattern: str) -> None:
    """Check that a pattern can match a number, before a long program is started for nothing.

    Raises:
        BadInput: It cannot.
    """
    match = _RANGE.fullmatch(pattern)
    if kind == "step" and pattern == LADDER:
        return
    if match and match[2] and int(match[2]) < int(match[1]):
        raise BadInput(
            f"the {kind}s {pattern} end before they begin",
            hint=f"did you mean {match[2]}-{match[1]}?",
        )
    if not match and not _NUMBER_GLOB.fullmatch(pattern):
        raise BadInput(
            f"'{pattern}' is no {kind}",
            hint=f"write {kind}s as numbers, ranges (3-5, 3-) or globs (1?)",
        )


def _number_matches(number: int, pattern: str) -> bool:
    if pattern == LADDER:
        return is_rung(number)
    match = _RANGE.fullmatch(pattern)
    if match:
        return int(match[1]) <= number and (not match[2] or number <= int(match[2]))
    return fnmatchcase(str(number), pattern)


def patterns(value: object) -> tuple[str, ...]:
    """Patterns from a filter in any form that a caller may use: None, a text, a number, or several.

    >>> patterns("a, b"), patterns(range(2)), patterns(None)
    (('a', 'b'), ('0', '1'), ())
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, int):
        return (str(value),)
    if isinstance(value, Iterable):
        return tuple(part for item in cast("Iterable[object]", value) for part in patterns(item))
    raise BadInput(f"{value!r} cannot be a filter", hint="give a text, a number or a list of them")
