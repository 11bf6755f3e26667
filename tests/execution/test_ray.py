"""`--executor ray`: a real cluster of two nodes gives the table of one process, come what may."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from written_runs import write_run, written

import driftline
from driftline.errors import BadInput, DriftlineError
from driftline.execution.jobs import Task, WorkerFailed
from driftline.execution.ray_cluster import RayCluster
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

ray = pytest.importorskip("ray")

SLOW_METRIC = (
    "import time\ndef slow(r, c):\n    r.size > 1 and time.sleep(0.05)\n    return float(r.size)\n"
)


def free_port():
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return line.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes, each with a core, as processes of this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80 << 20,
        },
    )
    try:
        found.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    place = tmp_path_factory.mktemp("two")
    write_run(place / "ref", 0.0, ranks=2)
    write_run(place / "cand", 1e-3, ranks=2)
    (place / "own.py").write_text(SLOW_METRIC)
    return place


@pytest.fixture
def joined(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return cluster


def finely(monkeypatch):
    """Many tasks, of a pair or two each."""
    from driftline.comparison.measure import distribute

    monkeypatch.setattr(distribute, "_LEAST", 1)


def test_two_nodes_give_the_table_of_one_process_byte_for_byte(two, joined, monkeypatch):
    finely(monkeypatch)
    monkeypatch.chdir(two)
    told = []
    one = written(driftline.compare("ref", "cand"), two / "one")
    done = []
    table = driftline.compare(
        "ref",
        "cand",
        executor=RayCluster(tell=told.append),
        progress=lambda *said: done.append(said),
    )
    assert written(table, two / "many") == one
    assert not told
    assert len(done) > 10 and done[-1][0] == done[-1][1]  # streamed, not all at the end
    assert done == sorted(done)
    assert not ray.is_initialized()  # what was connected for it is let go


def workers_of(cluster):
    """Processes of this cluster's workers that do our tasks."""
    raylets = {
        info.process.pid
        for node in cluster.list_all_nodes()
        for infos in node.all_processes.values()
        for info in infos
    }
    found = []
    for place in Path("/proc").iterdir():
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            title = (place / "cmdline").read_bytes().decode()
        except (OSError, ValueError, NotADirectoryError):
            continue
        if parent in raylets and title.startswith("ray::RayWorker"):
            found.append(int(place.name))
    return sorted(found)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_loses_nothing_and_nothing_counts_twice(
    two, joined, monkeypatch
):
    finely(monkeypatch)
    word = f"{two}/own.py:slow"
    one = driftline.compare(two / "ref", two / "cand", metrics=[word])
    told, done, killed = [], [], []

    def progress(now, total):
        done.append(now)
        if len(done) in (3, 12):
            victim = workers_of(joined)[0]
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    table = driftline.compare(
        two / "ref",
        two / "cand",
        metrics=[word],
        executor=RayCluster(tell=told.append),
        progress=progress,
    )
    assert len(killed) == 2
    assert written(table, two / "many") == written(one, two / "one")
    assert sum("is lost; its work is done again" in line for line in told) == 2
    pairs = sum(row.status not in ("missing", "extra") for row in one.rows)
    assert done[-1] == pairs and done == sorted(set(done))


@pytest.mark.slow
def test_a_node_that_goes_in_the_middle_loses_nothing(two, joined, monkeypatch, capfd):
    finely(monkeypatch)
    word = f"{two}/own.py:slow"
    one = driftline.compare(two / "ref", two / "cand", metrics=[word])
    third = joined.add_node(num_cpus=1, object_store_memory=80 << 20)
    told, done = [], []

    def progress(now, total):
        done.append(now)
        if len(done) == 4:
            joined.remove_node(third, allow_graceful=False)

    table = driftline.compare(
        two / "ref",
        two / "cand",
        metrics=[word],
        executor=RayCluster(tell=told.append),
        progress=progress,
    )
    assert written(table, two / "many") == written(one, two / "one")
    assert any(" is gone; its" in line or " is lost; its" in line for line in told), told
    assert done == sorted(set(done))
    assert not capfd.readouterr().out  # Ray's own stories are not among the results


