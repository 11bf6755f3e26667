"""What of a program can be captured: calls of modules, of operators, gradients, parameters."""

from __future__ import annotations

from collections.abc import Iterable

from driftline.adapters.selection import patterns
from driftline.errors import BadInput, did_you_mean

LEVELS = ("modules", "ops", "gradients", "params")


def known_levels(levels: str | Iterable[str]) -> tuple[str, ...]:
    """Levels as given, one or several, each of which exists."""
    chosen = patterns(levels)
    for level in chosen:
        if level not in LEVELS:
            raise BadInput(f"there is no level '{level}'", hint=did_you_mean(level, LEVELS))
    return chosen
