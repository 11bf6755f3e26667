"""What replay costs: the reference's forward with every module also applied to captured inputs.

A Llama with random weights, 12 layers of width 768, 256 tokens, against a bfloat16 candidate. Goal:
a whole replay takes at most three plain forwards and one reading of the candidate's run. Counted is
all that a user waits for: the run is opened and read, the program's own forward runs, every module
is applied again in both formats, both runs are written and sealed. A plain forward is the reference
program's own, without Driftline; reading is every tensor of the run, once, into memory.

All take turns on the same threads, and the least time of each counts: on one thread and on two by
the clock, on one thread also by processor time (the writing thread's included). The same holds for
a candidate from another device. One of an H200 had, replayed on a CPU, other bits in all linear
layers, all attentions and a third of the norms, and the same in all else: here one in a hundred
elements of every linear layer and every norm is the neighbouring value. Beside it, without a goal
of their own: everything kept in both formats (`--keep-all`), written and not written.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import driftline
from driftline.captures.torch.session import CaptureSession
from driftline.diagnosis.experiments.live.captured_calls import Candidate
from driftline.diagnosis.experiments.live.replay import Replayer
from driftline.diagnosis.experiments.replay_method import ReplayMethod
from driftline.runs.memory import MemorySink
from driftline.runs.provenance import create_run
from driftline.runs.sinks import Nowhere
from driftline.runs.writer import RunWriter

ROUNDS = 5
FORWARDS = 3
Row = dict[str, Any]
Clock = Callable[[], float]


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


def _by_name(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    return {site: site for site in ours}


def _of_another_device(model: nn.Module) -> None:
    """Of what linear layers and norms give, a hundredth is the neighbouring value."""
    chance = torch.Generator().manual_seed(3)

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.int16 if tensor.element_size() == 2 else torch.int32
        at = torch.randint(0, tensor.numel(), (tensor.numel() // 100,), generator=chance)
        step = torch.randint(0, 2, at.shape, generator=chance).mul_(2).sub_(1).to(whole)
        other = tensor.clone(memory_format=torch.contiguous_format)
        flat = other.view(-1).view(whole)
        flat[at] += step.where(flat[at] != 0, 0)
        return other

    def of_its_result(module: nn.Module, args: Any, result: Any) -> Any:
        return nudged(result) if isinstance(result, torch.Tensor) else result

    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__.endswith("Norm"):
            module.register_forward_hook(of_its_result)


class _Case:
    def __init__(
        self, reference: nn.Module, dtype: torch.dtype, folder: Path, *, other: bool
    ) -> None:
        self._reference = reference
        self._folder = folder
        self._ids = torch.randint(0, 2048, (1, 256))
        self._path = folder / "candidate"
        self._tries = 0
        candidate = copy.deepcopy(reference).to(dtype)
        if other:
            _of_another_device(candidate)
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

    def replay(self, *, write: bool = True, keep_all: bool = False) -> None:
        sinks: list[Any] = [Nowhere(), Nowhere()]
        if write:
            self._tries += 1
            sinks = [
                RunWriter(create_run(self._folder / f"{name}{self._tries}"))
                for name in ("exact", "native")
            ]
        session = CaptureSession(MemorySink(), levels=(), model=self._reference)
        captured = Candidate(driftline.open_run(self._path))
        method = ReplayMethod(keep_all=keep_all)
        replayer = Replayer(session, captured, _by_name, *sinks, method=method)
        session.stand_in = replayer
        session.start()
        self.plain()
        session.stop()
        for sink in sinks:
            sink.close()
        assert not replayer.report.faults

    def tidy(self) -> None:
        """What earlier tries wrote is no part of the next one's time."""
        for path in self._folder.iterdir():
            if path.name != "candidate":
                shutil.rmtree(path)


def run() -> list[Row]:
    before = torch.get_num_threads()
    rows: list[Row] = []
    try:
        for dtype in (torch.bfloat16, torch.float32):
            for threads, clock, how in (
                (1, time.perf_counter, "one thread"),
                (2, time.perf_counter, "two threads"),
                (1, time.process_time, "one thread, processor time"),
            ):
                if threads <= len(os.sched_getaffinity(0)):
                    torch.set_num_threads(threads)
                    rows += _figures(dtype, clock, how)
    finally:
        torch.set_num_threads(before)
    return rows


def _figures(dtype: torch.dtype, clock: Clock, how: str) -> list[Row]:
    return [*_of(dtype, clock, how, other=False), *_of(dtype, clock, how, other=True)]


def _of(dtype: torch.dtype, clock: Clock, how: str, *, other: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        case = _Case(_model(), dtype, Path(folder), other=other)
        case.plain()
        acts: dict[str, Callable[[], None]] = {
            "plain": case.plain,
            "read": case.read,
            "replay": case.replay,
        }
        if other:
            acts["all"] = lambda: case.replay(keep_all=True)
            acts["unwritten"] = lambda: case.replay(write=False, keep_all=True)
        least = dict.fromkeys(acts, float("inf"))
        for _ in range(ROUNDS):
            for name, act in acts.items():
                case.tidy()
                begun = clock()
                act()
                least[name] = min(least[name], clock() - begun)
    name = str(dtype).removeprefix("torch.")
    allowed = FORWARDS * least["plain"] + least["read"]
    note = ", ".join(f"{word} {least[word] * 1e3:.0f} ms" for word in ("plain", "read", "replay"))

    def times(word: str) -> str:
        return f"{(least[word] - least['read']) / least['plain']:.2f}x forward + reading"

    whose = f"a {name} candidate{' of another device' if other else ''}"
    rows: list[Row] = [
        {
            "what": f"replay of {whose} over 3 forwards and reading, {how}",
            "value": least["replay"] / allowed,
            "goal": 1.0,
            "better": "lower",
            "unit": "",
            "note": f"{note}: {times('replay')}",
        }
    ]
    if other:
        rows.append(
            {
                "what": "  the same, everything kept",
                "value": least["all"] / allowed,
                "goal": None,
                "better": "lower",
                "unit": "",
                "note": f"{times('all')}; nothing written: {times('unwritten')}",
            }
        )
    return rows
