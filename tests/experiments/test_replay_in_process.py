"""Replay inside one process: what is given back, and that nobody notices."""

from __future__ import annotations

import abc
import copy
from typing import Any

import pytest
import torch
from replay_pairs import Replay, by_name, model
from torch import nn

import driftline
from driftline.captures.selection import Selection, patterns
from driftline.captures.torch.session import CaptureSession
from driftline.diagnosis.experiments.live.captured_calls import Candidate
from driftline.diagnosis.experiments.live.repeat import copied, same_bits
from driftline.diagnosis.experiments.live.replay import Replayer
from driftline.errors import BadInput
from driftline.runs.memory import MemorySink


def test_a_fault_in_a_leaf_shows_there_and_in_no_other_module() -> None:
    good, bad = model(), model()
    with torch.no_grad():
        bad[1].up.weight[:, 3] += 0.1
    replay = Replay(good, bad, torch.randn(4, 16))
    wrong = {site for site in replay.sites if replay.error(site) > 0}
    assert wrong == {"1.up"}


def test_a_fault_in_the_code_of_a_module_with_parts_shows_in_that_module_alone() -> None:
    good, bad = model(), model()
    bad[1].gain = 1.01
    replay = Replay(good, bad, torch.randn(4, 16))
    assert {site for site in replay.sites if replay.error(site) > 0} == {"1"}
    assert replay.sites["1"]["applied"] == "own code"


def test_a_clean_sixteen_bit_candidate_is_its_native_replay_to_the_bit() -> None:
    good = model()
    bad = copy.deepcopy(good).to(torch.bfloat16)
    sink = MemorySink()
    x = torch.randn(4, 16)
    with torch.no_grad(), driftline.capture(bad, sink):
        bad(x.bfloat16())
    replay = Replay(good, Half(bad), x)
    assert len(replay.native) == len(replay.exact) > 10
    for tensor in replay.native.tensors():
        assert tensor.dtype == "bfloat16"
        assert tensor.record.digest == replay.captured.get(tensor.key.site).record.digest
    for tensor in replay.exact.tensors():
        assert tensor.dtype == "float32"


class Half(nn.Sequential):
    """Takes 32 bits and works in 16."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16())


class Stateful(nn.Module):
    """Keeps what it saw, counts its calls, draws numbers, and has hooks that keep more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.line = nn.Linear(16, 16)
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        return self.line(self.norm(x)) + torch.rand(())


def test_the_program_does_not_notice() -> None:
    torch.manual_seed(1)
    plain, watched = Stateful().train(), Stateful().train()
    watched.load_state_dict(plain.state_dict())
    seen: list[int] = []
    watched.line.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(8, 16)
    torch.manual_seed(7)
    with torch.no_grad():
        expected = plain(x)
    after = torch.rand(3)
    candidate = copy.deepcopy(watched)
    state = watched.state_dict()["norm.running_mean"].clone()
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(candidate, sink):
        candidate(x)
    seen.clear()
    session = CaptureSession(MemorySink(), levels=(), model=watched)
    session.stand_in = Replayer(session, Candidate(sink.run()), by_name, MemorySink(), MemorySink())
    session.start()
    torch.manual_seed(7)
    with torch.no_grad():
        got = watched(x)
    session.stop()
    assert torch.equal(got, expected)
    assert torch.equal(torch.rand(3), after)
    assert watched.calls == 1
    assert watched.last is not None
    assert torch.equal(watched.last, x)
    assert seen == [1]
    assert torch.equal(watched.norm.running_mean, plain.norm.running_mean)
    assert not torch.equal(watched.norm.running_mean, state)


def test_what_draws_random_numbers_is_unknown_and_not_guilty() -> None:
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).train()
    replay = Replay(reference, copy.deepcopy(reference), torch.randn(4, 16))
    assert replay.sites["1"]["status"] == "unknown"
    assert replay.sites["1"]["reason"] == "it draws random numbers"
    assert not replay.sites["1"]["reproduced"]
    # What comes after it is replayed from what the candidate's dropout gave.
    assert replay.sites["2"]["status"] == replay.sites["(root)"]["status"] == "replayed"
    assert replay.error("2") == replay.error("(root)") == 0.0


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.relu(h)  # only its effect is used
        return self.second(h).mul_(2.0)


def test_modules_that_work_in_place_are_replayed() -> None:
    torch.manual_seed(1)
    reference = InPlace().eval()
    bad = copy.deepcopy(reference)
    replay = Replay(reference, bad, torch.randn(4, 16))
    assert {e["status"] for e in replay.sites.values()} == {"replayed"}
    assert all(replay.error(site) == 0.0 for site in replay.sites)


