"""What a capture says of regions that torch.compile has compiled: it does not see inside them."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from driftline.adapters.torch.names import Place

if TYPE_CHECKING:
    from driftline.adapters.torch.session import CaptureSession


def explain(session: CaptureSession, place: Place) -> None:
    if session.sees_graphs:
        return
    session.event_once(
        "compiled",
        "this module is compiled: its inputs and outputs are captured, the modules inside only "
        "where the compiled graph breaks; to see all of them run the program with "
        "TORCHDYNAMO_DISABLE=1",
        site=place.site,
    )


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
