"""How much memory capture may use for tensors of devices. Loads nothing."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from driftline.errors import BadInput, did_you_mean

WhenFull = Literal["wait", "drop"]
DEVICE_BUDGET = 1 << 30
HOST_BUDGET = 2 << 30


class Budgets(NamedTuple):
    """Bytes, and what is done when they are used up.

    Attributes:
        device: Bytes of clones on each device; 0 makes none.
        host: Bytes of pinned host memory, where they land.
        when_full: The program waits, or tensors are dropped and counted.
    """

    device: int = DEVICE_BUDGET
    host: int = HOST_BUDGET
    when_full: WhenFull = "wait"


def budgets_from(
    device: int | None = None, host: int | None = None, when_full: str = "wait"
) -> Budgets:
    """Budgets as given, each of which can be meant.

    Raises:
        BadInput: One cannot.
    """
    for name, value in (("device_budget", device), ("host_budget", host)):
        if value is not None and (type(value) is not int or value < 0):
            raise BadInput(f"{name} is a number of bytes, not {value!r}")
    if when_full not in get_args(WhenFull):
        raise BadInput(
            f"when_full is wait or drop, not '{when_full}'",
            hint=did_you_mean(when_full, get_args(WhenFull)),
        )
    return Budgets(
        DEVICE_BUDGET if device is None else device,
        HOST_BUDGET if host is None else host,
        "drop" if when_full == "drop" else "wait",
    )