def test_a_module_that_is_used_twice_is_replayed_visit_by_visit() -> None:
    torch.manual_seed(1)
    shared = nn.Linear(16, 16)
    reference = nn.Sequential(shared, nn.ReLU(), shared).eval()
    bad = copy.deepcopy(reference)
    with torch.no_grad():
        bad[0].weight[0, 0] += 1.0
    replay = Replay(reference, bad, torch.randn(4, 16))
    visits = sorted(t.key.visit for t in replay.exact.tensors() if t.key.site == "0")
    assert visits == [0, 1]
    assert replay.sites["0"]["calls"] == 2
    assert replay.error("1") == 0.0


class Unrepeatable(nn.Module):
    """Gives something else each time, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return self.line(x) * len(self.seen)


def test_what_does_not_reproduce_its_own_output_is_unknown() -> None:
    torch.manual_seed(1)
    reference = nn.Sequential(Unrepeatable(), nn.Linear(4, 4)).eval()
    replay = Replay(reference, copy.deepcopy(reference), torch.randn(2, 4))
    assert replay.sites["0"]["status"] == "unknown"
    assert "does not give its own output" in replay.sites["0"]["reason"]
    assert len(reference[0].seen) == 1  # what it kept is as if it had been called once
    assert replay.sites["0.line"]["status"] == replay.sites["1"]["status"] == "replayed"


def test_another_shape_is_a_clash_that_names_the_first() -> None:
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    candidate = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    replay = Replay(reference, candidate, torch.randn(2, 4))
    assert "'0.weight' has shape (8, 4)" in replay.report["clash"]
    assert "(6, 4)" in replay.report["clash"]
    # Whether it is another model is known when all of it has been called, so calls that fit are
    # replayed until then; `driftline replay` throws them away with its refusal.
    assert all(record.key.site in ("", "(root)") for record in replay.exact.records)


def test_results_are_held_within_the_limit_and_what_does_not_fit_says_so() -> None:
    replay = Replay(model(), model(), torch.randn(64, 16), most_held=6000)
    assert replay.sites["0.act"]["status"] in ("replayed", "unknown")
    reasons = {e["reason"] for e in replay.sites.values() if e["status"] == "unknown"}
    assert reasons
    assert all("takes more than" in reason for reason in reasons)


def test_every_call_is_proven_when_asked() -> None:
    replay = Replay(model(), model(), torch.randn(4, 16), check_each=True)
    assert {e["status"] for e in replay.sites.values()} == {"replayed"}


def test_a_program_under_autocast_is_followed_in_its_format() -> None:
    good = model()
    sink = MemorySink()
    x = torch.randn(4, 16)
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        driftline.capture(good, sink),
    ):
        good(x)
    native = MemorySink()
    session = CaptureSession(MemorySink(), levels=(), model=good)
    session.stand_in = Replayer(session, Candidate(sink.run()), by_name, MemorySink(), native)
    session.start()
    with torch.no_grad():
        good(x)
    session.stop()
    captured = sink.run()
    for tensor in native.run().tensors():
        assert tensor.record.digest == captured.get(tensor.key.site).record.digest, tensor


def test_isolated_modules_are_shown_with_what_differs_between_the_models():
    def norm(eps: float) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LayerNorm(16, eps=eps)).eval()

    inputs = 0.01 * torch.linspace(-1, 1, 64).reshape(4, 16)
    table = driftline.compare_models(norm(1e-12), norm(1e-3), inputs, isolate=True)
    assert table.verdict == "fail"
    assert [difference.path for difference in table.differences] == ["0.eps"]


def test_isolated_comparison_fails_only_where_the_error_is_made() -> None:
    good, bad = model(), model()
    with torch.no_grad():
        bad[1].up.weight[:, 3] += 0.5
    table = driftline.compare_models(good, bad, torch.randn(4, 16), isolate=True)
    failing = [row.key.site for row in table.rows if row.status == "fail"]
    assert failing == ["1.up"]
    usual = driftline.compare_models(good, bad, torch.randn(4, 16))
    assert len([row for row in usual.rows if row.status == "fail"]) > 5


def test_isolation_refuses_models_that_are_not_the_same_and_summaries() -> None:
    with pytest.raises(BadInput, match="not the same"):
        driftline.compare_models(
            nn.Sequential(nn.Linear(4, 8)),
            nn.Sequential(nn.Linear(4, 6)),
            torch.ones(1, 4),
            isolate=True,
        )
    with pytest.raises(BadInput, match="whole tensors"):
        driftline.compare_models(model(), model(), torch.ones(1, 16), isolate=True, keep="summary")


class _Shelf(abc.ABC):
    """As a cache of transformers: attributes alone, and an empty `__slots__` above it."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.layers = [rows, {"same": rows}]
        self.me = self

    @abc.abstractmethod
    def kind(self) -> str: ...


