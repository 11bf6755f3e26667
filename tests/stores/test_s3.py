"""A real S3 server on loopback: cut connections, missing credentials, missing buckets."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import driftline as api
from driftline.cli.commands import dump
from driftline.errors import BadRun, Unreachable
from driftline.runs.reader import open_run
from driftline.runs.stores import store, upload
from driftline.runs.stores.api import push
from driftline.runs.stores.store import Store
from driftline.runs.stores.upload import CLAIM, NOTE


def rows(table):
    return [row.as_json() for row in table.rows]


def sent(path, url):
    done = push(path, url)
    assert not done.reason, done
    return url


def test_runs_and_tables_in_s3_are_those_of_this_machine(s3, pair_of_runs, driftline):
    urls = sent(pair_of_runs[0], f"{s3.url}/ref"), sent(pair_of_runs[1], f"{s3.url}/cand")
    here = api.compare(*pair_of_runs)
    said = driftline("compare", *urls, "-o", f"{s3.url}/table")
    assert said.code == 1 and "layer.20" in said.out
    assert rows(api.open_table(f"{s3.url}/table")) == rows(here)
    assert driftline("show", f"{s3.url}/table").code == 0
    assert driftline("show", urls[0], "--verify").code == 0
    assert CLAIM not in Store(urls[0]).sizes()


def test_connections_that_are_cut_in_the_middle_are_tried_again_and_the_result_is_equal(
    s3, pair_of_runs
):
    s3.proxy.cut_uploads_after += [300_000, 20_000, 400_000]
    urls = sent(pair_of_runs[0], f"{s3.url}/ref"), sent(pair_of_runs[1], f"{s3.url}/cand")
    assert s3.proxy.cuts == 3
    s3.proxy.cut_after += [200_000, 3_000, 500_000, 100_000]
    here = api.compare(*pair_of_runs)
    assert rows(api.compare(*urls)) == rows(here)
    assert s3.proxy.cuts == 7


def test_a_store_that_goes_away_ends_a_comparison_with_a_sentence(
    s3, pair_of_runs, driftline, monkeypatch
):
    monkeypatch.setattr(store, "_FIRST_WAIT", 0.01)
    urls = sent(pair_of_runs[0], f"{s3.url}/ref"), sent(pair_of_runs[1], f"{s3.url}/cand")
    runs = [api.open_run(url) for url in urls]
    assert len(runs[0].records) == len(runs[1].records)
    s3.proxy.down = True
    s3.proxy.stop_all()
    with pytest.raises(Unreachable, match="cannot be reached"):
        api.compare(*runs)
    said = driftline("compare", *urls)
    assert said.code == 2 and "cannot be reached" in said.err and "Traceback" not in said.err


def test_missing_credentials_are_told_in_a_sentence(s3, monkeypatch, driftline):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    said = driftline("compare", f"{s3.url}/ref", f"{s3.url}/cand")
    assert said.code == 2
    assert "no credentials that are accepted there were found" in said.err
    assert "AWS_ACCESS_KEY_ID" in said.err and "Traceback" not in said.err


def test_a_bucket_that_is_not_there_is_told_in_a_sentence(s3, driftline, pair_of_runs, tmp_path):
    said = driftline("show", "s3://no-such-bucket/run")
    assert said.code == 2 and "there is no 'no-such-bucket'" in said.err
    with pytest.raises(BadRun, match="no-such-bucket"):
        push(pair_of_runs[0], "s3://no-such-bucket/run")
    before = time.monotonic()
    said = driftline(
        "dump", "-o", "s3://no-such-bucket/run", "--stage", tmp_path / "stage", "--", "true"
    )
    assert said.code == 2 and "no-such-bucket" in said.err
    assert time.monotonic() - before < 40
    assert not (tmp_path / "stage").exists()


def test_of_two_writers_the_store_lets_one_in(s3, monkeypatch):
    one, other = Store(s3.url), Store(s3.url)
    # Both look before either writes: only the store itself can decide.
    assert one.size(CLAIM) is None and other.size(CLAIM) is None
    real = Store.size
    answers: list[int | None] = [None, None]
    monkeypatch.setattr(
        Store, "size", lambda self, name: answers.pop() if answers else real(self, name)
    )
    assert one.put_new(CLAIM, b"one")
    assert not other.put_new(CLAIM, b"other")
    assert Store(s3.url).read_all(CLAIM, 100) == b"one"


PROGRAM = """
import sys, time, torch
from pathlib import Path
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
with torch.no_grad():
    for step in range(int(sys.argv[1])):
        net(torch.randn(1024, 64))
        if step == 2 and len(sys.argv) > 2:
            deadline = time.monotonic() + 100
            while time.monotonic() < deadline and not Path(sys.argv[2]).exists():
                time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(dump, "SENT_SHARD_BYTES", 1 << 20)
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def test_a_dump_goes_to_s3_while_the_program_runs(s3, program, driftline, warm_python, monkeypatch):
    """Its first shards are there before its last step; nothing stays behind."""
    monkeypatch.setattr(upload, "EVERY", 0.05)
    seen: list[str] = []
    send = Store.send

    def watched(self, source, name):
        size = send(self, source, name)
        seen.append(name)
        if name.endswith("tensors-00000.safetensors"):
            Path("arrived").touch()
        return size

    monkeypatch.setattr(Store, "send", watched)
    url = f"{s3.url}/run"
    words = ("--step", "*", "--", warm_python, "program.py", "12", "arrived")
    said = driftline("dump", "-o", url, *words)
    assert said.code == 0, said.err
    assert f"in {url}" in said.err and f"driftline compare {url}" in said.err
    assert seen.index("rank0/tensors-00000.safetensors") < seen.index("rank0/index.jsonl")
    assert not Path("run.sending").exists()
    run = api.open_run(url)
    assert run.sealed and not run.losses and len({r.key.step for r in run.records}) == 12
    assert driftline("dump", "-o", "here", "--step", "*", "--", warm_python, "program.py", "12")
    table = api.compare("here", url)
    assert table.verdict == "pass"
    assert all(row.metrics["different"] == 0 for row in table.rows)
    again = driftline("dump", "-o", url, "--", warm_python, "program.py", "1")
    assert again.code == 2 and "exists and is not empty" in again.err


