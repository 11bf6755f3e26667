"""What `driftline bisect` found, read again: the share of the end's error that goes with a block.

An experiment, so its share is measured where the others are estimates. Reads and checks; makes no
site guilty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.diagnosis.calls import contains
from driftline.errors import BadFile
from driftline.runs.inside import read_object, reason_of

if TYPE_CHECKING:
    from _typeshed import StrPath

_LARGEST = 64 << 20
_VERDICTS = ("found", "spread", "same")


class Substitution(NamedTuple):
    """The answer of a bisection.

    Attributes:
        verdict: found, spread or same.
        site: The block; empty without one.
        metric: Which error of the end.
        baseline: It, as the program is.
        before: It, with everything before the block replaced by the reference's.
        after: It, with the block as well.
        explains: The share of it that goes with the block.
        executions: How often the program was run.
    """

    verdict: str
    site: str
    metric: str
    baseline: float
    before: float
    after: float
    explains: float
    executions: int

    def is_about(self, site: str) -> bool:
        """Whether the block is a site, or one of the two lies in the other."""
        found = self.verdict == "found"
        return found and (
            self.site == site or contains(self.site, site) or contains(site, self.site)
        )

    def as_evidence(self) -> dict[str, Any]:
        return self._asdict()


def open_bisection(source: Mapping[str, Any] | StrPath) -> Substitution:
    """What `driftline bisect --format json` printed: a file of it, or the object.

    Raises:
        BadFile: It is none.
    """
    if isinstance(source, Mapping):
        return _read(source, "the bisection")
    path = Path(source)
    try:
        told = read_object(path.parent.resolve(), path, _LARGEST)
    except (OSError, ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}", hint=_HOW) from None
    return _read(told, str(path))


_HOW = "driftline bisect --exec CANDIDATE --reference-run REF --format json > FILE makes one"


def _read(told: Mapping[str, Any], name: str) -> Substitution:
    if told.get("verdict") not in _VERDICTS or not isinstance(told.get("site"), str):
        raise BadFile(f"{name} is no result of a bisection", hint=_HOW)
    if told.get("schema") not in (1, None):
        raise BadFile(f"{name} is of schema {told['schema']!r}, this program reads 1")
    share = _number(told.get("explains"))
    executions = told.get("executions")
    return Substitution(
        str(told["verdict"]),
        str(told["site"]),
        str(told.get("metric") or "the error"),
        _number(told.get("baseline")),
        _number(told.get("before")),
        _number(told.get("after")),
        share if 0.0 <= share <= 1.0 else math.nan,
        executions if isinstance(executions, int) else 0,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