@pytest.mark.slow
def test_a_task_that_kills_every_worker_ends_in_a_sentence(two, joined, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import os\ndef own(r, c):\n    r.size > 1 and os.kill(os.getpid(), 9)\n    return 0\n"
    )
    with pytest.raises(WorkerFailed, match=r"4 workers were lost at rank./step0/square/output/0"):
        driftline.compare(
            two / "ref",
            two / "cand",
            metrics=[f"{own}:own"],
            sites=["square"],
            executor=RayCluster(tell=lambda line: None),
        )


def blind_node(cluster, hidden):
    """A node that cannot see a folder: something else is mounted there, for its processes only."""
    script = f"mount -t tmpfs none {hidden} && exec {sys.executable} -c '{START}' {cluster.address}"
    node = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    if node.stdout is None or node.stdout.readline().strip() != "up":
        os.killpg(node.pid, signal.SIGKILL)
        pytest.skip("no second view of the file system can be made here")
    return node


START = (
    "import sys, time;"
    "from ray.cluster_utils import Cluster;"
    "import ray._private.node, ray._private.parameter;"
    "p = ray._private.parameter.RayParams(num_cpus=1, object_store_memory=80 << 20,"
    "gcs_address=sys.argv[1], node_ip_address=sys.argv[1].split(chr(58))[0],"
    "include_log_monitor=False);"
    "n = ray._private.node.Node(p, head=False, shutdown_at_exit=True, spawn_reaper=True);"
    "print(chr(117) + chr(112), flush=True);"
    "time.sleep(600)"
)


def about_data(told):
    """Without the node that another test has ended: it is listed until Ray notices, later."""
    return [line for line in told if ": is gone; it is given no such work" not in line]


@pytest.mark.slow
def test_a_node_without_the_data_is_named_with_its_path_and_left_out(two, joined, monkeypatch):
    finely(monkeypatch)
    node = blind_node(joined, two)
    try:
        told = []
        table = driftline.compare(two / "ref", two / "cand", executor=RayCluster(tell=told.append))
        one = driftline.compare(two / "ref", two / "cand")
        assert written(table, two / "many") == written(one, two / "one")
        (said,) = about_data(told)
        assert "node " in said and f"there is no '{two / 'ref'}'" in said
        assert said.endswith("it is given no such work")
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(60)


@pytest.mark.slow
def test_a_node_with_some_of_the_ranks_is_given_their_work_only(two, joined, monkeypatch):
    finely(monkeypatch)
    (hidden,) = (two / "ref").glob("rank*1")
    node = blind_node(joined, hidden)
    try:
        told = []
        who = RayCluster(tell=told.append)
        table = driftline.compare(two / "ref", two / "cand", executor=who)
        one = driftline.compare(two / "ref", two / "cand")
        assert written(table, two / "many") == written(one, two / "one")
        (said,) = about_data(told)
        assert f"cannot read '{two / 'ref'}': " in said and said.endswith("no such work")
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(60)


def machine(name, cores=1, absent=()):
    from driftline.execution.ray_cluster import _Machine

    return _Machine({"NodeID": name}, name, absent, cores)


def round_of(tasks, machines):
    """What chooses tasks, without a cluster."""
    from driftline.execution.jobs import Job
    from driftline.execution.ray_cluster import _Round

    class Nobody:
        class ray:
            put = staticmethod(lambda content: content)

    found = _Round(Nobody(), Job("pairs", {}, ""), tasks, None, print)
    found.machines = machines
    return found


