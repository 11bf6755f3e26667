"""Tensors of devices on their way into a run, the CPU in a device's place, kernels interpreted."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import needs_interpreter
from torch import nn

import driftline
from driftline.captures.options import Budgets
from driftline.captures.torch import tensors as snapshots
from driftline.captures.torch.device import places, summaries
from driftline.captures.torch.device.memory import DeviceMemory, Transfers
from driftline.captures.torch.device.places import HostPlace, _Reached
from driftline.captures.torch.framework import capture
from driftline.errors import BadInput
from driftline.numerics.gpu.launcher import CannotLaunch, Kernel
from driftline.runs.memory import MemorySink

pytestmark = needs_interpreter
summaries._FIRST_TABLE = 1024  # the interpreter takes seconds for the usual one


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.first(x))


class Slow(MemorySink):
    def put(self, record: Any, data: Any) -> None:
        time.sleep(0.01)
        super().put(record, data)


def run(
    keep: str,
    *,
    pretend: bool = True,
    budgets: Budgets | None = None,
    sink: MemorySink | None = None,
    steps: int = 1,
    ports: tuple[str, ...] = (),
) -> Any:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 8)
    sink = sink or MemorySink()
    watching = capture(model, sink, keep=keep, ports=ports, steps="*")
    watching.session.device_backend.pretends = pretend
    if budgets is not None:
        watching.session.device_backend.budgets = budgets
    with torch.no_grad(), watching:
        results = [model(x) for _ in range(steps)]
    made = sink.run()
    made.results = results
    return made


@pytest.mark.parametrize("keep", ["full", "summary", "digest", "sample(5)", "describe"])
def test_a_run_is_the_same_as_over_the_host(keep: str) -> None:
    steps = 2 if keep == "full" else 1
    ports = () if keep == "full" else ("output",)  # each summary takes the interpreter long
    ours, theirs = (run(keep, pretend=p, steps=steps, ports=ports) for p in (False, True))
    assert all(map(torch.equal, ours.results, theirs.results))
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert (a[:8], a.sample_stride) == (b[:8], b.sample_stride)
        if keep in ("full", "sample(5)"):
            assert a.digest == b.digest
        if keep == "summary":
            assert a.summary is not None and b.summary is not None
            assert np.allclose(a.summary[:10], b.summary[:10], equal_nan=True)
            assert np.allclose(a.summary.sketch, b.summary.sketch)
    events = [[(e["kind"], e["order"]) for e in made.events()] for made in (ours, theirs)]
    assert events[0] == events[1]


class Pair(nn.Module):
    """Gives what attentions give: a tensor, and nothing beside it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if x.shape[0] == 4:
            raise ValueError("four")
        return x * 2, None


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair = nn.Linear(8, 8), Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair(self.first(x))[0]


@pytest.mark.parametrize("keep", ["summary", "full"])
def test_later_calls_are_recorded_as_the_first_was(tmp_path: Any, keep: str) -> None:
    """They take a shorter way: by groups of summaries, by crates of bytes."""
    torch.manual_seed(0)
    model = Repeated()
    given = [torch.randn(n, 8) for n in (3, 3, 2, 4, 2)]  # another shape, then an exception
    for pretend in (False, True):
        # Every call as it is asked for: where no steps are named, later ones are summaries.
        watching = driftline.capture(
            model, tmp_path / str(pretend), keep=keep, ports="output", steps="*"
        )
        watching.session.device_backend.pretends = pretend
        with torch.no_grad(), watching:
            for x in given:
                if len(x) == 4:
                    with pytest.raises(ValueError, match="four"):
                        model(x)
                else:
                    model(x)
    ours, theirs = (driftline.open_run(tmp_path / str(pretend)) for pretend in (False, True))
    assert len(ours.records) == 13  # the failing call had its first layer done
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert (a.key, a.order, *a[2:8]) == (b.key, b.order, *b[2:8])
        if keep == "full":
            assert a.digest == b.digest
        else:
            assert b.digest.startswith("lanes-128:")
            assert np.allclose(a.summary[:10], b.summary[:10])
            assert np.allclose(a.summary.sketch, b.summary.sketch)
    kinds = [[e["kind"] for e in made.events()] for made in (ours, theirs)]
    assert sorted(kinds[0]) == sorted(kinds[1]) and "exception" in kinds[0]


