"""Capture on a GPU: summaries and whole tensors without waiting, right, and without a trace."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments
from driftline.numerics.gpu.pairs import moments_of, pair_on_device
from driftline.runs.memory import MemorySink

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.ReLU(inplace=True), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.act(self.up(self.norm(x))))
        return x.add_(0.5)  # after the parts were seen


def net(width: int = 256, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(4))).to("cuda", dtype)


def given(width: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 100, width, generator=generator).to("cuda", dtype)


@pytest.mark.parametrize("keep", ["summary", "full", "digest", "sample(100)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_bitwise_what_they_are_without(
    keep: str, dtype: torch.dtype
) -> None:
    def trained(watch: bool) -> list[torch.Tensor]:
        model = net(dtype=dtype)
        sink = MemorySink()
        levels = ("modules", "gradients", "params")
        watching: Any = driftline.capture(model, sink, keep=keep, levels=levels)
        if watch:
            watching.__enter__()
        loss = model(given(dtype=dtype)).float().square().mean()
        loss.backward()
        if watch:
            watching.__exit__(None, None, None)
            assert not [e for e in sink.run().events() if e["kind"] == "capture-fault"]
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain, again, watched = trained(False), trained(False), trained(True)
    steady = [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]
    assert sum(steady) > len(steady) // 2
    assert all(torch.equal(a, b) for a, b, same in zip(plain, watched, steady, strict=True) if same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_summaries_are_those_of_the_cpu_s_definition(dtype: torch.dtype) -> None:
    model, full, brief = net(dtype=dtype), MemorySink(), MemorySink()
    x = given(dtype=dtype)
    x[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 0.0, torch.finfo(dtype).min])
    with torch.no_grad():
        for sink, keep in ((full, "full"), (brief, "summary")):
            with driftline.capture(model, sink, keep=keep):
                model(x.clone())
    kept = {t.key: t for t in brief.run().tensors()}
    run = full.run()
    for tensor in run.tensors():
        record = tensor.record
        count = int(np.prod(record.shape))
        wanted = kernel.summarize(run.raw(record), DTYPES[record.dtype], count=count)
        found = kept[tensor.key].summary
        assert found[6:10] == wanted[6:10] and found.count == count
        assert np.array_equal(found[1:3], wanted[1:3], equal_nan=True)
        scale = wanted.l2 / count**0.5
        assert np.allclose(found[3:6], wanted[3:6], rtol=1e-7, atol=1e-9 * scale, equal_nan=True)
        assert np.allclose(found.sketch, wanted.sketch, rtol=0, atol=1e-9 * wanted.l2)


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8]
)
def test_summaries_of_any_size_and_offset_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    model = Passes()
    for count in (1, 2, 7, 8, 9, 63, 64, 65, 2047, 2048, 2049, 32768, 32769, 67584, 300_001):
        for offset in (0, 1, 8):  # in elements: not every tensor begins at a multiple of 16 bytes
            whole = torch.randn(count + offset, generator=torch.Generator().manual_seed(count)) * 50
            x = whole.to(dtype).cuda()[offset:]
            if dtype.is_floating_point and count > 5:
                x[3], x[count // 2] = float("nan"), float("inf")
            sink = MemorySink()
            with torch.no_grad(), driftline.capture(model, sink, keep="summary", ports="output"):
                model(x)
                model(x)
            raw = x.cpu().contiguous().view(torch.uint8).numpy()
            name = str(dtype).removeprefix("torch.")
            wanted = kernel.summarize(raw, DTYPES[name], count=count)
            assert len(sink.run().records) == 4
            for record in sink.run().records:
                found = record.summary
                assert found is not None and found[6:10] == wanted[6:10], (count, offset)
                assert np.array_equal(found[1:3], wanted[1:3], equal_nan=True)
                close = {"rtol": 1e-9, "atol": 1e-12 * wanted.l2, "equal_nan": True}
                assert np.allclose(found[3:6], wanted[3:6], **close)
                assert np.allclose(found.sketch, wanted.sketch, rtol=0, atol=1e-12 * wanted.l2)


def test_whole_tensors_are_what_a_clone_at_the_hook_is(tmp_path: Path) -> None:
    model, seen = net(), {}
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(
                lambda _m, _i, out, name=name: seen.__setitem__(name, out.clone())
            )
    with torch.no_grad(), driftline.capture(model, tmp_path / "run"):
        model(given())
    run = driftline.open_run(tmp_path / "run")
    for name, expected in seen.items():
        found = torch.from_numpy(run.get(site=name, port="output").float64())
        assert torch.equal(found, expected.double().cpu()), name


@pytest.mark.parametrize("keep", ["summary", "full"])
def test_nobody_waits_for_the_device_inside_a_forward_pass(tmp_path: Path, keep: str) -> None:
    model, x = net(), given()
    with torch.no_grad(), driftline.capture(model, tmp_path / "run", keep=keep):
        model(x.clone())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(5):
                    model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    run = driftline.open_run(tmp_path / "run")
    assert not [e for e in run.events() if e["kind"] == "capture-fault"]
    assert {r.key.step for r in run.records} == set(range(6))


def test_small_budgets_lose_nothing(tmp_path: Path) -> None:
    model = net()
    for name, budgets in (
        ("a", {"device_budget": 0, "host_budget": 4 << 20}),
        ("b", {"device_budget": 1 << 20, "host_budget": 4 << 20}),
        ("c", {}),
    ):
        with torch.no_grad(), driftline.capture(model, tmp_path / name, **budgets):
            for _ in range(3):
                model(given())
    runs = [driftline.open_run(tmp_path / name) for name in "abc"]
    digests = [[r.digest for r in run.records] for run in runs]
    assert digests[0] == digests[1] == digests[2]
    assert not any(run.losses for run in runs)


def test_memory_that_runs_out_degrades_to_summaries_and_never_stops_the_program(
    tmp_path: Path,
) -> None:
    model, x = net(1024), given(1024)
    with torch.no_grad():
        wanted = model(x.clone())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        used = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((used + (14 << 20)) / total)
        try:
            with driftline.capture(model, tmp_path / "run"):
                found = [model(x.clone()) for _ in range(3)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(wanted, one) for one in found)
    run = driftline.open_run(tmp_path / "run")
    (said,) = [e for e in run.events() if e["kind"] == "degraded"]
    assert "no memory left for copies" in said["message"]
    assert not [e for e in run.events() if e["kind"] == "capture-fault"]
    assert len(run.records) == 3 * len([r for r in run.records if r.key.step == 0])
    assert {r.kept for r in run.records[-20:]} == {"summary"} and not run.losses
    with torch.no_grad(), driftline.capture(model, tmp_path / "after"):
        assert torch.equal(model(x.clone()), wanted)
    assert {r.kept for r in driftline.open_run(tmp_path / "after").records} == {"full"}


class Slow(MemorySink):
    def put(self, record: Any, data: Any) -> None:
        time.sleep(0.01)
        super().put(record, data)


@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_a_run_that_is_written_slowly_makes_the_program_wait_or_loses_tensors_with_a_count(
    when_full: Any,
) -> None:
    model, x, sink = net(), given(), Slow()
    with torch.no_grad():
        wanted = model(x.clone())
        with driftline.capture(model, sink, host_budget=2 << 20, when_full=when_full):
            found = [model(x.clone()) for _ in range(3)]
    assert all(torch.equal(wanted, one) for one in found)
    run = sink.run()
    events = {e["kind"]: e["details"] for e in run.events()}
    per_step = len([r for r in run.records if r.key.step == 0])
    assert len(run.records) == 3 * per_step
    if when_full == "wait":
        assert not run.losses and events["waited"]["times"] > 0
    else:
        assert len(run.losses) == events["dropped"]["tensors"] > 0
        assert events["dropped"]["bytes"] > 0


def test_several_streams_are_kept_apart(tmp_path: Path) -> None:
    model, x = net(), given()
    aside = torch.cuda.Stream()
    with torch.no_grad(), driftline.capture(model, tmp_path / "run", keep="summary"):
        model(x.clone())
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            model(x.clone())
        torch.cuda.current_stream().wait_stream(aside)
    run = driftline.open_run(tmp_path / "run")
    by_step: dict[int, list[str]] = {0: [], 1: []}
    for record in run.records:
        by_step[record.key.step].append(record.digest)
    assert by_step[0] == by_step[1] and len(by_step[0]) > 20


@pytest.mark.parametrize("keep", ["summary", "full"])
def test_threads_with_queues_of_their_own_lose_nothing(keep: str) -> None:
    models, x, sink = [net(), net()], given(), MemorySink()

    def work(model: nn.Module) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                model(x.clone())

    root = nn.ModuleList(models)
    # Every step alike: which of the models has its first call in step 0 is a matter of chance.
    budgets: Any = {"device_budget": 8 << 20, "host_budget": 16 << 20}
    with driftline.capture(root, sink, keep=keep, steps="*", **budgets):
        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = sink.run()
    assert not run.losses and {e["kind"] for e in run.events()} <= {"step", "estimate", "waited"}
    by_model = [[r.digest for r in run.records if r.key.site.startswith(n)] for n in "01"]
    assert sorted(by_model[0]) == sorted(by_model[1]) and len(by_model[0]) > 100


def test_operators_of_our_own_are_not_the_program_s() -> None:
    levels = ("modules", "ops", "gradients", "params")
    counts: list[list[str]] = []
    for device in ("cpu", "cuda"):
        model, sink = net(dtype=torch.float32).to(device), MemorySink()
        with driftline.capture(model, sink, keep="summary", levels=levels):
            for _ in range(2):
                model(given(dtype=torch.float32).to(device)).square().mean().backward()
        assert not [e for e in sink.run().events() if e["kind"] == "capture-fault"]
        counts.append([r.key.site for r in sink.run().records if "copy_" in r.key.site])
    assert counts[0] == counts[1]


LEFT_BY_FORK = """
import os, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(4, 64, device="cuda"))
    child = os.fork()
    if not child:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
