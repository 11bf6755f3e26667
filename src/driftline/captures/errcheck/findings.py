"""One finding of the error watch: what it holds, how it is said, how it is written down at once.

Each line is with the system before the program goes on, so a program that dies right after loses
nothing. Nothing is made on disk before there is a finding. Knows no framework.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from driftline.runs.owned_file import OwnedFile

TYPES = ("overflow", "nan", "inf", "saturation", "underflow", "all")
_MEANS = {
    "overflow": ("nan", "inf"),
    "all": ("nan", "inf", "saturation", "underflow"),
}
_OVERFLOWS = frozenset({"nan", "inf", "saturation"})
_WORDS = {"nan": "NaN", "inf": "Inf", "saturation": "saturation", "underflow": "underflow"}


def wanted_types(given: Sequence[str]) -> frozenset[str]:
    """What is looked for, in full.

    >>> sorted(wanted_types(["overflow"]))
    ['inf', 'nan']
    """
    return frozenset(one for word in given for one in _MEANS.get(word, (word,)))


@dataclass(frozen=True, slots=True)
class Side:
    """One tensor of the operator that is found at fault.

    Attributes:
        name: The argument or the position of the output.
        dtype: Element type.
        shape: Shape.
        elements: How many.
        peak: Largest magnitude of its finite values; None where something is not finite.
        nan: NaN in it; on a device, 1 is "at least one".
        pos_inf: +infinities.
        neg_inf: -infinities.
        at_limit: Values at the format's largest magnitude.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    peak: float | None = None
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    at_limit: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """Who made it, where, and from what.

    Attributes:
        number: Counted per process, from 1.
        types: nan, inf, saturation, underflow.
        cause: `made` by the operator, or `entered` with one of its inputs.
        entered: Those inputs.
        operator: Full name of the operator (`aten.log.default`), or the class of a module.
        site: `{module}/{operator}`, or the module's path.
        module: The module's path.
        phase: forward, backward or recompute.
        step: Step.
        visit: The nth call of the site within it.
        rank: Rank of the process.
        pid: The process.
        line: The program's line, `file:number in function`; empty where there is none.
        code: What is written there.
        stack: Lines that called it, the nearest first.
        forward_line: In a backward pass: the line whose gradient it is.
        reason: More about it, in words.
        inputs: What it read.
        outputs: What it wrote.
        exact: Elements were counted; on a device they are only known to exist.
        time: Seconds since 1970.
    """

    number: int
    types: tuple[str, ...]
    cause: str
    operator: str
    site: str
    module: str
    phase: str
    step: int
    visit: int
    rank: int
    pid: int
    entered: tuple[str, ...] = ()
    line: str = ""
    code: str = ""
    stack: tuple[str, ...] = ()
    forward_line: str = ""
    reason: str = ""
    inputs: tuple[Side, ...] = ()
    outputs: tuple[Side, ...] = ()
    exact: bool = True
    time: float = 0.0

    def to_json(self) -> str:
        """One line of strict JSON; what is no JSON number is null."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data: dict[str, Any] = json.loads(text)
        for name in ("inputs", "outputs"):
            sides: list[dict[str, Any]] = data.get(name, [])
            for side in sides:
                side["shape"] = tuple(side["shape"])
            data[name] = tuple(Side(**side) for side in sides)
        for name in ("types", "entered", "stack"):
            data[name] = tuple(data.get(name, ()))
        return cls(**data)

    def sentence(self) -> str:
        """What happened and where, in one line."""
        where = f"{self.site} ({self.phase}, step {self.step}, rank {self.rank})"
        what = " and ".join(_WORDS[one] for one in self.types)
        if self.cause == "entered":
            names = ", ".join(self.entered)
            text = f"{what} came in with {names} of {where}; no operator that was watched made it"
        else:
            text = f"{what} made by {where}{self._how_many()}"
        return f"{text}; {self.reason}" if self.reason else text

    def lines(self) -> list[str]:
        """The sentence and what belongs below it."""
        found = [self.sentence()]
        if self.line:
            found.append(f"  at {self.line}" + (f": {self.code}" if self.code else ""))
        if self.forward_line:
            found.append(f"  gradient of {self.forward_line}")
        for side in self.inputs[:6]:
            found.append(f"  input {side.name}: {_described(side)}")
        return found

    def _how_many(self) -> str:
        if not self.exact:
            return ""
        parts: list[str] = []
        for out in self.outputs:
            bad = 0
            if "nan" in self.types:
                bad += out.nan
            if "inf" in self.types:
                bad += out.pos_inf + out.neg_inf
            if "saturation" in self.types:
                bad += out.at_limit
            if bad:
                parts.append(f"{bad} of {out.elements} elements")
        return f": {', '.join(parts)}" if parts else ""


def _described(side: Side) -> str:
    shape = "x".join(map(str, side.shape)) or "scalar"
    text = f"{side.dtype} {shape}"
    if side.peak is not None:
        text += f", largest magnitude {side.peak:.4g}"
    strange = [
        f"{count} {word}"
        for count, word in ((side.nan, "NaN"), (side.pos_inf, "+Inf"), (side.neg_inf, "-Inf"))
        if count
    ]
    return text + (f", {', '.join(strange)}" if strange else "")


@dataclass(slots=True)
class FindingsFile:
    """Where one process writes its findings: a JSON line each, and the seed's text beside.

    Attributes:
        folder: Of the findings and of the run with their inputs; made with the first finding.
        text_folder: Where the seed's text goes; None for none.
        count: Findings written by this process.
    """

    folder: Path
    text_folder: Path | None = None
    count: int = field(default=0, init=False)
    failure: str = field(default="", init=False)
    _pid: int = field(default=0, init=False)

    def next_number(self) -> int:
        if self._pid != os.getpid():  # a forked child counts its own
            self._pid, self.count = os.getpid(), 0
        return self.count + 1

    def write(self, finding: Finding) -> None:
        """Returns when no kill of the process can lose the finding."""
        self.next_number()
        self.count += 1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _append(self.folder / findings_name(finding.pid), finding.to_json())
            if self.text_folder is not None and _OVERFLOWS.intersection(finding.types):
                _append(self.text_folder / text_name(finding.pid), seed_sentence(finding.site))
        except OSError as problem:
            self.failure = f"findings cannot be written: {problem.strerror or problem}"


def findings_name(pid: int) -> str:
    return f"findings-{pid}.jsonl"


def text_name(pid: int) -> str:
    return f"ait_overflow_res_{pid}.txt"


def seed_sentence(operator: str) -> str:
    """The sentence of the seed's result file."""
    return f"Overflow detected! Operator name: {operator}"


