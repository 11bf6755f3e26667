"""Findings of the error check: their fields, their text, and the files they are written to.

Every line is passed to the operating system before the program continues, so a program that dies
right after a finding loses nothing. No file or folder is created before there is a finding. This
file knows no framework.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from driftline.runs.files.owned_file import OwnedFile

# Types that a user may name; `overflow` and `all` are groups, expanded by `_MEANS`.
TYPES = ("overflow", "nan", "inf", "saturation", "underflow", "all")
_MEANS = {
    "overflow": ("nan", "inf"),
    "all": ("nan", "inf", "saturation", "underflow"),
}
# The old tool's result file knows overflows only, so an underflow is not written there.
_OVERFLOWS = frozenset({"nan", "inf", "saturation"})
_WORDS = {"nan": "NaN", "inf": "Inf", "saturation": "saturation", "underflow": "underflow"}


def wanted_types(words: Sequence[str]) -> frozenset[str]:
    """Expand the groups a user may name into single error types.

    >>> sorted(wanted_types(["overflow"]))
    ['inf', 'nan']
    """
    return frozenset(kind for word in words for kind in _MEANS.get(word, (word,)))


@dataclass(frozen=True, slots=True)
class Side:
    """One input or output tensor of the operator in a finding.

    If the elements were not counted (on a device), a count of 1 means "at least one".

    Attributes:
        name: The argument, or the position of the output.
        dtype: Element type.
        shape: Shape.
        elements: Number of elements.
        peak: Largest magnitude; None if an element is not finite.
        nan: Number of NaN.
        pos_inf: Number of positive infinities.
        neg_inf: Number of negative infinities.
        at_limit: Number of values at the format's largest magnitude.
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
    """One non-finite, saturated or underflowed tensor: its producer, place and inputs.

    Attributes:
        number: The number of the finding in its process, from 1.
        types: One or more of nan, inf, saturation, underflow.
        cause: `made` by the operator, or `entered` with one of its inputs.
        entered: The names of those inputs.
        operator: Full name of the operator (`aten.log.default`), or the class of a module.
        site: `{module}/{operator}`, or the module's path.
        module: The module's path.
        phase: forward, backward or recompute.
        step: The step.
        visit: The number of the call of the site within the step.
        rank: Rank of the process.
        pid: Id of the process.
        line: The program's line, as `file:number in function`; empty if there is none.
        code: The text of that line.
        stack: The lines that called it, the nearest first.
        forward_line: In a backward pass, the line whose gradient is computed.
        reason: Further explanation, in words.
        inputs: The tensors that it read.
        outputs: The tensors that it wrote.
        exact: Whether elements were counted. On a device only their presence is known.
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
        """One line of strict JSON."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data: dict[str, Any] = json.loads(text)
        # JSON has lists only, but equal findings need tuples.
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
        what = " and ".join(_WORDS[kind] for kind in self.types)
        if self.cause == "entered":
            names = ", ".join(self.entered)
            text = f"{what} came in with {names} of {where}; no operator that was watched made it"
        else:
            text = f"{what} made by {where}{self._how_many()}"
        return f"{text}; {self.reason}" if self.reason else text

    def lines(self) -> list[str]:
        """The sentence, with details on further lines."""
        lines = [self.sentence()]
        if self.line:
            lines.append(f"  at {self.line}" + (f": {self.code}" if self.code else ""))
        if self.forward_line:
            lines.append(f"  gradient of {self.forward_line}")
        # An operator such as a concatenation can have hundreds of inputs; six are enough.
        for side in self.inputs[:6]:
            lines.append(f"  input {side.name}: {_described(side)}")
        return lines

    def _how_many(self) -> str:
        # On a device only their presence is known, so "1 of 4096" would be wrong.
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
    """The files to which one process writes its findings: JSON lines, and ait's text file.

    Attributes:
        folder: Folder of the findings and of the run with their inputs; created with the first
            finding.
        text_folder: Folder of ait's text file; None to write none.
        count: Number of findings written by this process.
        failure: Why findings could not be written; empty if they could.
    """

    folder: Path
    text_folder: Path | None = None
    count: int = field(default=0, init=False)
    failure: str = field(default="", init=False)
    _pid: int = field(default=0, init=False)

    def next_number(self) -> int:
        if self._pid != os.getpid():  # a forked child counts its own findings
            self._pid, self.count = os.getpid(), 0
        return self.count + 1

    def write(self, finding: Finding) -> None:
        """Write a finding; when this returns, a kill of the process cannot lose it."""
        self.next_number()
        self.count += 1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _append(self.folder / findings_name(finding.pid), finding.to_json())
            # The text file is that of ait, which reports overflows only.
            if self.text_folder is not None and _OVERFLOWS.intersection(finding.types):
                _append(self.text_folder / text_name(finding.pid), seed_sentence(finding.site))
        # A full disk must not stop the watched program; the failure is reported at its end.
        except OSError as problem:
            self.failure = f"findings cannot be written: {problem.strerror or problem}"


def findings_name(pid: int) -> str:
    return f"findings-{pid}.jsonl"


def text_name(pid: int) -> str:
    return f"ait_overflow_res_{pid}.txt"


def seed_sentence(operator: str) -> str:
    """The sentence of ait's result file."""
    return f"Overflow detected! Operator name: {operator}"


def _append(path: Path, line: str) -> None:
    with OwnedFile(path, "shared") as file:
        file.append_all(line.encode("utf-8", "backslashreplace") + b"\n")


def read_findings(folder: Path) -> list[Finding]:
    """All findings of all processes in a folder, sorted by time; incomplete lines are skipped."""
    findings: list[Finding] = []
    for path in sorted(folder.glob("findings-*.jsonl")):
        # A process that was killed may leave a half-written last line.
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                findings.append(Finding.from_json(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
    return sorted(findings, key=lambda finding: (finding.time, finding.pid, finding.number))


def headroom_rows(
    patterns: Mapping[tuple[str, str], int], values: Mapping[tuple[str, str], float]
) -> list[tuple[str, str, float, float | None]]:
    """Site, element type, largest magnitude, and headroom in bits below the format's largest value.

    Sites with the least headroom come first. A site with zeros only has None.

    Args:
        patterns: Largest magnitudes as bit patterns, by site and element type.
        values: Further largest magnitudes, as numbers.
    """
    # Imported on use, because only reports need it, not the running program.
    from driftline.numerics.dtypes import PATTERNS

    most = {key: PATTERNS[key[1]].value(pattern) for key, pattern in patterns.items()}
    for key, value in values.items():
        most[key] = max(value, most.get(key, 0.0))
    rows = [
        (site, dtype, value, math.log2(PATTERNS[dtype].largest / value) if value else None)
        for (site, dtype), value in most.items()
    ]
    # A site with zeros only has no headroom to sort by, and comes last.
    return sorted(rows, key=lambda row: (math.inf if row[3] is None else row[3], row[0]))
