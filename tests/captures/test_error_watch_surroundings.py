"""The error watch among everything else torch has: compiled regions, autocast, subclasses, vmap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from driftline.captures.torch.errcheck.api import ErrorWatch, watch_errors
from driftline.runs.sidecars.calls import read_calls


@pytest.fixture
def watch(tmp_path: Path):
    def watch(types: str | list[str] = "overflow", **options) -> ErrorWatch:
        return watch_errors(tmp_path / "found", types=types, **options)

    return watch


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x) * 2


def test_the_arguments_of_a_found_call_are_listed_for_replay(watch, tmp_path: Path) -> None:
    with watch():
        torch.full((2, 3), -float("inf")).softmax(dim=1)
    (call,) = read_calls((tmp_path / "found" / "rank0" / "calls.jsonl").read_text())
    assert (call.class_name, call.site) == ("aten._softmax.default", "(program)/aten._softmax")
    assert call.param == {"dim": 1, "half_to_float": False}
    assert [one.slot for one in call.inputs] == ["self"]


def test_weights_are_among_the_inputs_that_are_kept(watch, tmp_path: Path) -> None:
    from driftline import open_run

    layer = nn.Linear(4, 2).half()
    with torch.no_grad(), watch():
        layer.weight.fill_(60000)
        layer(torch.ones(1, 4).half())
    slots = {r.key.slot for r in open_run(tmp_path / "found").records if r.key.port == "input"}
    assert {"mat1", "mat2", "self"} <= slots


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_whose_operators_are_seen_is_found_once(watch, backend: str) -> None:
    net = torch.compile(Log(), backend=backend)
    with torch.no_grad(), watch() as w:
        net(torch.tensor([-1.0, 2.0])) + 1
    assert len(w.findings) == 1


@pytest.mark.slow
def test_what_a_compiled_region_gives_is_found_and_it_stays_compiled(watch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = torch.compile(nn.Sequential(nn.Identity(), Log()))
    with torch.no_grad(), watch() as w:
        net(torch.tensor([-1.0, 2.0])) + 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (found,) = w.findings
    assert found.operator == "Sequential" and found.types == ("nan",)
    assert w.reporter.propagators == 1


def test_autocast_and_a_gradient_scaler_are_watched(watch) -> None:
    net = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch() as w:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.ones(2, 4)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.findings and all(f.phase == "backward" for f in w.findings)
    assert not w.reporter.remarks


def test_torch_func_and_nested_and_quantised_tensors_are_no_trouble(watch) -> None:
    with watch("all") as w:
        torch.func.vmap(torch.sin)(torch.randn(3, 4))
        torch.func.grad(lambda x: (x * x).sum())(torch.randn(3))
        torch.func.jvp(torch.tanh, (torch.randn(3),), (torch.ones(3),))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        nested * 2
        torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8).dequantize()
        torch.randn(3, 3).to_sparse_csr() * 2
        torch.ones(2, device="meta") * 2
        with torch.device("cpu"):
            torch.ones(3) + 1
    assert w.findings == []
    assert not [text for text in w.reporter.remarks if "could not be looked at" in text]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_distributed_tensors_are_read_by_their_local_part(watch, one_rank, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from driftline import open_run

    mesh = init_device_mesh("cpu", (1,))
    whole = distribute_tensor(torch.tensor([[1.0, -1.0], [2.0, 3.0]]), mesh, [Shard(0)])
    with watch() as w:
        found = torch.log(whole) + 1
        found.redistribute(mesh, [Replicate()]).to_local() * 2
        whole.sub(5).sqrt_()
    assert [f.operator for f in w.findings] == ["aten.log.default", "aten.sqrt_.default"]
    assert w.findings[0].outputs[0].nan == 1
    assert not [text for text in w.reporter.remarks if "could not" in text]
    kept = open_run(tmp_path / "found").get("(program)/aten.log", "input").numpy()
    assert kept.tolist() == [[1.0, -1.0], [2.0, 3.0]]


def test_a_programs_own_modes_see_nothing_of_the_watch(watch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.log(torch.tensor([-1.0, 1.0]))
    plain, seen[:] = list(seen), []
    with watch() as w, Mode():
        torch.log(torch.tensor([-1.0, 1.0]))
    assert seen == plain and len(w.findings) == 1


def test_a_checkpointed_module_names_the_recomputation_as_such(watch) -> None:
    from torch.utils.checkpoint import checkpoint

    net = nn.Sequential(nn.Linear(2, 2), Log())
    with watch() as w:
        checkpoint(net, -torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()
    assert {f.phase for f in w.findings} <= {"forward", "recompute"}


def test_an_error_of_the_program_stays_its_own(watch) -> None:
    with watch() as w, pytest.raises(RuntimeError, match="size"):
        torch.ones(3) + torch.ones(4)
    assert w.findings == []
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_two_watches_beside_each_other_find_the_same(tmp_path: Path) -> None:
    with watch_errors(tmp_path / "a") as a, watch_errors(tmp_path / "b", level="module") as b:
        Log()(torch.tensor([-1.0]))
    assert len(a.findings) == len(b.findings) == 1