FAILS = """
import torch
model = torch.nn.Embedding(8, 64).cuda()
with torch.no_grad():
    for _ in range(3):
        model(torch.zeros(4, dtype=torch.long, device="cuda"))
    torch.cuda.synchronize()
    print(model(torch.full((4,), 800, device="cuda")).sum().item())
"""


@pytest.mark.parametrize("keep", ["summary", "full"])
def test_a_forked_process_and_a_failing_one_end_as_they_would(tmp_path: Path, keep: str) -> None:
    (tmp_path / "forks.py").write_text(LEFT_BY_FORK)
    (tmp_path / "fails.py").write_text(FAILS)
    ran = {}
    for name in ("forks", "fails"):
        program = f"{sys.executable} {name}.py"
        command = ["dump", "-o", name, "--keep", keep, "--step", "*", "--exec", program]
        ran[name] = subprocess.run(
            [sys.executable, "-m", "driftline", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert ran["forks"].returncode == 0 and ran["forks"].stdout.split() == ["5"]
    assert ran["fails"].returncode == 1, ran["fails"].stderr
    run = driftline.open_run(tmp_path / "fails")
    assert run.sealed and len(run.records) >= 6
    assert "device-side assert" in ran["fails"].stderr


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_a_program_that_ends_while_kernels_are_compiled_ends_as_it_would(
    tmp_path: Path, seconds: float
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time, torch\n"
        "torch.nn.Linear(4, 4)(torch.zeros(2, 4))\n"
        f"torch.zeros(1, device='cuda'); time.sleep({seconds})\n"
    )
    words = [sys.executable, "-m", "driftline", "dump", "-o", tmp_path / "run", "--"]
    done = subprocess.run(
        [*words, sys.executable, program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "kernels")},
    )
    assert done.returncode == 0, done.stderr
    assert "signal" not in done.stderr


def test_a_cuda_graph_is_recorded_undisturbed_and_what_is_not_seen_is_said(tmp_path: Path) -> None:
    model, x = net(), given()
    with torch.no_grad():
        wanted = model(x.clone())
        with driftline.capture(model, tmp_path / "run", keep="summary"):
            aside = torch.cuda.Stream()
            with torch.cuda.stream(aside):
                model(x.clone())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            static = x.clone()
            with torch.cuda.graph(graph):
                out = model(static)
            static.copy_(x)
            graph.replay()
            torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    kinds = {e["kind"] for e in driftline.open_run(tmp_path / "run").events()}
    assert {"refused", "cuda-graph"} <= kinds and "capture-fault" not in kinds


def test_a_compiled_model_gives_its_own_bits(tmp_path: Path) -> None:
    model, x = net(), given()
    with torch.no_grad():
        plain = torch.compile(model)(x.clone())
        torch._dynamo.reset()
        compiled = torch.compile(model)
        with driftline.capture(compiled, tmp_path / "run", keep="summary"):
            assert torch.equal(compiled(x.clone()), plain)
    assert len(driftline.open_run(tmp_path / "run").records) >= 2


@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pair_is_measured_on_the_device_as_on_the_host(
    ours: torch.dtype, theirs: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    for count, dirty in ((1, False), (2048, False), (300_001, False), (300_001, True)):
        r = torch.randn(count, generator=generator)
        c = r * (1 + 0.01 * torch.randn(count, generator=generator))
        if dirty:
            r[7], c[9], r[200_000], c[200_000] = float("nan"), float("inf"), 0.0, 0.0
        r, c = r.to(ours), c.to(theirs)
        if dirty:
            r[3], c[3] = torch.finfo(ours).min, torch.finfo(theirs).min
        found = moments_of(pair_on_device(r.cuda(), c.cuda(), rtol=0.01, atol=1e-4), count)
        dtypes = [DTYPES[str(t.dtype).removeprefix("torch.")] for t in (r, c)]
        raws = [t.view(torch.uint8).numpy() for t in (r, c)]
        wanted = kernel.pair_moments(
            raws[0], dtypes[0], raws[1], dtypes[1], count=count, rtol=0.01, atol=1e-4, path="numpy"
        )
        norms = (wanted.r_l2 + wanted.c_l2) / max(count, 1) ** 0.5
        for name, mine, other in zip(PairMoments._fields, found, wanted, strict=True):
            scale = norms if name in ("r_mean", "c_mean") else abs(other)
            scale = (wanted.sum_rr * wanted.sum_cc) ** 0.5 if name == "sum_rc" else scale
            same = mine == other or (mine != mine and other != other)
            limit = 1 if name == "outside" else 2e-6 * scale
            assert same or abs(mine - other) <= limit, (name, mine, other, count, dirty)


def test_lockstep_on_the_device_finds_the_layer_and_agrees_with_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from driftline.comparison import live_models as models

    good = net(dtype=torch.float32)
    bad = copy.deepcopy(good)
    with torch.no_grad():
        bad[2].up.weight.mul_(1.05)
    x = given(dtype=torch.float32)
    fast = driftline.lockstep(good, bad, x)
    monkeypatch.setattr(models, "compared_in_step", lambda *_, **__: None)
    slow = driftline.compare_models(good, bad, x)
    assert fast.first_site == slow.first_site == "2.up" and fast.verdict == "fail"
    for mine, theirs in zip(fast.rows, slow.rows, strict=True):
        assert (mine.key, mine.status) == (theirs.key, theirs.status)
        for name, value in theirs.metrics.items():
            assert np.isclose(mine.metrics[name] or 0, value or 0, rtol=1e-5, atol=1e-7), name
    clean = driftline.lockstep(good, copy.deepcopy(good).to(torch.bfloat16), x)
    assert clean.verdict == "pass"
