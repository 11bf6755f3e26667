"""What another device does to float32: no fault, or TF32, and that is said."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.captures.torch import framework
from driftline.comparison.evidence.error_stats import effect
from driftline.diagnosis.api import diagnose
from driftline.diagnosis.evidence.replay import Limits
from driftline.diagnosis.experiments.live.number_formats import same_seen
from driftline.diagnosis.result import Diagnosis
from driftline.runs.memory import MemorySink, _MemoryRun
from driftline.runs.run import Run
from driftline.testing.faults import FAULTS, Setting
from driftline.testing.faults.architectures import Specimen
from driftline.testing.faults.trials import METHODS, planted, replayed

UNIT = 2.0**-24


def captured(model: nn.Module, x: torch.Tensor, device: str = "cpu", **facts: Any) -> Run:
    """A run, as if on a device."""
    sink = MemorySink(name=device)
    sink.describe(**facts)
    with torch.no_grad(), driftline.capture(model, sink):
        model(x)
    run = sink.run()
    assert isinstance(run, _MemoryRun)
    run._records = [record._replace(device=f"{device}:0") for record in run.records]
    return run


class OwnAttention(nn.Module):
    """One head, eager; `lean` and `scale` are what another kernel or a fault makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.lean, self.scale = 0.0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) * self.scale / math.sqrt(64)
        return self.o(torch.softmax(scores, -1) @ self.v(x) * (1 + self.lean * UNIT))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = OwnAttention()
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.attention(x)))


def attentions() -> tuple[Net, Net, torch.Tensor]:
    torch.manual_seed(3)
    net = Net().eval()
    return net, copy.deepcopy(net), torch.randn(4, 48, 64)


def by_replay(net: Net, other: Net, x: torch.Tensor) -> Diagnosis:
    theirs = captured(other, x)
    replay = replayed(Specimen(net, {"x": x}), theirs, "fp32")
    return diagnose(captured(net, x), theirs, replay=replay)


@pytest.mark.parametrize(("lean", "guilty"), [(-11.4, False), (-20.0, False), (-60.0, True)])
def test_a_fused_attention_may_lean_as_far_as_a_kernel_of_cuda_does(
    lean: float, guilty: bool
) -> None:
    net, other, x = attentions()
    other.attention.lean = lean
    theirs = captured(other, x)
    found = diagnose(
        captured(net, x), theirs, replay=replayed(Specimen(net, {"x": x}), theirs, "fp32")
    )
    assert found.verdict == ("fail" if guilty else "pass")
    assert found.first_site == ("attention" if guilty else "")


def test_an_attention_scale_that_is_off_by_little_is_still_named_in_float32() -> None:
    net, other, x = attentions()
    other.attention.scale = 1.0003
    theirs = captured(other, x)
    found = diagnose(
        captured(net, x), theirs, replay=replayed(Specimen(net, {"x": x}), theirs, "fp32")
    )
    assert (found.verdict, found.first_site) == ("fail", "attention")


def test_only_an_attention_may_lean_so_far_and_only_in_a_fine_format() -> None:
    torch.manual_seed(1)
    r = torch.randn(64, 64).double().numpy()
    found, null = effect(r, r * (1 - 12 * UNIT)), effect(r, r)
    plain = Limits.of([null], UNIT, 0, complete=True, allowed=0.0)
    attending = Limits.of([null], UNIT, 0, complete=True, allowed=0.0, attends=64)
    assert plain.excesses(found)["projection"] > 1.0
    assert attending.excesses(found)["projection"] < 1.0
    coarse = [
        Limits.of([null], 2.0**-9, 0, complete=True, allowed=0.0, attends=each) for each in (0, 64)
    ]
    assert coarse[0] == coarse[1]


def test_masks_of_two_kinds_say_the_same_only_if_they_let_the_same_be_seen() -> None:
    lowest = torch.finfo(torch.float32).min
    floats = torch.zeros(2, 1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), lowest)
    assert same_seen(floats == 0, floats)
    assert same_seen((floats == 0)[:1], floats)  # of all sequences alike
    assert not same_seen(floats != 0, floats)
    assert not same_seen(torch.ones(3, 3).bool(), floats)
    assert not same_seen(torch.ones(5, 5).bool(), floats)
    nothing = floats.clone()
    nothing[0, 0, 0] = lowest  # a row that sees nothing: kernels differ
    assert not same_seen(nothing == 0, nothing)
    assert not same_seen(floats == 0, floats - 0.5)  # adds a bias
    assert not same_seen(torch.tensor(True), torch.tensor(0.0))


