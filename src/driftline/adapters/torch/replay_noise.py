"""How far a number format is from exact at one module: sums over some of its rows.

Only of calls whose results in that format are known to be right, so that what is measured is noise
and nothing else.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from typing import Any

import torch

_ROWS = 32


def some_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An even sample of rows, [rows, channels]; the last axis are the channels.

    >>> some_rows(torch.zeros(4, 32, 5)).shape
    torch.Size([32, 5])
    """
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    return rows[:: max(1, -(-rows.shape[0] // _ROWS))]


class _Sums:
    """Of exact values r and errors e, over rows that are independent of each other."""

    __slots__ = ("ee", "elements", "er", "er_er", "er_rr", "rows", "rr", "rr_rr")

    def __init__(self) -> None:
        self.rows = self.elements = 0
        self.rr = self.er = self.ee = self.er_er = self.er_rr = self.rr_rr = 0.0

    def add(self, exact: torch.Tensor, made: torch.Tensor) -> None:
        r, e = exact, made.to(exact.dtype) - exact
        sums = _by_row(r, e)
        if not all(map(math.isfinite, sums[2])):  # no sum of squares is, where an element is not
            finite = torch.isfinite(e)
            sums = _by_row(torch.where(finite, r, 0.0), torch.where(finite, e, 0.0))
        self.elements += r.numel()
        for rr, er, ee in zip(*sums, strict=True):
            self.rows += 1
            self.rr += rr
            self.er += er
            self.ee += ee
            self.er_er += er * er
            self.er_rr += er * rr
            self.rr_rr += rr * rr

    @property
    def error(self) -> float:
        return math.sqrt(self.ee / self.rr) if self.rr > 0.0 else 0.0

    def to_json(self) -> dict[str, Any]:
        p = self.er / self.rr if self.rr > 0.0 else 0.0
        size = {"rows": self.rows, "elements": self.elements}
        found: dict[str, Any] = {**size, "error": self.error, "projection": p}
        if self.rr > 0.0 and self.rows > 1:
            spread = self.er_er - 2.0 * p * self.er_rr + p * p * self.rr_rr
            spread = max(spread, 0.0) * self.rows / (self.rows - 1)
            found["projection_se"] = math.sqrt(spread) / self.rr
        return found


def _by_row(r: torch.Tensor, e: torch.Tensor) -> list[list[float]]:
    """<r,r>, <e,r> and <e,e> of every row."""
    dot = torch.linalg.vecdot
    return torch.stack((dot(r, r), dot(e, r), dot(e, e))).tolist()


class Noise:
    """The noise of every site, by what it gives."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, _Sums]] = {}

    def add(self, site: str, slot: str, exact: torch.Tensor, made: torch.Tensor) -> None:
        """Some rows of one result, in wide arithmetic and in the captured run's format."""
        if exact.numel():
            self._sums.setdefault(site, {}).setdefault(slot, _Sums()).add(exact, made)

    def nothing(self, site: str, slot: str) -> None:
        """A result that is exact."""
        self._sums.setdefault(site, {}).setdefault(slot, _Sums())

    def of(self, site: str) -> dict[str, Any] | None:
        """That of the result which has most of it, as JSON; None where none was measured."""
        found = self._sums.get(site)
        if not found:
            return None
        slot, sums = max(found.items(), key=lambda item: item[1].error)
        return {"slot": slot, **sums.to_json()}