def test_what_could_not_be_sent_stays_here_and_push_goes_on(
    s3, program, driftline, warm_python, monkeypatch
):
    monkeypatch.setattr(upload, "EVERY", 0.05)
    monkeypatch.setattr(store, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(upload.Sending.finish, "__defaults__", (1.5,))
    send = Store.send

    def cut_off(self, source, name):
        if name.endswith("tensors-00001.safetensors"):
            s3.proxy.down = True
            s3.proxy.stop_all()
            Path("arrived").touch()
        return send(self, source, name)

    monkeypatch.setattr(Store, "send", cut_off)
    url = f"{s3.url}/run"
    words = ("--step", "*", "--", warm_python, "program.py", "12", "arrived")
    said = driftline("dump", "-o", url, *words)
    assert said.code == 2
    assert f"not all of it is at {url}" in said.err
    assert f"driftline push run.sending {url}" in said.err
    assert Path("run.sending", NOTE).exists()
    waiting = api.open_run("run.sending")
    assert not any("missing" in str(loss) for loss in waiting.losses)
    blocked = driftline("dump", "-o", url, "--", "true")
    assert blocked.code == 2 and "waits there to be sent" in blocked.err
    s3.proxy.down = False
    monkeypatch.setattr(Store, "send", send)
    half = api.open_run(url)
    assert any("still being sent" in str(loss) for loss in half.losses)
    assert all(not record.lost for record in half.records)  # no promise without its bytes
    elsewhere = driftline("push", "run.sending", f"{s3.url}/other")
    assert elsewhere.code == 2 and "go on with that address" in elsewhere.err
    resumed = driftline("push", "run.sending", url)
    assert resumed.code == 0, resumed.err
    assert not Path("run.sending").exists()
    run = api.open_run(url)
    assert run.sealed and not run.losses and len({r.key.step for r in run.records}) == 12


def test_a_launcher_that_is_killed_is_resumed_by_push(s3, program, driftline, warm_python):
    url = f"{s3.url}/run"
    words = [sys.executable, "-m", "driftline", "dump", "-o", url, "--step", "*", "--"]
    launcher = subprocess.Popen([*words, warm_python, "program.py", "4", "go"])
    deadline = time.monotonic() + 100
    index = Path("run.sending", "rank0", "index.jsonl")
    while time.monotonic() < deadline and not (index.exists() and index.stat().st_size > 2000):
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    alive = driftline("push", "run.sending", url)
    assert alive.code == 2 and "is still being written" in alive.err
    for words in (("-o", url), ("-o", url, "--stage", "other")):
        again = driftline("dump", *words, "--", "true")
        assert again.code == 2 and "driftline push" in again.err
    Path("go").touch()
    while time.monotonic() < deadline and not open_run("run.sending").sealed:
        time.sleep(0.05)
    resumed = driftline("push", "run.sending", url)
    # The program lets go of its folder when it ends, a moment after it has sealed the run.
    while "is still being written" in resumed.err and time.monotonic() < deadline:
        time.sleep(0.2)
        resumed = driftline("push", "run.sending", url)
    assert resumed.code == 0, resumed.err
    run = api.open_run(url)
    assert run.sealed and not run.losses and len({r.key.step for r in run.records}) == 4


def test_a_program_that_fails_or_captures_nothing_leaves_nothing_there(
    s3, program, driftline, monkeypatch
):
    said = driftline("dump", "-o", f"{s3.url}/run", "--", sys.executable, "-c", "exit(3)")
    assert said.code == 3
    assert Store(f"{s3.url}/run").sizes() == {}
    assert not Path("run.sending").exists()


def test_credentials_are_in_no_file_and_no_message(s3, program, driftline, warm_python):
    url = f"{s3.url}/run"
    said = driftline("dump", "-o", url, "--", warm_python, "program.py", "1")
    assert said.code == 0
    told = said.out + said.err
    there = Store(url)
    for name in ("run.json", "rank0/process.json", "rank0/index.jsonl"):
        told += there.read_all(name, 1 << 20).decode()
    assert "secret-of-the-test" not in told and "AKIATEST" not in told
    assert json.loads(there.read_all("run.json", 1 << 20))["command"][1:] == ["program.py", "1"]