def test_equal_tensors_of_two_calls_have_equal_digests_and_others_have_not() -> None:
    model, sink = Repeated(), MemorySink()
    watching = capture(model, sink, keep="digest", ports="output")
    watching.session.device_backend.pretends = True
    x = torch.randn(3, 8)
    with torch.no_grad(), watching:
        for scale in (1.0, 1.0, 2.0):
            model(x * scale)
    by_step = [[r.digest for r in sink.run().records if r.key.step == n] for n in range(3)]
    assert by_step[0] == by_step[1] != by_step[2]


def test_tensors_without_memory_of_their_own_are_not_taken_for_ordinary_ones() -> None:
    model, sink = Repeated(), MemorySink()
    watching = capture(model, sink, keep="summary", ports="output")
    watching.session.device_backend.pretends = True
    x = torch.randn(3, 8)
    with torch.no_grad(), watching:
        model(x)
        torch.vmap(model)(x.expand(2, 3, 8))
    made = sink.run()
    assert {r.key.step for r in made.records} == {0}
    assert [e for e in made.events() if e["kind"] == "refused"]
    assert not [e for e in made.events() if e["kind"] == "capture-fault"]


def test_what_is_overwritten_in_place_is_kept_as_it_was() -> None:
    made = run("full")
    given = made.get(site="act", port="input", slot="input").float64()
    assert (given < 0).any() and (made.get(site="act", port="output").float64() >= 0).all()


def test_a_slow_run_makes_the_program_wait_and_nothing_is_lost() -> None:
    made = run("full", budgets=Budgets(host=256), sink=Slow(), steps=3)
    assert len(made.records) == 18 and not made.losses
    assert [e for e in made.events() if e["kind"] == "waited"]


def test_a_slow_run_drops_tensors_with_a_count_where_that_is_chosen() -> None:
    made = run("full", budgets=Budgets(host=256, when_full="drop"), sink=Slow(), steps=3)
    (said,) = [e for e in made.events() if e["kind"] == "dropped"]
    assert len(made.records) == 18
    assert len(made.losses) == said["details"]["tensors"] > 0
    assert said["details"]["bytes"] == len(made.losses) * 3 * 8 * 4
    assert "dropped" in made.losses[0].reason


def test_without_a_device_budget_tensors_are_copied_without_a_clone() -> None:
    made = run("full", budgets=Budgets(device=0))
    assert len(made.records) == 6 and not made.losses
    assert (made.get(site="act", port="input", slot="input").float64() < 0).any()


def test_a_tensor_beyond_the_host_budget_is_summarised() -> None:
    made = run("full", budgets=Budgets(host=10), ports=("output",))
    assert {r.kept for r in made.records} == {"summary"}
    assert [e for e in made.events() if e["kind"] == "too-large"]


def test_memory_that_runs_out_in_capture_leaves_summaries_and_the_program_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(100))
    plain = Transfers.open

    def scarce(self: Transfers, region: Any) -> Any:
        if next(calls) >= 2:
            raise torch.OutOfMemoryError("planted")
        return plain(self, region)

    monkeypatch.setattr(Transfers, "open", scarce)
    made = run("full", budgets=Budgets(host=700))
    assert torch.equal(made.results[0], run("full", pretend=False).results[0])
    assert [r.kept for r in made.records] == ["full"] * 2 + ["summary"] * 4
    (said,) = [e for e in made.events() if e["kind"] == "degraded"]
    assert "no memory left" in said["message"]


