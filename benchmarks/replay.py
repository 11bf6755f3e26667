"""Cost of replay: the reference's forward with each module also applied to captured inputs.

The model is a Llama with random weights, 12 layers of width 768 and 256 tokens, against candidates
in bfloat16 and float32. The goal: a whole replay takes at most the time of three plain forwards and
of reading the candidate's run once. The time of a replay includes everything that a user waits for:
opening and reading the run, the program's own forward, applying each module again in both formats,
writing and sealing both runs. A plain forward is that of the reference program without Driftline;
reading means reading each tensor of the run once into memory.

All of these take turns on the same threads, and the minimum time of each counts. Wall time is
measured on one thread and on two, and on one thread also processor time (including the writing
thread's).

The same is measured for a candidate from another device. A candidate from an H200, replayed on a
CPU, had other bits in all linear layers, all attentions and a third of the norms, and equal bits
elsewhere. Here one in a hundred elements of each linear layer and each norm is the neighbouring
value. Two figures without a goal are added: all values kept in both formats (`--keep-all`), written
and not written.
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
    """Replace a hundredth of the outputs of linear layers and norms by neighbouring values."""
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
        """Remove the runs of earlier tries, so that this is not part of the next one's time."""
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
