"""Findings of a comparison for the nodes of a graph.

This file does not know how a comparison is made; the caller provides the findings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from driftline.graphs.model import LevelNode

ORDER = ("fail", "incomparable", "missing", "extra", "pass")
"""Statuses, worst first."""
_NOTHING: Mapping[str, float] = {}


class Finding(NamedTuple):
    """The finding of a comparison for one site.

    Attributes:
        status: pass, fail, incomparable, missing or extra.
        value: The error in the metric of the overlay; NaN if there is none.
        text: A description.
        figures: Numbers for the node, by name: the metric, its limit, value over limit.
    """

    status: str
    value: float
    text: str = ""
    figures: Mapping[str, float] = _NOTHING

    @property
    def badness(self) -> tuple[int, float]:
        """Sort key that puts the worst first: by status, then by value."""
        rank = ORDER.index(self.status) if self.status in ORDER else len(ORDER)
        # NaN sorts last within its status, because no number says how bad it is.
        return rank, math.inf if math.isnan(self.value) else -self.value


def finding_of(node: LevelNode, findings: Mapping[str, Finding]) -> Finding | None:
    """The finding of a node.

    This is its own finding; for an operator without one, that of its module; for a closed node, the
    worst finding inside.
    """
    if not findings or not node.site:
        return None
    module, sign, _ = node.site.rpartition("/")
    # The call first, then the site, then the module that contains the operator.
    own = findings.get(f"{node.site}#{node.visit}") or findings.get(node.site)
    own = own or (findings.get(module) if sign else None)
    if own is not None:
        return own
    inside = [
        finding
        for site, finding in findings.items()
        if node.holds and site.startswith((f"{node.site}.", f"{node.site}/"))
    ]
    return min(inside, key=lambda finding: finding.badness, default=None)