def test_a_machine_goes_on_with_the_files_it_has_begun_and_leaves_others_theirs():
    tasks = [Task([], 100, near=f"0:{rank}:0", called=f"{rank}") for rank in (0, 1, 2) * 4]
    one, other = machine("one"), machine("other")
    work = round_of(tasks, [one, other])
    given = {"one": [], "other": []}
    for _ in range(6):
        for who in (one, other):
            given[who.name].append(work._choose(who))
    places = {name: [tasks[at].near for at in got] for name, got in given.items()}
    assert places["one"][:4] == ["0:0:0"] * 4 and places["other"][:4] == ["0:1:0"] * 4
    assert sorted(given["one"] + given["other"]) == list(range(12))
    assert work._choose(one) is None and not work.waiting


def test_a_machine_is_given_nothing_that_it_has_no_data_for():
    tasks = [Task([], 1, needs=(place,)) for place in ("0:0:0", "1:3:0", "0:0:0")]
    blind = machine("blind", absent=[("1:3:0", "cannot read it")])
    work = round_of(tasks, [blind])
    assert [work._choose(blind) for _ in range(3)] == [0, 2, None]


def test_a_machine_without_the_runs_is_given_no_summaries_either(tmp_path):
    """Of summaries no byte is read, but a worker opens the runs it is sent something of."""
    from written_runs import Here

    from driftline.execution.jobs import open_worker

    for name in ("ref", "cand"):
        writer = RunWriter(tmp_path / name, seal_at_exit=False)
        record_into(writer, "site", np.ones(8, np.float32), keep="summary")
        writer.close()
    here = Here(elsewhere=True)
    driftline.compare(tmp_path / "ref", tmp_path / "cand", executor=here)
    (job,), (task,) = here.jobs, here.tasks
    assert open_worker(job.worker, job.about).absent() == []
    (tmp_path / "ref").rename(tmp_path / "moved")
    absent = open_worker(job.worker, job.about).absent()
    assert [place for place, _ in absent] == ["0:0:0"] and "there is no '" in absent[0][1]
    assert not machine("blind", absent=absent).can(task)


@pytest.mark.slow
def test_operators_and_shapes_are_shared_out_on_a_cluster(two, joined, tmp_path):
    from test_shared_work import MINI, asks, files_of, same, shapes

    from driftline.decoding.metrics import run_shapes
    from driftline.decoding.validate import validate_shapes
    from driftline.operators.api import check

    dump = next(path for path in sorted(MINI.iterdir()) if path.is_dir())
    same(check(dump), check(dump, executor="ray"))
    one = validate_shapes(asks(), report=lambda line: None)
    other = validate_shapes(asks(), report=lambda line: None, executor="ray")
    for here, there in zip(one, other, strict=True):
        same(here._replace(seconds=0.0), there._replace(seconds=0.0))
    run_shapes(shapes(tmp_path / "one"), report=lambda line: None)
    run_shapes(shapes(tmp_path / "other"), report=lambda line: None, executor="ray")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")


@pytest.mark.slow
def test_data_that_no_node_has_is_a_sentence_that_names_nodes_and_path(tmp_path):
    """This process sees the run in a way of its own; the only node does not."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    hidden = tmp_path / "data"
    hidden.mkdir()
    search = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, program, hidden],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
    )
    if "cannot mount" in ran.stdout:
        pytest.skip("no second view of the file system can be made here")
    said = ran.stdout.strip().splitlines()[-1]
    assert said.startswith("no machine of the Ray cluster has the data: node "), ran.stdout
    assert f"there is no '{hidden / 'ref'}'" in said


PROGRAM = """
import ctypes, os, sys
from pathlib import Path
import driftline
from ray.cluster_utils import Cluster
from written_runs import write_run
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20})
try:
    # From here on this process has a file system of its own; the cluster keeps the old one.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None) or libc.mount(
            b"none", sys.argv[1].encode(), b"tmpfs", 0, None):
        print("cannot mount")
        sys.exit()
    place = Path(sys.argv[1])
    write_run(place / "ref", 0.0, layers=2)
    write_run(place / "cand", 1e-3, layers=2)
    os.environ["RAY_ADDRESS"] = cluster.address
    driftline.compare(place / "ref", place / "cand", executor="ray")
except driftline.errors.DriftlineError as refused:
    print(refused)