def test_a_machine_without_triton_goes_over_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from driftline.numerics.gpu import launcher

    monkeypatch.setattr(launcher, "why_not", lambda: "Triton is not installed")
    made = run("summary")
    assert len(made.records) == 6
    assert made.records[0].digest.startswith(("xxh3", "blake2b"))
    assert "Triton is not installed" in next(iter(made.events()))["message"]


class Lost(_Reached):
    """A mark in the work of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: planted\nfor debugging see elsewhere")


@pytest.mark.parametrize("keep", ["full", "digest"])
def test_what_a_failed_device_still_had_is_listed_as_lost_and_the_run_ends_well(
    monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    plain = HostPlace.copy_here
    calls = iter(range(100))

    def fails_later(self: HostPlace, copies: Any) -> Any:
        plain(self, copies)
        return _Reached() if next(calls) < 1 else Lost()

    monkeypatch.setattr(HostPlace, "copy_here", fails_later)
    monkeypatch.setattr(HostPlace, "is_sound", lambda _: False)
    made = run(keep, steps=3, ports=("output",))
    assert {loss.reason for loss in made.losses} == {"lost on its way: CUDA error: planted"}
    (said,) = [e for e in made.events() if e["kind"] == "device-failed"]
    assert said["details"]["tensors"] == len(made.losses) >= 3
    assert len(made.records) >= 6
    assert "capture-fault" not in [e["kind"] for e in made.events()]


def test_copies_of_our_own_are_not_taken_for_the_program_s_operators() -> None:
    def operators(pretend: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x, sink = Net(), torch.randn(3, 8), MemorySink()
        watching = capture(model, sink, levels=("modules", "ops"))
        watching.session.device_backend.pretends = pretend
        with torch.no_grad(), watching:
            for _ in range(2):
                model(x)
        assert not [e for e in sink.run().events() if e["kind"] == "capture-fault"]
        return [(r.key, r.digest) for r in sink.run().records]

    assert operators(pretend=True) == operators(pretend=False)


def test_threads_that_come_first_at_the_same_time_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = DeviceMemory.__init__

    def slow(self: DeviceMemory, *args: Any) -> None:
        time.sleep(0.05)
        plain(self, *args)

    monkeypatch.setattr(DeviceMemory, "__init__", slow)
    model, sink = Net(), MemorySink()
    watching = capture(model, sink)
    watching.session.device_backend.pretends = True
    threads = [threading.Thread(target=lambda: model(torch.randn(3, 8))) for _ in range(4)]
    with watching:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(sink.run().records) == 24 and not sink.run().losses


def test_kernels_that_cannot_be_made_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise CannotLaunch("Triton made no kernel (RuntimeError: no C compiler)")

    monkeypatch.setattr(Kernel, "__call__", fails)
    made = run("summary", steps=2)
    assert len(made.records) == 12 and all(r.summary is not None for r in made.records)
    (said,) = [e for e in made.events() if e["kind"] == "device-path"]
    assert "no C compiler" in said["message"]


def test_a_sample_for_which_there_is_no_memory_becomes_a_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scarce(*_: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.Tensor, "contiguous", scarce)
    made = run("sample(5)", ports=("output",))
    assert {r.kept for r in made.records} == {"summary"} and len(made.records) == 3
    kinds = [e["kind"] for e in made.events()]
    assert "degraded" in kinds and "capture-fault" not in kinds


def test_a_tensor_that_cannot_be_copied_whole_is_copied_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.Tensor.cpu

    def scarce(self: torch.Tensor) -> torch.Tensor:
        if self.numel() > 8:
            raise torch.OutOfMemoryError("planted")
        return plain(self)

    monkeypatch.setattr(torch.Tensor, "cpu", scarce)
    given = torch.randn(4, 6, 2).transpose(0, 1)
    assert torch.equal(snapshots._in_order(given, on_host=False), given)


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().reshape(4, 6).exp().reshape(24).exp()


def test_calls_of_one_operator_that_differ_are_described_in_the_first_step_only() -> None:
    model, sink = Reshaped(), MemorySink()
    watching = capture(model, sink, keep="summary", levels="ops", steps="*")
    device_backend = watching.session.device_backend
    device_backend.pretends = True
    described: list[int] = []
    long_way = device_backend._take

    def counted(*arguments: Any) -> bool:
        described.append(watching.session.clock.now)
        return long_way(*arguments)

    device_backend._take = counted  # type: ignore[method-assign]
    x = torch.linspace(-1, 1, 24).reshape(2, 12)
    with torch.no_grad(), watching:
        for _ in range(4):
            model(x)
    assert described and set(described) == {0}
    records = {r.key: r for r in sink.run().records}
    exponentials = [k for k in records if k.step == 3 and "exp" in k.site and k.port == "output"]
    assert {records[k].shape for k in exponentials} == {(2, 12), (4, 6), (24,)}
    for key in exponentials:
        first = records[key._replace(step=0)]
        assert (first.digest, first.shape) == (records[key].digest, records[key].shape)


def test_a_graph_that_could_not_be_recorded_leaves_capture_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a recording is under way")

    monkeypatch.setitem(places._plain, "capture_begin", fails)
    model, sink = Net(), MemorySink()
    watching = capture(model, sink)
    watching.session.device_backend.pretends = True
    with torch.no_grad(), watching:
        places._watching[:] = [watching.session.device_backend]
        with pytest.raises(RuntimeError, match="under way"):
            places._capture_begin(None)
        model(torch.randn(3, 8))
        watching.session.flush()
        assert len(sink.run().records) == 6


def test_a_forked_process_lets_its_parent_s_things_lie() -> None:
    model, sink = Net(), MemorySink()
    watching = capture(model, sink)
    device_backend = watching.session.device_backend
    device_backend.pretends = True
    with torch.no_grad(), watching:
        model(torch.randn(3, 8))
        watching.session.flush()
        parents = weakref.ref(device_backend.device_memory)
        device_backend.after_fork()  # as in the child
        assert device_backend.device_memory is None
        gc.collect()
        assert parents() is not None


def test_a_run_on_disk_is_sealed_with_everything_in_it(tmp_path: Any) -> None:
    model = Net()
    watching = driftline.capture(model, tmp_path / "run")
    watching.session.device_backend.pretends = True
    with torch.no_grad(), watching:
        for _ in range(3):
            model(torch.randn(2, 8))
    made = driftline.open_run(tmp_path / "run")
    assert len(made.records) == 18
    assert [r.order for r in made.records] == list(range(18))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_budget": -1}, "device_budget is a number of bytes"),
        ({"host_budget": "2GB"}, "host_budget is a number of bytes"),
        ({"when_full": "stop"}, "when_full is wait or drop"),
    ],
)
def test_budgets_that_cannot_be_meant_are_refused(
    tmp_path: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words), warnings.catch_warnings():
        driftline.capture(Net(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# What was taken a moment ago is not read again.

CALLS = 6  # the interpreter takes a tenth of a second for each summary
READ_ALL = {0, 1, 2, 4}


class Chain(nn.Module):
    """Every part is given what the one before returned; `between` may do something to it."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.ReLU(), nn.Identity()
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.between is not None:
            y = self.between(y)
        return self.third(self.second(y))


