"""Sound pairs that were accused: what explains their errors, and which faults must not hide so."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from two_runs import decoder

import driftline
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.faults import Specimen
from driftline.testing.faults.trials import replayed

WIDTH = 32
Fault = Callable[[nn.Module], None]


def run_of(model: nn.Module, *inputs: torch.Tensor, sink: Any = None, **named: Any) -> Run:
    sink = sink or MemorySink(name="run")
    with torch.no_grad(), driftline.capture(model, sink, levels=["modules"]):
        model(*inputs, **named)
    return sink.run()


def scaled(site: str, factor: float) -> Fault:
    def fault(model: nn.Module) -> None:
        model.get_submodule(site).weight.data.mul_(factor)

    return fault


# Numbers below the smallest normal one of float16: its steps are no longer relative.


def vanishing(fault: Fault | None = None) -> tuple[Run, Run]:
    """Activations of about 2e-6 from layer to layer, where float16 has steps of 6e-8."""
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
    for linear in linears:
        nn.init.normal_(linear.weight, 0.0, 1.0 / math.sqrt(WIDTH))
    model = nn.Sequential(*linears)
    given = 3e-6 * torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    given = given.half().float()
    other = copy.deepcopy(model)
    if fault is not None:
        fault(other)
    return run_of(model, given), run_of(other.half(), given.half())


def test_steps_of_subnormal_numbers_explain_what_they_round() -> None:
    table = driftline.compare(*vanishing())
    assert max(row.metrics.get("relative_l2", 0) for row in table) > 0.01  # 20 units of roundoff
    assert table.verdict == "pass", table.finding


def test_a_fault_among_subnormal_numbers_is_found() -> None:
    table = driftline.compare(*vanishing(scaled("3", 1.3)))
    assert (table.verdict, table.first_site) == ("fail", "3")


# Pads on the left, which kernels of attention fill each in its own way.


def padded(folder: Path, fault: Fault | None = None) -> tuple[Path, Path]:
    model = decoder("Llama", 3, width=64)
    ids = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    other = copy.deepcopy(model)
    other.config._attn_implementation = "sdpa"
    if fault is not None:
        fault(other)
    for name, side in (("ref", model), ("cand", other)):
        with torch.no_grad(), driftline.capture(side, folder / name, levels=["modules"]):
            side(input_ids=ids, attention_mask=mask)
    return folder / "ref", folder / "cand"


@pytest.mark.parametrize("verb", ["compare", "diagnose"])
def test_what_kernels_leave_at_pads_fails_nobody(
    verb: str, command: Callable, tmp_path: Path
) -> None:
    pair = padded(tmp_path)
    said = command(verb, *pair)
    assert (said.code, said.word) == (0, "PASS"), said.out
    assert "pads" in said.out or verb == "diagnose"
    assert command("compare", *pair, "--mask", "none").code == 1  # they are there


def test_a_fault_beside_pads_is_named(command: Callable, tmp_path: Path) -> None:
    pair = padded(tmp_path, scaled("model.layers.1.self_attn.v_proj", 1.1))
    said = command("compare", *pair)
    assert said.code == 1, said.out
    assert "'model.layers.1.self_attn.v_proj'" in said.out


# Weights that an optimizer has moved by the signs of gradients.


class Scaled(nn.Module):
    """A residual block whose branch begins at nothing, as those of ConvNeXt do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 1e-6))
        self.end = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.end(self.gamma * self.linear(self.norm(x)))


class OtherOrder(nn.Linear):
    """A linear layer that adds up from the other end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.flip(-1), self.weight.flip(-1), self.bias)


def task(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and goals with which the gradients of half of gamma cancel, but for rounding."""
    draw = torch.Generator().manual_seed(3)
    given = torch.randn((4, 8, WIDTH), generator=draw)
    with torch.no_grad():
        block = model[0]
        branch = block.linear(block.norm(given)).double().flatten(0, 1)
        rest = torch.randn((4, 8, WIDTH), generator=draw).double().flatten(0, 1)
        along = (rest * branch).sum(0) / (branch * branch).sum(0)
        rest -= (torch.arange(WIDTH) % 2) * along * branch
        return given, (model(given).double() - rest.unflatten(0, given.shape[:2])).float()


def trained(model: nn.Module, rate: float) -> Run:
    sink = MemorySink(name="run")
    torch.manual_seed(0)
    given, goal = task(nn.Sequential(Scaled()))
    given.requires_grad_()  # as whatever lies before a block asks for
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with driftline.capture(model, sink, levels=["modules", "gradients"]):
        for _ in range(2):
            (model(given) - goal).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sink.run()


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled())
    other = copy.deepcopy(model)
    linear = OtherOrder(WIDTH, WIDTH)
    linear.load_state_dict(other[0].linear.state_dict())
    other[0].linear = linear
    return model, other


def test_weights_that_adam_moved_by_signs_of_rounding_explain_the_next_step() -> None:
    model, other = twins()
    table = driftline.compare(trained(model, 1e-3), trained(other, 1e-3))
    assert table.verdict == "pass", table.finding
    over = [row for row in table if row.metrics.get("relative_l2", 0) > 1e-4]
    assert {row.key.step for row in over if row.key.port in ("input", "output")} == {1}