def _append(path: Path, line: str) -> None:
    with OwnedFile(path, "shared") as file:
        file.append_all(line.encode("utf-8", "backslashreplace") + b"\n")


def read_findings(folder: Path) -> list[Finding]:
    """All findings of all processes in a folder, by time; a line cut short is passed over."""
    found: list[Finding] = []
    for path in sorted(folder.glob("findings-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(Finding.from_json(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
    return sorted(found, key=lambda one: (one.time, one.pid, one.number))


def headroom_rows(
    patterns: Mapping[tuple[str, str], int], values: Mapping[tuple[str, str], float]
) -> list[tuple[str, str, float, float | None]]:
    """Site, element type, largest magnitude and bits left below the format's own largest.

    Those with the least come first; of a site that only saw zeros there is nothing to say (None).

    Args:
        patterns: Largest magnitudes as bit patterns, by site and element type.
        values: More of them, as numbers.
    """
    from driftline.numerics.dtypes import PATTERNS

    most = {key: PATTERNS[key[1]].value(pattern) for key, pattern in patterns.items()}
    for key, value in values.items():
        most[key] = max(value, most.get(key, 0.0))
    rows = [
        (site, dtype, value, math.log2(PATTERNS[dtype].largest / value) if value else None)
        for (site, dtype), value in most.items()
    ]
    return sorted(rows, key=lambda row: (math.inf if row[3] is None else row[3], row[0]))