finally:
    cluster.shutdown()
"""


@contextlib.contextmanager
def client_server(cluster, **surroundings):
    """What `ray start --head` opens on port 10001."""
    pytest.importorskip("grpc")
    port = free_port()
    words = [f"--address={cluster.address}", "--host=127.0.0.1", f"--port={port}", "--mode=proxy"]
    server = subprocess.Popen(
        [sys.executable, "-m", "ray.util.client.server", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **surroundings},
    )
    try:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"ray://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.mark.slow
def test_a_cluster_elsewhere_is_reached_through_its_client_server(two, cluster, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one = driftline.compare(two / "ref", two / "cand")
    with client_server(cluster) as address:
        table = driftline.compare(two / "ref", two / "cand", executor=address, jobs=2)
    assert written(table, two / "many") == written(one, two / "one")
    assert not ray.is_initialized()


DIES = """
import os, signal, subprocess
from pathlib import Path
left = Path({left!r})
begin = subprocess.Popen.__init__
def begins(self, command, *rest, **words):
    if "--mode=specific-server" in command and (times := int(left.read_text())):
        left.write_text(str(times - 1))
        words["preexec_fn"] = lambda: os.kill(os.getpid(), signal.SIGSEGV)
    begin(self, command, *rest, **words)
subprocess.Popen.__init__ = begins
"""


@pytest.mark.slow
def test_a_session_that_dies_as_it_is_made_is_asked_for_again(two, cluster, tmp_path, monkeypatch):
    """The process that Ray forks for a client may crash in gRPC: not ours, and not for users."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    left = tmp_path / "left"
    (tmp_path / "sitecustomize.py").write_text(DIES.format(left=str(left)))
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    one = driftline.compare(two / "ref", two / "cand")
    left.write_text("1")
    with client_server(cluster, PYTHONPATH=search) as address:
        table = driftline.compare(two / "ref", two / "cand", executor=address, jobs=1)
    assert written(table, two / "many") == written(one, two / "one")
    assert left.read_text() == "0"
    assert not ray.is_initialized()


def test_a_session_that_always_dies_is_refused_with_what_ray_says_of_it():
    from driftline.execution import ray_connection

    tries = []

    def init():
        tries.append(1)
        why = "  File 'proxier.py', line 772\nRuntimeError: Starting Ray client server failed. See"
        raise ConnectionAbortedError(f"Initialization failure from server:\nTraceback:\n{why}\n")

    with pytest.raises(DriftlineError, match="refuses: RuntimeError: Starting Ray client server f"):
        ray_connection._bounded(init, "ray://head:10001")
    assert len(tries) == 3


def test_an_address_where_nobody_is_is_refused_at_once(two, monkeypatch):
    from driftline.execution import ray_connection

    monkeypatch.setattr(ray_connection, "_ANSWER_SECONDS", 90.0)  # which it must not wait for
    began = time.monotonic()
    port = free_port()
    with pytest.raises(DriftlineError, match=rf"no Ray cluster at ray://127.0.0.1:{port}: conn"):
        driftline.compare(two / "ref", two / "cand", executor=f"ray://127.0.0.1:{port}")
    assert time.monotonic() - began < 60