@pytest.mark.parametrize("amount", [0.0, 1.2])
def test_an_attention_of_booleans_is_replayed_with_the_floats_that_say_the_same(
    amount: float,
) -> None:
    fault = FAULTS["attention scale"] if amount else None
    setting = Setting("bert", "fp32", 1, fault, amount, implementation="other attention")
    pair = planted(setting)
    about = pair.replay.sites["bert.encoder.layer.0.attention.self"]
    assert (about.status, about.masks) == ("replayed", {"attention_mask"})
    found = METHODS["replay"](setting, pair)
    assert (found.detected, found.exact, found.named) == (bool(amount), True, True)
    told = diagnose(pair.reference, pair.candidate, replay=pair.replay, noise=pair.noise)
    assert not any(site.status == "unknown" for site in told.sites)


def worse(run: Run, site: str, factor: float) -> Run:
    """A run with more rounding in what one site gives, its own error times a factor."""
    assert isinstance(run, _MemoryRun)
    made = copy.copy(run)
    blobs = dict(run._blobs)
    records = []
    for record in run.records:
        if record.key.site == site and record.key.port == "output":
            values = torch.from_numpy(run.get(site).float64().copy())
            torch.manual_seed(7)
            size = factor * UNIT * float(values.square().mean().sqrt())
            raw = (values + size * torch.randn(values.shape)).float().numpy().view("uint8").ravel()
            digest = f"worse-{factor}"
            blobs[digest, raw.nbytes] = raw
            record = record._replace(digest=digest)
        records.append(record)
    made._records, made._blobs = records, blobs
    return made


@pytest.mark.parametrize(("factor", "guilty"), [(9.0, False), (60.0, True)])
def test_noise_runs_of_one_device_do_not_narrow_float32_below_what_orders_of_sums_do(
    factor: float, guilty: bool
) -> None:
    """CUDA's fused attention is 10 units from the CPU's eager one, trusted runs 5 from each."""
    net, _, x = attentions()
    ours = captured(net, x)
    noise = []
    for seed in range(3):
        other = copy.deepcopy(net)
        torch.manual_seed(seed)
        with torch.no_grad():
            other.attention.q.weight.mul_(1 + UNIT * torch.randn(64, 64))
        noise.append(captured(other, x))
    theirs = worse(captured(net, x, "cuda"), "attention", factor)
    found = diagnose(ours, theirs, noise=noise)
    assert found.evidence["judged_by"].get("noise")
    assert found.verdict == ("fail" if guilty else "pass")
    assert found.first_site == ("attention" if guilty else "")
    assert any("noise runs made on cuda" in each for each in found.needs)
    same = diagnose(ours, theirs, noise=[*noise, worse(noise[0], "attention", 1.0)])
    assert any("noise runs made on cuda" in each for each in same.needs)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 64, 8, stride=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.projection(x).flatten(2).transpose(1, 2))


def in_tf32(t: torch.Tensor) -> torch.Tensor:
    return ((t.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.mark.parametrize("side", ["candidate", "reference", ""])
def test_a_convolution_in_tf32_is_lower_precision_and_the_switch_is_named(side: str) -> None:
    torch.manual_seed(2)
    net, x = Patches().eval(), torch.randn(4, 3, 48, 48)
    rounded = copy.deepcopy(net)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(
            in_tf32(x), in_tf32(net.projection.weight), net.projection.bias, stride=8
        )

    rounded.projection.forward = forward  # type: ignore[method-assign]
    facts = {
        name: {"tf32": ["convolutions"] if name == side else []}
        for name in ("reference", "candidate")
    }
    ours = captured(net, x, "cuda", **facts["reference"])
    theirs = captured(rounded, x, "cuda", **facts["candidate"])
    found = diagnose(ours, theirs)
    assert (found.first_site, found.cause) == ("projection", "low-precision")
    said = f"the {side} ran on CUDA with torch.backends.cudnn.allow_tf32 on"
    assert (said in found.sentences[1]) is bool(side)
    assert diagnose(ours, captured(net, x, "cuda")).verdict == "pass"


def test_all_digits_are_asked_for_and_the_programs_choice_is_put_back() -> None:
    before = framework.tf32_allowed()
    with framework.tf32_switched_off():
        assert framework.tf32_allowed() == []
    assert framework.tf32_allowed() == before
    assert before == [] or "convolutions" in before


def test_what_transformers_calls_conv1d_is_a_product_with_the_switch_of_products() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(4)
    net, x = nn.Sequential(Conv1D(96, 64)).eval(), torch.randn(4, 48, 64)
    rounded = copy.deepcopy(net)
    rounded[0].forward = lambda x: in_tf32(x) @ in_tf32(net[0].weight) + net[0].bias
    switched = {"tf32": ["products", "convolutions"]}
    ours, theirs = captured(net, x), captured(rounded, x, "cuda", **switched)
    found = diagnose(ours, theirs)
    assert (found.first_site, found.cause) == ("0", "low-precision")
    assert "torch.backends.cuda.matmul.allow_tf32 on" in found.sentences[1]