class _Plain(_Shelf):
    def kind(self) -> str:
        return "plain"


class _OwnWay(_Plain):
    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return "its own copy"


def test_arguments_are_copied_as_deepcopy_would_and_every_tensor_is_asked_for() -> None:
    shelf = _Plain(torch.ones(2))
    other = copied((shelf, shelf.layers, _OwnWay(torch.ones(1))), lambda tensor: tensor + 1)
    assert other[0] is not shelf and type(other[0]) is _Plain
    assert other[0].me is other[0]
    assert other[0].layers is other[1] is not shelf.layers
    assert other[0].layers[1]["same"] is other[0].rows
    assert other[0].rows.tolist() == [2.0, 2.0] and shelf.rows.tolist() == [1.0, 1.0]
    assert other[2] == "its own copy"


def test_what_a_modules_code_hands_on_is_held_within_the_limit_too() -> None:
    class Handing(nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.line = nn.Linear(16, 2)
            self.gain = gain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(self.gain * x.repeat(64, 1))

    torch.manual_seed(2)
    good, bad = Handing(1.0).eval(), Handing(1.1).eval()
    bad.load_state_dict(good.state_dict())
    x = torch.randn(4, 16)
    assert Replay(good, bad, x).sites["(root)"]["status"] == "replayed"
    little = Replay(good, bad, x, most_held=12_000).sites["(root)"]
    assert "takes more than 12000 bytes" in little["reason"]


def test_what_was_not_selected_is_told_from_what_was_not_called() -> None:
    good = model()
    candidate = nn.Sequential(*good, nn.Identity())
    chosen = Selection(sites=patterns(["0.*", "1"]))
    replay = Replay(good, candidate, torch.randn(4, 16), selection=chosen)
    assert {s for s, about in replay.sites.items() if about["status"] == "replayed"} == {
        *("1", "0.norm", "0.up", "0.act", "0.down")
    }
    assert replay.sites["2.up"]["reason"] == "it was not selected"
    assert replay.sites["3"]["reason"] == "the program did not call it in these steps"


@pytest.mark.parametrize("size", [3, 8])
def test_same_bits_tells_signs_of_zero_and_takes_equal_nans(size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool):
        one = torch.zeros(size, dtype=dtype)
        assert same_bits(one, one.clone())
        if dtype is torch.bool:
            continue
        assert not same_bits(one, -one)
        one[0] = torch.nan
        assert same_bits(one, one.clone())
        assert same_bits(one.expand(2, size), one.expand(2, size).contiguous())


class Experts(nn.Module):
    """Tokens are sorted by their expert; those of one expert may come in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.weight = nn.Parameter(torch.randn(4, 16, 24) / 4)
        self.act = nn.SiLU()
        self.backwards = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        route = torch.arange(len(x)) * 7 % 4
        order = torch.argsort(route, stable=True)
        if self.backwards:
            order = len(x) - 1 - torch.argsort(route.flip(0), stable=True)
        given = x.to(self.weight.dtype)[order]
        made = self.act(torch.einsum("nk,nkm->nm", given, self.weight[route[order]]))
        return torch.empty_like(made).index_copy(0, order, made * 2)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_come_in_another_order_are_no_fault(dtype: torch.dtype, fault: bool) -> None:
    reference = nn.Sequential(Experts())
    candidate = copy.deepcopy(reference).to(dtype)
    candidate[0].backwards = True
    if fault:
        with torch.no_grad():
            candidate[0].weight[2] *= 1.5
    replay = Replay(reference, candidate, torch.randn(40, 16))
    assert replay.report["faults"] == []
    assert replay.error("0.act") < 0.1
    runs = replay.exact, replay.captured
    exact, made = (run.get("0.act", port="input").float64() for run in runs)
    off = (abs(exact - made) > 0.05).any(-1)
    assert off.sum() == (10 if fault else 0)
    assert fault or replay.error("0") < 0.1


def test_rows_that_fit_nowhere_lie_alike_in_both_formats() -> None:
    """Else two experts exchanged look like noise as large as they are."""
    reference = nn.Sequential(Experts())
    candidate = copy.deepcopy(reference).to(torch.bfloat16)
    candidate[0].backwards = True
    with torch.no_grad():
        candidate[0].weight[[0, 2]] = candidate[0].weight[[2, 0]]
    torch.manual_seed(1)
    replay = Replay(reference, candidate, torch.randn(400, 16))
    for site, port in (("0.act", "input"), ("0", "output")):
        runs = replay.exact, replay.native, replay.captured
        exact, native, made = (run.get(site, port=port).float64() for run in runs)
        assert abs(exact - native).max() < 0.1
        assert (abs(exact - made).max(-1) > 0.3).sum() > 100
