"""Views pass on every member of the run behind them, and facts survive being written and read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from driftline.alignment.normalise.pipeline import is_compiled, keeps_graphs
from driftline.alignment.normalise.view import AlignedView, resolve_views
from driftline.alignment.plan import Pair, Plan
from driftline.runs.facts import ProcessFacts, RunFacts
from driftline.runs.layout import GRAPHS
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Loss, Run
from driftline.runs.views import NarrowedRun, RunView, narrowed, only

FROM_RECORDS = {"tensors", "sites", "get"}
"""Members of `Run` that say nothing but what the records say; a view has records of its own."""
WITHOUT_ANSWER = {"release", "release_some"}
CHANGED: dict[type[Run], set[str]] = {
    NarrowedRun: {"records", "losses"},
    AlignedView: {"records", "read_ahead"},
}
"""What a view changes on purpose."""


def _record(site: str = "a", *, rank: int = 0, step: int = 0, order: int = 0) -> Record:
    return Record(TensorKey.of(site, "output", rank=rank, step=step), order, "float32", (2,))


class _Marked(Run):
    """A run each of whose members answers with something that only it can answer."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.name = "marked"
        self.opened = "opened as marked"
        self.fetched = True
        self._records = records
        self.asked: list[tuple[str, tuple[object, ...]]] = []

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    def raw(self, record: Record) -> Any:
        return self._answer("raw", record)

    def _answer(self, name: str, *given: object) -> Any:
        self.asked.append((name, given))
        return (name, *given)


def _answering(name: str) -> Callable[..., Any]:
    return lambda self, *given: self._answer(name, *given)


PUBLIC = sorted(name for name in dir(Run) if not name.startswith("_"))
METHODS = [name for name in PUBLIC if inspect.isfunction(getattr(Run, name))]
PROPERTIES = [name for name in PUBLIC if isinstance(getattr(Run, name), property)]
ATTRIBUTES = [name for name in PUBLIC if name not in METHODS and name not in PROPERTIES]

for _name in METHODS:
    if _name not in FROM_RECORDS | {"raw"}:
        setattr(_Marked, _name, _answering(_name))
for _name in PROPERTIES:
    if _name not in ("records", "ordered"):
        setattr(_Marked, _name, property(_answering(_name)))
_Marked.facts = property(lambda self: RunFacts("marked", order="none"))  # type: ignore[assignment]

VIEWS: dict[type[RunView], Callable[[Run], RunView]] = {
    RunView: RunView,
    NarrowedRun: lambda run: NarrowedRun(run, run.records),
    AlignedView: lambda run: AlignedView(run, run.records, {}),
}


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        pytest.param(kind, member, id=f"{kind.__name__}.{member}")
        for kind in VIEWS
        for member in PUBLIC
        if member not in FROM_RECORDS | CHANGED.get(kind, set())
    ],
)
def test_a_view_passes_on_every_member_of_a_run(kind: type[RunView], member: str) -> None:
    record = _record()
    run = _Marked([record])
    view = VIEWS[kind](run)
    answer = getattr(view, member)
    if member not in METHODS:
        assert answer == getattr(run, member)
        return
    wanted = list(inspect.signature(getattr(Run, member)).parameters.values())[1:]
    kinds = {"record": record, "start": 1, "stop": 2, "name": "calls.csv", "rank": 0, "process": 0}
    given = [kinds[parameter.name] for parameter in wanted]
    assert answer(*given) == (None if member in WITHOUT_ANSWER else (member, *given))
    assert run.asked == [(member, tuple(given))]


def test_the_walk_sees_the_members_that_were_lost_before() -> None:
    assert {"processes", "events", "window", "release", "source"} <= set(METHODS)
    assert {"facts", "manifest", "growing", "losses", "ordered"} <= set(PROPERTIES)
    assert {"name", "opened", "fetched"} == set(ATTRIBUTES)


class _Job(Run):
    """Ranks that leave different things beside their tensors."""

    def __init__(
        self,
        records: Sequence[Record],
        trees: Mapping[int, Mapping[str, Any]] | None = None,
        sheets: Mapping[int, list[str]] | None = None,
    ) -> None:
        self.name = "job"
        self._records = records
        self._trees = trees or {}
        self._sheets = sheets or {}

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def losses(self) -> Sequence[Loss]:
        return [Loss("file", "gone", record.key) for record in self._records] + [Loss("x", "y")]

    def raw(self, record: Record) -> Any:
        return record.key.rank

    def topology(self, rank: int = 0, process: int = 0) -> Any:
        return self._trees.get(rank)

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        return self._sheets.get(rank, [])


def test_a_narrowed_run_lists_the_losses_of_its_own_tensors_and_of_the_run() -> None:
    run = _Job([_record(rank=0), _record(rank=1)])
    view = narrowed(run, ranks=(1,))
    assert [loss.key and loss.key.rank for loss in view.losses] == [1, None]
    assert [loss.key for loss in only(run, lambda record: False).losses] == [None]


