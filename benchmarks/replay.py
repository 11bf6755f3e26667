"""What replay costs: the reference's forward with every module also applied to captured inputs.

A Llama with random weights, 12 layers of width 768, 256 tokens, against a bfloat16 candidate. Goal:
3 times the plain forward, besides reading the candidate's run once. Plain and replayed forwards
take turns on one thread; the least processor time of each counts. Writing both runs is measured
apart, and so is a candidate in float32, where the two formats are one.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import driftline
from driftline.adapters.torch.candidate import Candidate
from driftline.adapters.torch.replaying import Replayer
from driftline.adapters.torch.session import CaptureSession
from driftline.launch.sinks import Nowhere
from driftline.runs.manifest import create_run
from driftline.runs.memory import MemorySink
from driftline.runs.writer import RunWriter

ROUNDS = 5
Row = dict[str, Any]


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=768,
            intermediate_size=2112,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=2048,
        )
    ).eval()


def _timed(act: Callable[[], object]) -> float:
    begun = time.process_time()
    act()
    return time.process_time() - begun


def _by_name(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    return {site: site for site in ours}


class _Case:
    def __init__(self, reference: nn.Module, dtype: torch.dtype, folder: Path) -> None:
        self._reference = reference
        self._folder = folder
        self._ids = torch.randint(0, 2048, (1, 256))
        self._path = folder / "candidate"
        candidate = copy.deepcopy(reference).to(dtype)
        with torch.no_grad(), driftline.capture(candidate, self._path):
            candidate(self._ids)

    def plain(self) -> None:
        with torch.no_grad():
            self._reference(self._ids)

    def read(self) -> None:
        captured = Candidate(driftline.open_run(self._path))
        for call in captured.calls.values():
            for record in (*call.inputs.values(), *call.outputs.values()):
                captured.tensor(record)

    def replay(self, *, write: bool) -> None:
        sinks: list[Any] = [Nowhere(), Nowhere()]
        if write:
            sinks = []
            for name in ("exact", "native"):
                shutil.rmtree(self._folder / name, ignore_errors=True)
                sinks.append(RunWriter(create_run(self._folder / name)))
        session = CaptureSession(MemorySink(), levels=(), model=self._reference)
        captured = Candidate(driftline.open_run(self._path))
        replayer = Replayer(session, captured, _by_name, *sinks)
        session.stand_in = replayer
        session.start()
        self.plain()
        session.stop()
        for sink in sinks:
            sink.close()
        assert not replayer.report.faults


def run() -> list[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for dtype in (torch.bfloat16, torch.float32) for row in _figures(dtype)]
    finally:
        torch.set_num_threads(before)


def _figures(dtype: torch.dtype) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        case = _Case(_model(), dtype, Path(folder))
        case.plain()
        least = dict.fromkeys(("plain", "read", "replay", "written"), float("inf"))
        for _ in range(ROUNDS):
            for name, act in (
                ("plain", case.plain),
                ("read", case.read),
                ("replay", lambda: case.replay(write=False)),
                ("written", lambda: case.replay(write=True)),
            ):
                least[name] = min(least[name], _timed(act))
    name = str(dtype).removeprefix("torch.")
    note = f"plain {least['plain'] * 1e3:.0f} ms, reading {least['read'] * 1e3:.0f} ms"
    return [
        {
            "what": f"replay of a {name} candidate over a plain forward",
            "value": (least["replay"] - least["read"]) / least["plain"],
            "goal": 3.0,
            "better": "lower",
            "unit": "x",
            "note": note,
        },
        {
            "what": f"the same, both runs written ({name})",
            "value": (least["written"] - least["read"]) / least["plain"],
            "goal": None,
            "better": "lower",
            "unit": "x",
            "note": "",
        },
    ]
