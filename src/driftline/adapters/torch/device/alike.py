"""What a place gave last: a tensor like it is taken without being described again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from driftline.adapters.frames import Visits
from driftline.adapters.torch.device.flights import Constant
from driftline.adapters.torch.device.sheets import Reading, Sheet
from driftline.adapters.torch.device.transfers import Transfers


class Alike(NamedTuple):
    """What a place gave last, and how it was summarised."""

    dtype: torch.dtype
    shape: torch.Size
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody looks things up in it
    stream: int
    alias: str
    constant: Constant
    sheet: Sheet
    reading: Reading | None  # None: its bytes are kept
    transfers: Transfers
    size: int


class Last:
    """What the only output of a place was last, looked up again when anything has changed.

    Attributes:
        visits: Counts the place's calls.
    """

    __slots__ = ("changes", "key", "known", "visits")

    def __init__(self, key: tuple[str, ...], visits: Visits) -> None:
        self.key = key
        self.visits = visits
        self.known: Alike | None = None
        self.changes = -1