class Readings:
    """A run of some calls of a model, and how many tensors each call read."""

    def __init__(
        self, model: nn.Module, keep: str, mode: Any = torch.no_grad, calls: int = CALLS
    ) -> None:
        read: list[int] = []

        def counted(plain: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = plain(*args, **kwargs)
                if result is not None and result != -1:  # or there was no room: it is tried again
                    read.append(1)
                return result

            return call

        sink = MemorySink()
        self.counts: list[int] = []
        watching = capture(model, sink, keep=keep, steps="*")
        watching.session.device_backend.pretends = True
        torch.manual_seed(1)
        with pytest.MonkeyPatch.context() as patch, watching, mode():
            for kind, name in (
                (summaries.SummaryBatch, "take"),
                (summaries.SummaryBatch, "take_known"),
                (Transfers, "put"),
            ):
                if (kind is Transfers) == (keep == "full"):
                    patch.setattr(kind, name, counted(getattr(kind, name)))
            for _ in range(calls):
                before = len(read)
                model(torch.randn(3, 8))
                self.counts.append(len(read) - before)
        self.run = sink.run()
        self.values = {
            (t.key.step, t.key.site, t.key.port): t.float64() if keep == "full" else t.record.digest
            for t in self.run.tensors()
        }

    def usual(self) -> set[int]:
        """How many tensors a call reads in which not everything is read."""
        return {self.counts[call] for call in range(CALLS) if call not in READ_ALL}

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.run.events()]


