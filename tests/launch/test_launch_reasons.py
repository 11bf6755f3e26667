"""Why a dump is empty, decided from messages alone; and the sinks that stand before the disk."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from driftline.captures.launch.bootstrap import send_message
from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.launch.launcher import judge
from driftline.captures.launch.messages import Messages, Place, ProcessReport, read_messages
from driftline.captures.launch.outcome import Harvest
from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.errors import BadInput
from driftline.runs.memory import MemorySink
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.sinks import MOST_WAITING, Late, Limited
from driftline.runs.writer import RunWriter

PLAN = CapturePlan("/tmp/x", Selection(steps=("0",)))
NET = (Place("(root)", "Net", ""), Place("head", "Linear", "0"))


def report(**facts) -> ProcessReport:
    return ProcessReport(pid=1, **{"calls": 2, "steps_seen": (0,), "places": NET, **facts})


@pytest.mark.parametrize(
    ("messages", "plan", "reason"),
    [
        (Messages(), PLAN, "no Python process could be reached"),
        (Messages(reached=2), PLAN, "2 Python processes ran, none imported torch or paddle"),
        (Messages(too_old=("Python 3.8.1",)), PLAN, "runs on Python 3.8.1"),
        (
            Messages(reached=1, failed=("ImportError: no numpy",)),
            PLAN,
            "could not start (ImportError",
        ),
        (Messages(reached=1, started=1), PLAN, "ended before anything of it was written"),
        (Messages(1, 1, reports=(report(calls=0),)), PLAN, "no module was called"),
        (
            Messages(1, 1, reports=(report(calls=0),)),
            CapturePlan("/tmp/x", levels=("ops",)),
            "no module was called and no operator ran",
        ),
        (
            Messages(1, 1, reports=(report(steps_seen=(3, 4, 9)),)),
            PLAN,
            "steps 3-4, 9 ran, and none of them is selected",
        ),
        (
            Messages(1, 1, reports=(report(rank=0, steps_taken=(0,)),)),
            CapturePlan("/tmp/x", Selection(ranks=("1",))),
            "--rank selects none of the ranks 0",
        ),
        (
            Messages(1, 1, reports=(report(steps_taken=(0,)),)),
            CapturePlan("/tmp/x", Selection(sites=("haed",))),
            "--site 'haed' matches no module; did you mean 'head'?",
        ),
        (
            Messages(1, 1, reports=(report(steps_taken=(0,)),)),
            CapturePlan("/tmp/x", Selection(device=3)),
            "the filters left no tensor of them (device 3)",
        ),
        (
            Messages(1, 1, reports=(report(steps_taken=(0,), tensors=7),)),
            PLAN,
            "none of 7 tensors could be written",
        ),
        (
            Messages(1, 1, reports=(report(steps_taken=(0,)),)),
            CapturePlan("/tmp/x", levels=("gradients",)),
            "no backward pass came through them",
        ),
        (
            Messages(1, 1, reports=(report(steps_taken=(0,)),), frameworks=("paddle",)),
            CapturePlan("/tmp/x", types=("op",)),
            "--type op lists what torch programs do, and this one uses paddle",
        ),
        (
            Messages(1, 1, reports=(report(steps_taken=(0,)),), frameworks=("paddle",)),
            CapturePlan("/tmp/x", Selection(device=3), types=("layer",)),
            "modules were called, and the filters left no call of them (device 3)",
        ),
    ],
)
def test_the_first_thing_that_stopped_it_is_the_reason(messages, plan, reason):
    outcome = judge(plan, 0, messages, Harvest())
    assert reason in outcome.reason
    assert outcome.exit_code == 2
    assert judge(plan, 3, messages, Harvest()).exit_code == 3
    assert judge(plan, 0, messages, Harvest(tensors=1)).exit_code == 0


def test_a_plan_is_the_same_after_its_journey():
    plan = CapturePlan(
        "/tmp/x",
        Selection(sites=("a.*",), steps=("3-5",), ids=("2", "3_1"), children=False, time=2),
        Reduction("sample", 10),
        ("modules", "gradients"),
        ("tensor", "model"),
        max_bytes=7,
        tiling=True,
        log_level="error",
        command=("python", "x.py"),
    )
    assert CapturePlan.from_json(plan.to_json()) == plan
    with pytest.raises(BadInput, match="schema 9"):
        CapturePlan.from_json(plan.to_json().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(BadInput, match="no JSON"):
        CapturePlan.from_json("{")
    with pytest.raises(BadInput, match="no level 'modles'"):
        CapturePlan("/tmp/x", levels=("modles",))


def test_a_mark_cut_short_is_passed_over(tmp_path):
    (tmp_path / "messages").mkdir()
    plan = str(tmp_path / "plan.json")
    send_message(plan, "reached", "")
    send_message(plan, "started", "")
    send_message(plan, "report", report(notes=("a note",)).to_json())
    send_message(plan, "report", report().to_json()[:20])
    messages = read_messages(tmp_path / "messages")
    assert (messages.reached, messages.started, len(messages.reports)) == (1, 1, 1)
    assert messages.reports[0] == report(notes=("a note",))
    assert messages.places == set(NET)


def tensor(step: int, number: int = 0) -> tuple[Record, np.ndarray]:
    values = np.full(64, step * 7 + number, np.uint8)
    return Record(TensorKey.of(f"m{number}", "output", step=step), 0, "uint8", (64,)), values


def test_events_of_a_program_that_never_computes_take_bounded_memory():
    late = Late(MemorySink)
    for number in range(MOST_WAITING + 10):
        late.event("warning", str(number))
    assert [message for _, message in late.waiting_events] == [str(n) for n in range(MOST_WAITING)]


def test_a_late_sink_is_made_once_and_gets_what_was_said_before():
    made: list[MemorySink] = []

    def make() -> MemorySink:
        made.append(MemorySink())
        return made[-1]

    late = Late(make)
    late.event("early", "before any tensor")
    late.topology({"roots": []})
    late.step_done(0)
    late.close()
    assert not made and late.waiting_events == [("early", "before any tensor")]
    threads = [threading.Thread(target=late.put, args=tensor(0, i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and made[0].tensors_written == 8
    assert not late.waiting_events
    late.forget()
    late.put(*tensor(1))
    assert len(made) == 2


def test_a_limited_sink_ends_with_the_step_that_met_the_limit():
    said: list[str] = []
    inner = MemorySink()
    limited = Limited(inner, limit=200, say=said.append)
    for step in range(4):
        for number in range(2):
            limited.put(*tensor(step, number))
        if step == 0:
            limited.event("estimate", "the first step", steps=4)
    run = inner.run()
    assert {record.key.step for record in run.records} == {0, 1}
    assert said == [
        "the first step takes 128 bytes of the limit of 200 bytes; "
        "all 4 selected steps would take about 512 bytes; the limit holds about 1 step"
    ]


def test_parameters_that_are_there_already_do_not_meet_the_limit(tmp_path):
    said: list[str] = []
    writer = RunWriter(tmp_path / "run", max_bytes=400)
    limited = Limited(writer, limit=400, say=said.append)
    weight = np.arange(192, dtype=np.uint8)
    for step in range(3):
        key = TensorKey.of("m/aten.mm", "param", "mat2", step=step)
        limited.put(Record(key, 0, "uint8", (192,)), weight)
        limited.put(*tensor(step))
        if step == 0:
            limited.event("estimate", "the first step", steps=2, once=192)
    limited.close()
    steps = [record.key.step for record in open_run(tmp_path / "run").records if not record.lost]
    assert steps == [0, 0, 1, 1, 2, 2]
    assert said == [
        "the first step takes 256 bytes of the limit of 400 bytes; "
        "all 2 selected steps would take about 320 bytes; the limit holds about 3 steps"
    ]


def test_a_first_step_beyond_the_limit_is_not_said_to_fit():
    said: list[str] = []
    limited = Limited(MemorySink(), limit=100, say=said.append)
    for number in range(2):
        limited.put(*tensor(0, number))
    limited.event("estimate", "the first step", steps=1)
    assert said == ["the first step does not fit into the limit of 100 bytes"]
