"""The error watch on a GPU: the same findings as on the CPU, and nobody waits for the device."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from driftline import open_run
from driftline.captures.torch.errcheck.api import ErrorWatch, watch_errors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
INF = float("inf")


@pytest.fixture
def watch(tmp_path: Path):
    def watch(types: str | list[str] = "overflow", **options) -> ErrorWatch:
        return watch_errors(tmp_path / "found", types=types, **options)

    return watch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def planted() -> Net:
    net = Net().half().cuda()
    with torch.no_grad():
        net.layers[2].bias.fill_(50.0)
        net.layers[3].weight.fill_(60000.0)
    return net


@pytest.mark.parametrize("level", ["operator", "module"])
def test_an_overflow_in_a_layer_is_named_with_its_line(watch, level: str) -> None:
    with torch.no_grad(), watch(level=level) as w:
        net = planted()
        net(torch.ones(2, 16).half().cuda())
    (found,) = w.findings
    assert found.module == "layers.3" and "inf" in found.types and not found.exact
    assert found.code == "x = torch.tanh(layer(x))"


def test_propagators_are_counted_and_a_second_producer_is_found(watch) -> None:
    with watch() as w:
        a = torch.zeros(3, device="cuda") / 0
        b = a + 1
        c = torch.full((3,), 1e38, device="cuda") * 1e38
        (b + c).mean()
    assert [f.operator for f in w.findings] == ["aten.div.Tensor", "aten.mul.Tensor"]
    assert w.reporter.propagators == 3


def test_masks_of_every_make_do_not_alarm(watch) -> None:
    with watch() as w:
        scores = torch.randn(2, 4, 4, device="cuda")
        allowed = torch.ones(4, 4, device="cuda").tril().bool()
        for mask in (
            torch.full((4, 4), -INF, device="cuda").triu(1),
            torch.zeros(4, 4, device="cuda").masked_fill(~allowed, -INF),
            torch.log(allowed.float()),
        ):
            (scores + mask).softmax(-1)
        torch.where(allowed, scores, -INF).softmax(-1)
        low = torch.full((3,), -65504.0, dtype=torch.float16, device="cuda")
        low - 100
        nn.functional.scaled_dot_product_attention(
            torch.randn(1, 2, 4, 8, device="cuda"),
            torch.randn(1, 2, 4, 8, device="cuda"),
            torch.randn(1, 2, 4, 8, device="cuda"),
            attn_mask=torch.full((4, 4), -INF, device="cuda").triu(1),
        )
    assert [f.sentence() for f in w.findings] == []


def test_a_row_that_is_masked_altogether_alarms(watch) -> None:
    with watch() as w:
        torch.full((2, 4), -INF, device="cuda").softmax(-1)
    assert w.findings[0].types == ("nan",)


def test_memory_nobody_wrote_does_not_alarm(watch) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        with watch() as w:
            cache = torch.empty(4, 4, device="cuda")
            cache[0] = 1
            torch.cat([cache, cache]) * 2
            torch.empty(3, device="cuda").fill_(1).log()
    finally:
        torch.use_deterministic_algorithms(False)
    assert w.findings == [] and w.reporter.unwritten


def test_in_place_and_backward_are_seen(watch) -> None:
    x = torch.zeros(3, requires_grad=True, device="cuda")
    with watch() as w:
        y = x * 1
        z = y.sqrt()  # its gradient is 0 / 0
        (z * 0).sum().backward()
        torch.zeros(4, device="cuda").div_(0)
    assert [(f.phase, f.types) for f in w.findings] == [
        ("backward", ("nan",)),
        ("forward", ("nan",)),
    ]
    assert "its gradient is 0 / 0" in w.findings[0].forward_line


def test_what_came_in_with_weights_is_said_once(watch) -> None:
    layer = nn.Linear(2, 2).cuda()
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    with torch.no_grad(), watch() as w:
        layer(torch.ones(1, 2, device="cuda"))
        layer(torch.ones(1, 2, device="cuda"))
    (found,) = w.findings
    assert found.cause == "entered"


def test_the_inputs_of_a_finding_are_kept(watch, tmp_path: Path) -> None:
    with watch() as w:
        x = torch.tensor([1.0, -4.0], device="cuda")
        torch.log(x)
    assert len(w.findings) == 1
    run = open_run(tmp_path / "found")
    assert run.get("(program)/aten.log", "input").numpy().tolist() == [1.0, -4.0]


def test_saturation_and_headroom_are_seen(watch) -> None:
    with watch("saturation") as w:
        half = torch.full((2,), 65504 / 2, dtype=torch.float16, device="cuda")
        half + half
    assert w.findings[0].types == ("saturation",)
    assert w.reporter.device_peaks["(program)/aten.add", "float16"] == 65504.0


def test_gradients_lost_to_zero_underflow(watch) -> None:
    with watch("underflow") as w:
        small = torch.full((100,), 1e-3, device="cuda").half()
        small * 1e-5
        torch.full((64,), 1e-9, device="cuda").to(torch.float16)
        small.mul_(1e-6)
        torch._foreach_mul([torch.full((9,), 1e-3, device="cuda").half()], 1e-6)
    found = {f.operator: f for f in w.findings}
    wanted = {"aten.mul.Tensor", "aten._to_copy.default", "aten.mul_.Tensor"}
    assert wanted | {"aten._foreach_mul.Scalar"} == set(found)
    assert {f.types for f in w.findings} == {("underflow",)}
    assert "100 % of its elements" in found["aten.mul.Tensor"].sentence()


def test_zeros_that_were_there_or_are_the_point_are_no_underflow(watch) -> None:
    with watch("underflow") as w:
        x = torch.randn(64, device="cuda").relu()
        x * 2
        x.half()
        x.mul_(3.0)
        both = torch.cat([torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")])
        both[64:] * 2  # a part of a tensor, and all of it zero
        cache = torch.zeros(128, device="cuda")
        cache[:8] = torch.randn(8, device="cuda")
        cache * 2
        torch.nn.functional.dropout(torch.randn(64, device="cuda"), 0.5)
        torch.randn(64, device="cuda") * 0
        (torch.randn(8, 64, device="cuda") * 30).softmax(-1)
        torch.randn(64, device="cuda") * (torch.arange(64, device="cuda") % 2 == 0)
        torch.randn(64, device="cuda").to(torch.complex64)
        torch.div(torch.rand(64, device="cuda"), 3.0, rounding_mode="floor")
        torch.randn(64, device="cuda").to(torch.float8_e4m3fn).float() * 2
        torch.empty(0, device="cuda") * 2
    assert w.findings == [] and not w.reporter.remarks


@pytest.mark.parametrize("types", ["overflow", "all"])
@pytest.mark.parametrize("level", ["operator", "module"])
def test_nobody_waits_for_the_device_while_the_program_runs(watch, level: str, types: str) -> None:
    net = Net().half().cuda()
    x = torch.ones(2, 16).half().cuda()
    with torch.no_grad(), watch(types, level=level) as w:
        net(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(200):
                    net(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert w.findings == [] and w.reporter.calls > 1000
    known = ["underflow is looked for at operator level only"]
    assert list(w.reporter.remarks) == (known if (level, types) == ("module", "all") else [])


def test_a_finding_is_judged_while_the_program_still_runs(watch) -> None:
    net = planted()
    x = torch.ones(2, 16).half().cuda()
    with torch.no_grad(), watch() as w:
        for _ in range(300):
            net(x)
        torch.cuda.synchronize()
        net(x)
        assert w.findings


def test_results_are_bitwise_what_they_are_without(watch) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4)).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(5, 8, device="cuda")).log_softmax(-1).mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    plain = train()
    for level in ("operator", "module"):
        with watch("all", level=level) as w:
            watched = train()
        assert [f for f in w.findings if f.types != ("underflow",)] == []
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