@pytest.mark.parametrize("keep", ["summary", "full"])
def test_a_tensor_that_several_modules_see_is_read_once(keep: str) -> None:
    made = Readings(Chain(), keep)
    # The model's input is the first part's, each output is the next one's input; an identity
    # returns what it is given, and so does the model.
    assert len(made.values) == 8 * CALLS
    assert made.usual() == {3} and {made.counts[call] for call in READ_ALL} == {8}
    for step in range(CALLS):
        first, second, given = (
            made.values[step, site, port]
            for site, port in (("first", "output"), ("(root)", "output"), ("second", "input"))
        )
        assert np.all(first == given) and not np.all(first == second)
    assert "changed-unseen" not in made.kinds()


@pytest.mark.parametrize(
    "between",
    [lambda y: y.mul_(2), lambda y: (y.data.mul_(2), y)[1]],
    ids=["counted", "without torch's knowledge"],
)
def test_a_tensor_that_is_written_to_in_between_is_read_again(between: Any) -> None:
    made = Readings(Chain(between), "full")
    for step in range(CALLS):
        given, returned = made.values[step, "second", "input"], made.values[step, "first", "output"]
        assert np.array_equal(given, returned * 2)
    assert made.usual() == {4} and "changed-unseen" not in made.kinds()


def test_a_program_that_begins_to_write_without_torch_s_knowledge_is_noticed() -> None:
    calls: list[int] = []

    def from_call_3_on(y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 3:
            y.data.mul_(2)
        return y

    made = Readings(Chain(from_call_3_on), "summary")
    (event,) = [event for event in made.run.events() if event["kind"] == "changed-unseen"]
    assert event["details"]["site"] == "second" and event["details"]["port"] == "input"
    given, returned = made.values[5, "second", "input"], made.values[5, "first", "output"]
    assert given != returned, "the call after that is read"


def test_a_view_of_part_of_a_tensor_is_another_tensor() -> None:
    made = Readings(Chain(lambda y: y[:2]), "full")
    for step in range(CALLS):
        given, returned = made.values[step, "second", "input"], made.values[step, "first", "output"]
        assert np.array_equal(given, returned[:2])


def test_memory_that_another_tensor_had_is_read() -> None:
    """Given out again: the address and the version are those of before, the values are not."""
    arena = np.zeros(24, np.float32)

    def anew(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        tensor = torch.from_numpy(arena).view(3, 8)
        tensor.data.copy_(values)
        return tensor

    class Anew(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return anew(x)

    scales = iter([1.0] * 3 + [-1.0] * 20)
    chain = Chain(lambda y: anew(y * next(scales)))  # nothing shows in the first calls
    chain.first = Anew()  # type: ignore[assignment]
    made = Readings(chain, "full")
    for step in range(CALLS):
        given, returned = made.values[step, "second", "input"], made.values[step, "first", "output"]
        assert np.array_equal(given, returned if step < 3 else -returned)


def test_tensors_of_inference_mode_are_always_read() -> None:
    """They count no writes, so nothing shows that one is unchanged."""
    made = Readings(Chain(), "summary", torch.inference_mode, calls=4)
    assert set(made.counts) == {8}