def test_a_stale_address_in_the_environment_is_refused_at_once(two, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(DriftlineError, match="there is no Ray cluster at 127"):
        driftline.compare(two / "ref", two / "cand", executor="ray")


@pytest.mark.parametrize("word", ["ray://", "ray://host", "ray://host:x", "ray://:1", "ray://h:0"])
def test_what_is_no_address_is_refused(two, word):
    with pytest.raises(BadInput, match="is no address of a Ray cluster"):
        driftline.compare(two / "ref", two / "cand", executor=word)


def test_somebody_who_does_not_speak_as_ray_does_is_given_up(two, monkeypatch):
    from driftline.execution import ray_connection

    pytest.importorskip("grpc")
    monkeypatch.setattr(ray_connection, "_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(DriftlineError, match="does not answer as a Ray cluster: waited 1 s"):
            driftline.compare(two / "ref", two / "cand", executor=f"ray://127.0.0.1:{port}")
        assert time.monotonic() - began < 60


@contextlib.contextmanager
def a_door(code):
    """Somebody who speaks as Ray does, and answers every question with one code."""
    grpc = pytest.importorskip("grpc")
    from concurrent.futures import ThreadPoolExecutor

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda asked, line: line.abort(code, "no"))

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def test_a_cluster_that_asks_for_a_token_that_is_not_here_is_refused_at_once(two, monkeypatch):
    from driftline.execution import ray_connection

    grpc = pytest.importorskip("grpc")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with a_door(grpc.StatusCode.UNAUTHENTICATED) as place:
        with pytest.raises(DriftlineError, match=rf"cluster at ray://{place} asks for a token"):
            driftline.compare(two / "ref", two / "cand", executor=f"ray://{place}")
        monkeypatch.setenv("RAY_AUTH_MODE", "token")  # then it is Ray's: its token may be wrong
        assert "is it the same here?" in ray_connection.use_token(place, place)
    with a_door(grpc.StatusCode.UNIMPLEMENTED) as place:
        assert not ray_connection.asks_for_token(place)


def test_a_web_server_is_told_from_a_cluster(two):
    """It speaks HTTP/2, as Ray does, and knows no gRPC: a proxy, say."""
    pytest.importorskip("grpc")
    told = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty SETTINGS frame
    taken = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
    missing = b"\x00\x00\x01\x01\x05\x00\x00\x00\x01\x8d"  # HEADERS of stream 1: `:status: 404`

    def answer(line):
        seen = b""
        with contextlib.suppress(OSError):  # the first one only knocks, and is gone
            line.sendall(told + taken)
            while b"\x01\x04\x00\x00\x00\x01" not in seen:  # HEADERS that end, of stream 1
                if not (more := line.recv(4096)):
                    return
                seen += more
            line.sendall(missing)

    def serve(door):
        with contextlib.suppress(OSError):
            while True:
                answer(door.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=serve, args=(door,), daemon=True).start()
        address = f"ray://127.0.0.1:{door.getsockname()[1]}"
        with pytest.raises(DriftlineError, match="as a Ray cluster: it is a web server"):
            driftline.compare(two / "ref", two / "cand", executor=address)


TOKENS = """
import os, subprocess, sys
from ray.cluster_utils import Cluster
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20})
env = {**os.environ, "RAY_ADDRESS": cluster.address}
del env["RAY_AUTH_MODE"]
words = [sys.executable, "-m", "driftline", "compare", "ref", "cand", "--executor", "ray", "-q"]
try:
    print(subprocess.run(words, env=env).returncode)
    del env["RAY_AUTH_TOKEN"]
    print(subprocess.run(words, env=env).returncode)
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
def test_the_token_of_this_machine_is_shown_to_a_cluster_that_asks_for_one(two, tmp_path):
    """Ray itself does so only for a cluster that it has found by itself."""
    secret = "0123456789abcdef" * 4
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret, "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", TOKENS],
        cwd=two,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **env},
    )
    assert ran.stdout.split() == ["1", "2"], ran
    assert "asks for a token" in ran.stderr and secret not in ran.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_leaves_the_cluster(two, joined):
    words = ["compare", "ref", "cand", "--executor", "ray", "--metric", "own.py:slow"]
    command = subprocess.Popen(
        [sys.executable, "-m", "driftline", *words],
        cwd=two,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # see test_jobs.py
    )
    give_up = time.monotonic() + 60
    while not workers_of(joined) and command.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    assert workers_of(joined), command.communicate()
    command.send_signal(signal.SIGINT)
    out, said = command.communicate(timeout=60)
    assert command.returncode == 130, (out, said)
    assert said.strip().splitlines()[-1] == "driftline: interrupted"
    give_up = time.monotonic() + 60
    while workers_of(joined) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not workers_of(joined)
