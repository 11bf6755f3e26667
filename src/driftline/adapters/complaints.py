"""What is said to a person whose capture has nothing, or less than was asked for."""

from __future__ import annotations

ONLY_OUTSIDE = "the model was not called; only operators outside it were captured"


def nothing_captured(found: list[str], steps: int, *, ran: bool, selected: bool) -> list[str]:
    """Why there is no tensor.

    Args:
        found: Filters that matched nothing, in words; the first may be the reason.
        steps: How many steps ran.
        ran: Whether anything did.
        selected: Whether any of the steps was wanted.
    """
    rest = list(found)
    if not ran:
        reason = "the model was not called"
    elif rest:
        reason = rest.pop(0)
    elif not selected:
        reason = f"{steps} steps ran, and none of them is selected"
    else:
        reason = "the filters left no tensor, or none could be stored; the run's events say why"
    return [f"nothing was captured: {reason}", *rest]
