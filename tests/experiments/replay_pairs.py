"""A reference and a candidate in one process, the one replayed on what the other was given."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import driftline
from driftline.captures.selection import Selection
from driftline.captures.torch.session import CaptureSession
from driftline.diagnosis.evidence import files as diagnosis
from driftline.diagnosis.evidence.files import ReplayedSite
from driftline.diagnosis.experiments.live.captured_calls import Candidate
from driftline.diagnosis.experiments.live.replay import Replayer
from driftline.diagnosis.experiments.replay_method import ReplayMethod
from driftline.diagnosis.result import Diagnosis
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run


def by_name(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    return {site: site for site in ours}


class Wide(nn.Module):
    """Two products and a function between them, wide enough for statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 160)
        self.act = nn.GELU()
        self.down = nn.Linear(160, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Replay:
    """A reference that ran with a candidate's captured inputs beside it."""

    def __init__(
        self,
        reference: nn.Module,
        candidate: nn.Module,
        *args: Any,
        calls: int = 1,
        selection: Selection | None = None,
        **method: Any,
    ) -> None:
        sink = MemorySink()
        with torch.no_grad(), driftline.capture(candidate, sink):
            for _ in range(calls):
                candidate(*copy.deepcopy(args))
        self.captured: Run = sink.run()
        exact, native = MemorySink(), MemorySink()
        session = CaptureSession(MemorySink(), levels=(), model=reference)
        replayer = Replayer(
            session,
            Candidate(self.captured),
            by_name,
            exact,
            native,
            selection=selection,
            method=ReplayMethod(**{"keep_all": True, **method}),
        )
        session.stand_in = replayer
        session.start()
        with torch.no_grad():
            for _ in range(calls):
                self.result = reference(*copy.deepcopy(args))
        session.stop()
        self.report = replayer.report.to_json()
        self.sites = self.report["sites"]
        self.exact, self.native = exact.run(), native.run()

    def evidence(self, *, wide: bool = False) -> diagnosis.Replay:
        """It, as `diagnose` takes it; a candidate in 32 bits has no format of its own."""
        sites = {site: ReplayedSite.from_json(about) for site, about in self.sites.items()}
        return diagnosis.Replay(self.exact, None if wide else self.native, sites)

    def error(self, site: str, slot: str = "0") -> float:
        exact = self.exact.get(site, slot=slot).float64()
        found = self.captured.get(site, slot=slot).float64()
        return float(abs(exact - found).max())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 16)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(self.act(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block(), Block()).eval()


def diagnosed_both_ways(
    reference: nn.Module, candidate: nn.Module, x: torch.Tensor, *, wide: bool = False
) -> tuple[Diagnosis, Diagnosis, Replay]:
    """By a replay that kept everything, and by one that kept what is needed, which is the last."""
    sink = MemorySink(name="reference")
    with torch.no_grad(), driftline.capture(reference, sink):
        reference(x)
    whole, spare = (Replay(reference, candidate, x, keep_all=each) for each in (True, False))
    found = (
        driftline.diagnose(sink.run(), made.captured, replay=made.evidence(wide=wide))
        for made in (whole, spare)
    )
    return (*found, spare)
