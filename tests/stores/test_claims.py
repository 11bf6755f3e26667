"""One writer at an address, told without clocks; what a dead one left, and what force may do."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
from sent_runs import write_run

import driftline as api
from driftline.errors import AlreadyThere, DriftlineError
from driftline.runs.stores.api import push
from driftline.runs.stores.store import Store
from driftline.runs.stores.upload import CLAIM, claim


@pytest.fixture
def dead() -> int:
    """The number of a process that was."""
    done = subprocess.Popen([sys.executable, "-IS", "-c", ""])
    done.wait()
    return done.pid


def said_by(store: Store, **about: object) -> None:
    writer = {"id": "another", "host": platform.node(), "boot": "", "pid": os.getpid()}
    store.put(CLAIM, json.dumps({**writer, **about}).encode())


def test_a_second_writer_is_refused_also_by_force_as_long_as_the_first_one_lives(memory):
    store = Store(memory)
    claim(store, "one")
    for force in (False, True):
        with pytest.raises(AlreadyThere, match=f"being written by process {os.getpid()}"):
            claim(store, "two", force=force)
    claim(store, "one")  # whoever resumes it


def test_what_a_dead_process_of_this_machine_left_may_be_replaced_by_force(memory, dead):
    store = Store(memory)
    store.put("run.json", b"{}")
    said_by(store, pid=dead)
    with pytest.raises(AlreadyThere, match="sent before it ended") as told:
        claim(store, "two")
    assert "--force" in told.value.hint
    claim(store, "two", force=True)
    assert set(store.sizes()) == {CLAIM}


def test_a_machine_that_was_started_anew_has_no_writer_left(memory):
    store = Store(memory)
    said_by(store, boot="before the last start")
    claim(store, "two", force=True)


@pytest.mark.parametrize(
    "about", [{"host": "another-machine"}, {"pid": "x"}, {"pid": -1}, {"host": None}]
)
def test_a_writer_that_cannot_be_asked_counts_as_alive(memory, about, dead):
    store = Store(memory)
    said_by(store, **{"pid": dead, **about})
    with pytest.raises(AlreadyThere, match="is being written") as told:
        claim(store, "two", force=True)
    assert f"delete {store.name}/{CLAIM}" in told.value.hint


@pytest.mark.parametrize("garbled", [b"", b"[]", b"{", b"\xff" * 10, b"1" * (1 << 17)])
def test_a_claim_that_cannot_be_read_is_one(memory, garbled):
    store = Store(memory)
    store.put(CLAIM, garbled)
    with pytest.raises(AlreadyThere, match="is being written"):
        claim(store, "two", force=True)


def test_force_replaces_runs_and_nothing_else(memory, tmp_path):
    run = write_run(tmp_path / "run")
    url = f"{memory}/run"
    push(run, url)
    with pytest.raises(AlreadyThere, match="exists and is not empty"):
        push(run, url)
    push(run, url, force=True)
    assert api.open_run(url).sealed
    Store(url).put("precious.txt", b"mine")
    with pytest.raises(AlreadyThere, match="other things than a run"):
        push(run, url, force=True)
    assert Store(url).size("precious.txt") == 4


def test_a_store_that_knows_no_condition_is_looked_at_first(memory, monkeypatch):
    store = Store(memory)

    def without(path, value, mode="overwrite"):
        if mode != "overwrite":
            raise TypeError("pipe_file() got an unexpected keyword argument 'mode'")
        real(path, value)

    real = store._fs.pipe_file
    monkeypatch.setattr(store._fs, "pipe_file", without)
    assert store.put_new("claim", b"one")
    assert not store.put_new("claim", b"two")
    assert store.read_all("claim", 10) == b"one"


@pytest.mark.parametrize(
    ("words", "answer"), [("PreconditionFailed: it is there", None), ("no", 412)]
)
def test_a_writer_that_was_quicker_has_the_name(memory, monkeypatch, words, answer):
    store = Store(memory)

    def too_late(path, value, mode="overwrite"):
        real(path, b"other")
        trouble = OSError(words)
        trouble.code = answer
        raise trouble

    real = store._fs.pipe_file
    monkeypatch.setattr(store._fs, "pipe_file", too_late)
    assert not store.put_new("claim", b"one")
    assert store.read_all("claim", 10) == b"other"


def test_digits_in_the_id_of_a_failed_request_are_no_other_writer(memory, monkeypatch):
    store = Store(memory)
    broken = ["request 7f412ab0: connection reset"]
    real = store._fs.pipe_file

    def breaking_once(path, value, mode="overwrite"):
        if broken:
            raise OSError(broken.pop())
        real(path, value, mode=mode)

    monkeypatch.setattr(store._fs, "pipe_file", breaking_once)
    assert store.put_new("claim", b"one")


def test_a_run_that_changes_its_address_half_way_is_refused(memory, tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    send = Store.send

    def fail(self, source, name):
        if name.endswith("tensors-00001.safetensors"):
            raise DriftlineError("the wire is cut")
        return send(self, source, name)

    monkeypatch.setattr(Store, "send", fail)
    half = push(run, f"{memory}/one", patience=0)
    assert half.reason == "the wire is cut" and half.left > 0 and half.folder == run
    monkeypatch.undo()
    with pytest.raises(DriftlineError, match="was sent to"):
        push(run, f"{memory}/two")
    assert not push(run, f"{memory}/one").reason
    assert api.open_run(f"{memory}/one").sealed
    assert api.open_run(run).sealed and not (run / ".sending.json").exists()
