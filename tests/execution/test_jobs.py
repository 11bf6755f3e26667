"""`compare --jobs`: the table of one process, whoever does the work; and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_runs import Here, write_run, written

import driftline
from driftline.comparison.measure import distribute
from driftline.comparison.measure.distribute import pair_from_plain, pair_to_plain
from driftline.errors import BadInput, BadRun
from driftline.execution import codec
from driftline.execution.jobs import Job, Task, WorkerFailed, chosen
from driftline.execution.processes import Processes
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of

SLOW_METRIC = "import time\ndef slow(r, c):\n    r.size > 1 and time.sleep(0.3)\n    return 0.0\n"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    place = tmp_path_factory.mktemp("two")
    write_run(place / "ref", 0.0, ranks=2)
    write_run(place / "cand", 1e-3, ranks=2)
    return place


def test_processes_give_the_table_of_one_process_byte_for_byte(two, monkeypatch):
    monkeypatch.chdir(two)  # paths in reasons are those that were typed
    one = written(driftline.compare("ref", "cand"), two / "one")
    many = written(driftline.compare("ref", "cand", jobs=3), two / "many")
    assert many == one


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    workers=st.integers(1, 40),
    far=st.booleans(),
    metrics=st.sampled_from([(), ("kl",)]),
    shapes=st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=12),
)
def test_whatever_the_shapes_and_workers_the_table_is_the_same(
    tmp_path, workers, far, metrics, shapes, monkeypatch
):
    monkeypatch.setattr(distribute, "_LEAST", 1)
    place = tmp_path / str(time.monotonic_ns())
    rng = np.random.default_rng(len(shapes))
    for name in ("ref", "cand"):
        writer = RunWriter(place / name, seal_at_exit=False)
        for at, shape in enumerate(shapes):
            dtype = (np.float32, np.float16, np.float64)[at % 3]
            record_into(writer, f"t{at}", rng.standard_normal(shape).astype(dtype))
        writer.close()
    who = Here(workers, elsewhere=far)
    one = driftline.compare(place / "ref", place / "cand", metrics=metrics)
    other = driftline.compare(place / "ref", place / "cand", metrics=metrics, executor=who)
    assert written(other, place / "other") == written(one, place / "one")
    assert len(who.tasks) >= min(workers, len(shapes)) // 2


def test_the_same_bytes_are_sent_once(two):
    who = Here()
    table = driftline.compare(two / "ref", two / "cand", executor=who)
    sent = sum(len(task.content()) for task in who.tasks)
    again = sum(row.key.site.endswith(".again") for row in table.rows)
    alone = sum(row.status in ("missing", "extra") for row in table.rows)
    assert again == 24
    assert sent == len(table.rows) - alone - again


@pytest.fixture
def sharded(tmp_path):
    """One rank against two that hold half of each tensor: pairs with recipes."""
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((8, 16)).astype(np.float32) for _ in range(3)]
    write_ranks(tmp_path / "ref", [whole])
    write_ranks(tmp_path / "cand", [[part[:, :8] for part in whole], [p[:, 8:] for p in whole]])
    return tmp_path


def write_ranks(place, ranks):
    for rank, tensors in enumerate(ranks):
        writer = RunWriter(place, rank=rank, world_size=len(ranks), seal_at_exit=False)
        for at, values in enumerate(tensors):
            record_into(writer, TensorKey.of(f"layers.{at}", "output", rank=rank), values)
        writer.close()


def test_a_pair_with_a_recipe_arrives_as_it_was(sharded):
    plan = driftline.align(sharded / "ref", sharded / "cand", placements=["*=shard(1)"])
    assert any(pair.candidate_recipe is not None for pair in plan.pairs)
    for pair in plan.pairs:
        assert pair_from_plain(codec.unpack(codec.pack(pair_to_plain(pair)))) == pair


@pytest.mark.parametrize("far", [False, True])
def test_recipes_are_carried_out_by_workers(sharded, far):
    words = {"placements": ["*=shard(1)"]}
    plain = driftline.compare(sharded / "ref", sharded / "cand", **words)
    who = Here(elsewhere=far)
    shared = driftline.compare(sharded / "ref", sharded / "cand", executor=who, **words)
    assert written(shared, sharded / "a") == written(plain, sharded / "b")
    assert plain.verdict == "pass" and "concat" in plain.rows[0].candidate_recipe
    if far:
        assert who.tasks[0].needs == ("0:0:0", "1:0:0", "1:1:0")


def test_a_name_that_is_no_text_goes_to_a_worker_too():
    odd = {"name": "weight\udcff", "number": float("inf")}
    assert codec.unpack(codec.pack(odd)) == odd


def test_floats_arrive_with_all_their_bits():
    values = [0.1, 5e-324, -0.0, float("inf"), 1 / 3, 2**62]
    assert [repr(v) for v in codec.unpack(codec.pack(values))] == [repr(v) for v in values]


def test_runs_in_memory_are_compared_here_but_not_on_other_machines():
    ours, theirs = run_of({"a": np.ones(4)}), run_of({"a": np.ones(4)})
    assert driftline.compare(ours, theirs, jobs=2).verdict == "pass"
    with pytest.raises(BadInput, match="in the memory of this process"):
        driftline.compare(ours, theirs, executor=Here(elsewhere=True))


def test_a_metric_from_a_file_is_measured_by_workers(two, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("print('noise')\ndef own(r, c):\n    return float(abs(r - c).sum())\n")
    word = f"{own}:own"
    one = driftline.compare(two / "ref", two / "cand", metrics=[word], sites=["layers.*"])
    many = driftline.compare(two / "ref", two / "cand", metrics=[word], sites=["layers.*"], jobs=2)
    assert many == one
    assert "own" in many.rows[0].metrics


def test_a_few_small_pairs_with_a_metric_of_ones_own_are_shared_out_too(two, tmp_path):
    """It may take a second for each: that they are few bytes says nothing."""
    own = tmp_path / "own.py"
    own.write_text("def own(r, c):\n    return 0.0\n")
    told = {}
    for metrics in ([], [f"{own}:own"]):
        here = Here(2)
        driftline.compare(two / "ref", two / "cand", metrics=metrics, executor=here)
        told[len(metrics)] = len(here.tasks)
    assert told[0] <= 2 and told[1] > 8, told


def test_what_a_worker_raises_for_users_is_raised_here(tmp_path):
    with pytest.raises(BadRun, match=r"there is no '.*nowhere'"):
        _one_task(Job("pairs", _about(tmp_path / "nowhere"), ""), [])


def _about(path):
    return {
        "paths": [str(path)] * 2,
        "names": ["a", "b"],
        "probes": [],
        "metrics": [],
        "threads": 1,
        "elementwise": [],
    }


def _one_task(job, work):
    found = []
    Processes(2).run(job, [Task(work, called="a pair")], lambda at, answer: found.append(answer))
    return found


def test_a_bug_in_a_worker_is_a_sentence(tmp_path):
    write_run(tmp_path / "run", 0.0, layers=1)
    with pytest.raises(WorkerFailed, match="a worker failed at a pair: "):
        _one_task(Job("pairs", _about(tmp_path / "run"), ""), [["nonsense"]])


def test_a_worker_that_is_killed_twice_by_one_task_is_a_sentence(two, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import os\ndef own(r, c):\n    r.size > 1 and os.kill(os.getpid(), 9)\n    return 0\n"
    )
    with pytest.raises(WorkerFailed, match=r"ended by SIGKILL at rank./step0/layers\.0/\S+, 2"):
        driftline.compare(
            two / "ref", two / "cand", metrics=[f"{own}:own"], jobs=2, sites=["layers.0"]
        )


def test_a_worker_that_is_killed_once_is_replaced(two, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import os, pathlib\n"
        "def own(r, c):\n"
        f"    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "    if r.size > 1 and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return 0\n"
    )
    many = driftline.compare(two / "ref", two / "cand", metrics=[f"{own}:own"], jobs=2)
    assert (tmp_path / "mark").exists()
    one = driftline.compare(two / "ref", two / "cand", metrics=[f"{own}:own"])
    assert written(many, two / "many") == written(one, two / "one")


@pytest.mark.parametrize("words", [{"jobs": 0}, {"jobs": -3}, {"executor": "rya"}])
def test_nobody_to_do_the_work_is_refused(words):
    with pytest.raises(BadInput):
        chosen(**words)


def test_one_job_is_this_process():
    assert chosen(1) is None
    assert chosen(None, "local") is None


def _children(pid):
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == pid:
                found.append(int(place.name))
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_killed_command_leave_no_worker_behind(two, tmp_path, how):
    (tmp_path / "own.py").write_text(SLOW_METRIC)
    words = ["compare", "ref", "cand", "--jobs", "2", "--metric", f"{tmp_path}/own.py:slow"]
    command = subprocess.Popen(
        [sys.executable, "-m", "driftline", *words],
        cwd=two,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that were started in the background are deaf to it, and so are their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    workers = []
    give_up = time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < give_up:
        time.sleep(0.05)
        workers = _children(command.pid)
    assert len(workers) == 2
    command.send_signal(how)
    _, said = command.communicate(timeout=60)
    if how == signal.SIGINT:
        assert command.returncode == 130
        assert said.strip() == "driftline: interrupted"
    give_up = time.monotonic() + 60
    while any(_alive(pid) for pid in workers) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid):
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
