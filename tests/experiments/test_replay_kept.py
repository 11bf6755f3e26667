"""What a replay keeps: values where they say something, else the size of the noise."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from replay_pairs import Replay, Wide, diagnosed_both_ways, model
from torch import nn

from driftline.diagnosis.evidence import files as diagnosis
from driftline.diagnosis.evidence.files import ReplayedSite
from driftline.diagnosis.evidence.replay import judge
from driftline.errors import BadFile


class HalfModel(nn.Module):
    """Takes 32 bits and works in 16, on parts with the reference's names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(next(self.parameters()).dtype))


def halves(fault: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    reference = HalfModel(model())
    candidate = copy.deepcopy(reference).to(torch.bfloat16)
    if fault:
        with torch.no_grad():
            candidate.inner[1].up.weight[3] *= 1.5
    torch.manual_seed(7)
    return reference, candidate, torch.randn(4, 24, 16)


def test_values_are_kept_only_where_they_say_something() -> None:
    replay = Replay(*halves(fault=True), keep_all=False)
    full = {t.key.site for t in replay.exact.tensors() if t.record.kept == "full"}
    assert full == {"inner.1.up"}
    assert {t.key.site for t in replay.native.tensors() if t.record.kept == "full"} == full
    for record in replay.native.records:
        if record.kept == "digest":
            assert record.digest == replay.captured.get(record.key.site).record.digest
    assert {r.key for r in replay.exact.records} == {r.key for r in replay.native.records}
    assert "same_bits" not in replay.sites["inner.1.up"]
    for site, about in replay.sites.items():
        if site not in full:
            assert about["same_bits"] == about["calls"] == 1
            assert 0.0 <= about["noise"]["error"] < 2.0**-7
    assert replay.sites["inner.0.up"]["noise"]["error"] > 2.0**-11  # bfloat16 rounds


class Odd(nn.Module):
    """One token without an axis, no tokens at all, whole numbers, NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 8)
        self.same = nn.Identity()
        self.order = Order()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.line(x[0])
        self.line(x[:0])
        self.same(x[..., :0])
        self.order(x)
        self.same(self.line(x[:2] * float("nan")))
        return one


class Order(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argsort(-1)


def test_odd_shapes_and_values_are_replayed_as_well() -> None:
    torch.manual_seed(4)
    reference = HalfModel(Odd().eval())
    replay = Replay(
        reference, copy.deepcopy(reference).to(torch.bfloat16), torch.randn(4, 16), keep_all=False
    )
    assert replay.report["faults"] == []
    assert {about["status"] for about in replay.sites.values()} == {"replayed"}
    assert all(about["same_bits"] == about["calls"] for about in replay.sites.values())
    assert replay.sites["inner.order"]["noise"] is None
    assert 0.0 < replay.sites["inner.line"]["noise"]["error"] < 2.0**-7


@pytest.mark.parametrize("fault", [False, True])
def test_a_diagnosis_is_the_same_whether_all_values_are_kept_or_not(fault: bool) -> None:
    reference, candidate, x = halves(fault)
    whole, spare, _ = diagnosed_both_ways(reference, candidate, x)
    assert (whole.verdict, whole.first_site) == (spare.verdict, spare.first_site)
    assert spare.verdict == ("fail" if fault else "pass")
    for one, other in zip(whole.sites, spare.sites, strict=True):
        assert (one.site, one.status) == (other.site, other.status)
        assert other.noise == pytest.approx(one.noise, rel=0.25, abs=2.0**-11)
        assert other.ratio <= 1.0 or other.status == "introduced"
        assert math.isfinite(other.projection)
    assert whole.evidence["false_alarms"] == spare.evidence["false_alarms"]


def test_a_replay_of_another_run_acquits_nobody_whose_results_it_did_not_give() -> None:
    reference, clean, x = halves(fault=False)
    made = Replay(reference, clean, x, keep_all=False)
    faulty = Replay(reference, halves(fault=True)[1], x).captured
    judged = judge(faulty, made.evidence())
    assert not judged["inner.0.up"].trouble
    assert "no values of it were kept" in judged["inner.1.up"].trouble


def of_another_device(fault: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A candidate in 16 bits of whose elements some fall to the neighbouring value."""
    torch.manual_seed(5)
    reference = HalfModel(Wide().eval())
    candidate = copy.deepcopy(reference).to(torch.bfloat16)
    chance = torch.Generator().manual_seed(6)

    def nudged(module: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor:
        if fault and module is candidate.inner.up:
            result = FAULTS[fault](result)
        up = torch.rand(result.shape, generator=chance) < 0.004
        down = torch.rand(result.shape, generator=chance) < 0.004
        codes = result.view(torch.int16) + (up ^ down).short() * (1 - 2 * down.short())
        return codes.view(torch.bfloat16)

    for module in candidate.inner.modules():
        if module is not candidate.inner:
            module.register_forward_hook(nudged)
    return reference, candidate, torch.randn(4, 64, 64)


def one_row(result: torch.Tensor) -> torch.Tensor:
    result = result.clone()
    result[2, 17] = result[2, 16]
    return result


FAULTS = {
    "a factor below noise": lambda y: (y.float() * 1.004).to(y.dtype),
    "an offset": lambda y: y + 0.01,
    "one token": one_row,
    "a channel": lambda y: torch.cat((y[..., :40] * 0.5, y[..., 40:]), dim=-1),
    "fewer bits": lambda y: (y.float() * 3).to(torch.bfloat16) / 3,
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_products_as_good_as_the_trusted_ones_are_told_from_faults(fault: str) -> None:
    reference, candidate, x = of_another_device(fault)
    whole, spare, made = diagnosed_both_ways(reference, candidate, x)
    assert [s.status for s in whole.sites] == [s.status for s in spare.sites]
    assert (whole.first_site, whole.cause) == (spare.first_site, spare.cause)
    assert spare.first_site == ("inner.up" if fault else "")
    kept = {t.key.site for t in made.exact.tensors() if t.record.kept == "full"}
    assert kept == {"inner.act", *(["inner.up"] if fault else [])}
    about = made.sites["inner.down"]
    assert "same_bits" not in about
    assert 0.0 < about["near"]["most"] < 0.75
    assert about["near"]["digests"] == [made.captured.get("inner.down").record.digest]


def test_what_is_near_another_run_acquits_nobody() -> None:
    reference, clean, x = of_another_device("")
    made = Replay(reference, clean, x, keep_all=False)
    faulty = Replay(reference, of_another_device("an offset")[1], x).captured
    judged = judge(faulty, made.evidence())
    assert "no values of it were kept" in judged["inner.up"].trouble


def test_a_call_of_which_nothing_is_new_is_read_from_its_noise_on_disk(tmp_path: Path) -> None:
    about = {"same_bits": 2, "noise": {"rows": 8, "error": 0.002, "projection": 1e-4}}
    site = ReplayedSite.from_json(about)
    assert site.noise is not None
    assert site.noise.error == 0.002
    assert ReplayedSite.from_json({"status": "replayed"}).noise is None
    (tmp_path / "replay.json").write_text(
        json.dumps({"schema": 1, "sites": {"a": {"same_bits": 1, "noise": {"error": "much"}}}})
    )
    with pytest.raises(BadFile, match="noise of site 'a'"):
        diagnosis.open_replay(tmp_path)