def test_every_process_is_asked_whether_it_has_graphs_of_a_compiler() -> None:
    records = [_record(rank=0), _record(rank=1)]
    late = _Job(records, {0: {}, 1: {"graphs": ["g"]}}, {1: [GRAPHS]})
    assert is_compiled(late)
    assert keeps_graphs(late)
    plain = _Job(records, {0: {}, 1: {"order": []}}, {1: ["calls.csv"]})
    assert not is_compiled(plain)
    assert not keeps_graphs(plain)


def test_what_lies_beside_a_renumbered_rank_is_that_of_the_rank_itself() -> None:
    run = _Job([_record(rank=1), _record(rank=2)], {1: {"of": 1}, 2: {"of": 2}}, {2: ["calls.csv"]})
    seen = [_record(rank=0), _record(rank=1)]
    origins = {new.key: old for new, old in zip(seen, run.records, strict=True)}
    view = AlignedView(run, seen, origins)
    assert [view.topology(0), view.topology(1)] == [{"of": 1}, {"of": 2}]
    assert [view.sheets(0), view.sheets(1)] == [[], ["calls.csv"]]
    assert [view.raw(record) for record in seen] == [1, 2]


def test_a_plan_of_views_keeps_all_that_was_said_of_pairs_and_lone_tensors() -> None:
    """Steps are renumbered on the candidate's side: step 0 of the view is step 5 of the run."""
    ours = [_record("a"), _record("b"), _record("lone")]
    stored = [_record("a", step=5), _record("b", step=5), _record("more", step=5)]
    seen = [record._replace(key=record.key._replace(step=0)) for record in stored]
    reference = _Job(ours)
    candidate = AlignedView(
        _Job(stored), seen, {new.key: old for new, old in zip(seen, stored, strict=True)}
    )
    pair = Pair(ours[0], seen[0], "graph", 0.9, line="m.py:3", fused="mul, add", culprit="mul")
    plan = Plan(
        (pair,),
        (ours[2],),
        (seen[2],),
        lone_lines={("candidate", seen[2].key): "m.py:7", ("reference", ours[2].key): "m.py:8"},
        inside={("reference", ours[2].key): seen[1].key, ("candidate", seen[2].key): ours[1].key},
    )
    real = resolve_views(plan, reference, candidate)
    assert real.pairs == (pair._replace(candidate=stored[0]),)
    assert real.lone_lines == {
        ("candidate", stored[2].key): "m.py:7",
        ("reference", ours[2].key): "m.py:8",
    }
    assert real.inside == {
        ("reference", ours[2].key): stored[1].key,
        ("candidate", stored[2].key): ours[1].key,
    }


def test_facts_that_were_written_are_read_again() -> None:
    place = ProcessFacts(1, 0, 2, ({"names": ["tp"]},), ([0, 1],), ({"stage": 1, "of": 2},))
    facts = RunFacts("paddle", ("hook",), "registration", "micro-batch", True, False, (place,))
    again = RunFacts.from_json({**facts.to_json()}, [place.to_json()])
    assert again == facts
    copied = {**facts.of_process(1, 0), "rank": 1, "process": 0, "world_size": 2}
    assert RunFacts.from_json({"format": "driftline-run"}, [copied]) == facts._replace(
        formats=("driftline-run", "hook")
    )


@pytest.mark.parametrize(
    ("said", "framework"),
    [
        ("transformers", "torch"),
        ("pytorch", "torch"),
        ("PaddlePaddle", "paddle"),
        ("onnxruntime", "onnxruntime"),
        (None, ""),
    ],
)
def test_frameworks_are_called_by_one_name_each(said: str | None, framework: str) -> None:
    assert RunFacts.from_json({"framework": said}).framework == framework
    assert RunFacts.from_json({}, [{"rank": 0}, {"rank": 1, "framework": said}]).framework == (
        framework
    )


def test_facts_that_cannot_be_believed_are_as_if_not_said() -> None:
    wrong = {"rank": "x", "process": -1, "world_size": 1 << 40, "meshes": {}, "stages": [3, {}]}
    wrong |= {"order": ["none"], "step_unit": 7, "numbered_names": "yes", "formats": "x"}
    facts = RunFacts.from_json({}, [wrong])
    assert facts.processes == (ProcessFacts(0, 0, stages=(3, {})),)
    assert (facts.stages, facts.world, facts.order, facts.step_unit) == ({}, 0, "execution", "")
    assert not facts.numbered_names
    assert facts.formats == ()


def test_what_a_run_was_converted_from_is_told_by_runs_of_0_1_0_too() -> None:
    run = {"converted_from": {"format": "atb", "path": "x"}, "rank": 0}
    assert RunFacts.from_json({"format": "driftline-run"}, [run]).tiled
    files = RunFacts.from_json({"format": "files", "converted_from": "ge-dump: x"})
    assert (files.tiled, files.first_format) == (True, "ge-dump")
    assert not RunFacts.from_json({"format": "npy"}).tiled