def test_another_learning_rate_is_no_rounding() -> None:
    model, other = twins()
    table = driftline.compare(trained(model, 1e-3), trained(other, 1.5e-3))
    assert table.verdict == "fail"
    assert table.first is not None and table.first.key.step == 1


# A norm gives every token the same size, also one that is small beside the others.


class WithSmallToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-9)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(1e-2 * torch.randn(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        # As an attention does: all tokens are given something of the same size.
        return self.last(self.norm(x + 1e-2 * self.first(x.mean(1, keepdim=True))))


def with_small_token(fault: Fault | None = None) -> tuple[Run, Run]:
    torch.manual_seed(0)
    model = WithSmallToken()
    other = copy.deepcopy(model)
    # Three digits of the weight are left, as of one that is stored in eight bits.
    other.first.weight.data.mul_(1.0 + 5e-3 * torch.randn(WIDTH, WIDTH))
    other.first.register_buffer("codes", torch.zeros(1, dtype=torch.int8))
    other.first.__class__ = type("QuantLinear", (nn.Linear,), {})
    if fault is not None:
        fault(other)
    given = torch.randn((4, 6, WIDTH), generator=torch.Generator().manual_seed(1))
    return run_of(model, given), run_of(other, given)


def test_a_norm_is_judged_by_the_error_of_each_token_it_was_given() -> None:
    table = driftline.compare(*with_small_token())
    assert table.verdict == "pass", table.finding
    given = next(row for row in table if (row.key.site, row.key.port) == ("norm", "input"))
    made = next(row for row in table if (row.key.site, row.key.port) == ("norm", "output"))
    assert made.metrics["relative_l2"] > 8 * given.metrics["relative_l2"]
    assert made.metrics["relative_l2"] == pytest.approx(given.metrics["given_error"], rel=0.05)


def test_a_norm_that_adds_error_itself_is_found() -> None:
    def other_epsilon(model: nn.Module) -> None:
        model.norm.eps = 1e-2

    table = driftline.compare(*with_small_token(other_epsilon))
    assert (table.verdict, table.first_site) == ("fail", "norm")


# A format that is too coarse for a site: a trusted module is as wrong in it.


class Positions(nn.Module):
    """Sines of positions: angles of hundreds have no digits left in bfloat16."""

    def __init__(self, *, learnt: bool) -> None:
        super().__init__()
        rates = 10_000.0 ** -(torch.arange(WIDTH) / WIDTH)
        if learnt:
            self.rates = nn.Parameter(rates)
        else:
            self.register_buffer("rates", rates)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(ids[..., None].to(self.rates.dtype) * self.rates)


class Positioned(nn.Module):
    def __init__(self, *, learnt: bool) -> None:
        super().__init__()
        self.positions, self.linear = Positions(learnt=learnt), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.positions(ids))


@pytest.mark.parametrize("learnt", [False, True], ids=["buffer", "parameter"])
def test_a_replay_that_is_as_wrong_does_not_acquit_a_format(learnt: bool) -> None:
    """Replay keeps the digits of buffers; weights are rounded, and the trusted module errs, too."""
    torch.manual_seed(0)
    model = Positioned(learnt=learnt)
    ids = torch.arange(400)[None]
    reference = run_of(model, ids)
    candidate = run_of(copy.deepcopy(model).bfloat16(), ids)
    replay = replayed(Specimen(model, {"ids": ids}), candidate, "bf16")
    for evidence in ({}, {"replay": replay}):
        table = driftline.compare(reference, candidate, **evidence)
        assert (table.verdict, table.first_site) == ("fail", "positions"), evidence
    assert (
        "keep it in float32 here"
        in driftline.diagnose(reference, candidate, replay=replay).site("positions").reason
    )


class FusedAttention(nn.Module):
    """Queries, keys and values of one layer: a third of its bias has no gradient but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(64, 32), nn.Linear(32, 96)
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 64)
        nn.init.zeros_(self.qkv.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


def trained_twice(path: Path, *, lowered: bool, rate: float = 1e-3) -> Path:
    """Two steps of AdamW with weights and gradients; of the second only summaries are kept."""
    torch.manual_seed(0)
    model, ids = FusedAttention(), torch.arange(40).view(2, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with driftline.capture(model, path, levels=("modules", "gradients", "params")):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                made = model(ids)
            nn.functional.cross_entropy(made.float().flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_a_bias_that_adamw_moved_by_the_signs_of_rounding_is_no_fault(
    command: Callable, tmp_path: Path
) -> None:
    """A zero bias is what the first step makes of it: turned signs are all of its error."""
    pair = (
        trained_twice(tmp_path / "ref", lowered=False),
        trained_twice(tmp_path / "cand", lowered=True),
    )
    said = command("compare", *pair, "--format", "json", "-o", tmp_path / "table")
    assert (said.code, json.loads(said.out)["verdict"]) == (0, "pass"), said.out
    rows = driftline.open_table(tmp_path / "table").rows
    updated = [
        row for row in rows if row.key.site == "qkv" and row.key.port == "param" and row.compared
    ]
    updated = [row for row in updated if row.key.slot == "bias" and row.key.moment == "after"]
    assert len(updated) == 2 and all(row.metrics["relative_l2"] > 0.3 for row in updated)
    wrong = trained_twice(tmp_path / "wrong", lowered=True, rate=1.5e-3)
    assert command("compare", pair[0], wrong).code == 1
