"""Stores other than S3: what is missing, and what is refused, is a sentence with a way out."""

from __future__ import annotations

import http.server
import importlib
import logging
from collections.abc import Iterator
from typing import ClassVar

import fsspec
import fsspec.config
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hub_server import serving

import driftline as api
from driftline.errors import BadInput, BadRun, NotInstalled, Unreachable
from driftline.runs.records import Record, TensorKey
from driftline.runs.stores.store import Gone, Store
from driftline.runs.writer import RunWriter


class _Refusing(http.server.BaseHTTPRequestHandler):
    code = 401
    headers_of: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        content = b'{"error": "no"}'
        self.send_response(self.code)
        for name, value in {**self.headers_of, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Refusing]]:
    """A hub on loopback that refuses everything."""
    handler = type("Handler", (_Refusing,), {})
    with serving(handler) as address:
        how = {"endpoint": address, "skip_instance_cache": True}
        monkeypatch.setitem(fsspec.config.conf, "hf", how)
        yield handler


@pytest.mark.parametrize("code", [401, 404])
def test_a_repository_that_cannot_be_seen_may_want_a_token(hub, code):
    hub.code, hub.headers_of = code, {"X-Error-Code": "RepoNotFound"}
    for act in (lambda store: store.sizes(), lambda store: store.put("a", b"x")):
        with pytest.raises(BadRun, match="there is no such repository, or only for those") as found:
            act(Store("hf://datasets/me/run/x", tries=2))
        assert "HF_TOKEN" in found.value.hint


def test_what_may_not_be_looked_at_is_denied_at_once(hub):
    hub.code = 403
    with pytest.raises(BadRun, match="access was denied"):
        Store("hf://datasets/me/run/x").sizes()


@pytest.mark.parametrize(
    ("url", "package"), [("gs://b/run", "gcsfs"), ("az://b/run", "adlfs"), ("abfs://b/r", "adlfs")]
)
def test_a_store_whose_package_is_missing_names_it(url, package):
    with pytest.raises(NotInstalled, match=f"need the package {package}") as found:
        api.open_run(url)
    assert found.value.hint == f"pip install '{package}'"


class _Buckets(MemoryFileSystem):
    """In the place of gcsfs."""

    protocol = "gs"


def test_a_library_that_prints_every_failure_itself_is_kept_silent(monkeypatch):
    registry = importlib.import_module("fsspec.registry")._registry
    monkeypatch.setitem(registry, "gs", _Buckets)
    log = logging.getLogger("gcsfs")
    before = log.level
    try:
        Store("memory://b/run")
        assert log.isEnabledFor(logging.CRITICAL)
        Store("gs://b/run")
        assert not log.isEnabledFor(logging.CRITICAL)
    finally:
        log.setLevel(before)


class _Answer(Exception):
    """As gcsfs keeps the number of an answer."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        (_Answer(401, "Anonymous caller does not have access"), BadRun, "no credentials"),
        (_Answer(403, "no"), BadRun, "access was denied"),
        (OSError("Forbidden: b/bucket/o"), BadRun, "access was denied"),
        (_Answer(404, "The specified bucket does not exist."), BadRun, "there is no 'b'"),
        (_Answer(404, "No such object"), Gone, "is not there"),
        (_Answer(503, "busy"), Unreachable, "cannot be reached: busy"),
    ],
)
def test_answers_of_a_store_are_told_by_their_number(trouble, kind, words):
    store = Store("memory://b/run", tries=1)
    store._root = "b/run"

    def act() -> None:
        raise trouble

    with pytest.raises(kind, match=words):
        store._trying(act)
    if kind is Gone:
        with pytest.raises(BadRun, match="there is no 'b'"):
            store._writing(act)


def test_runs_and_tables_in_memory_are_those_of_a_folder(tmp_path):
    values = np.arange(12, dtype=np.float32)
    for name, factor in (("ref", 1.0), ("cand", 1.5)):
        writer = RunWriter(tmp_path / name, seal_at_exit=False)
        record = Record(TensorKey.of("layer", "output"), 0, "float32", (12,))
        writer.put(record, (values * np.float32(factor)).view(np.uint8))
        writer.close()
        api.push(tmp_path / name, f"memory://stores-{tmp_path.name}/{name}")
    base = f"memory://stores-{tmp_path.name}"
    table = api.compare(f"{base}/ref", f"{base}/cand")
    assert table.verdict == "fail" and len(table.rows) == 1
    table.write(f"{base}/table")
    again = api.open_table(f"{base}/table")
    assert again.as_json()["rows"] == table.as_json()["rows"]
    local = api.compare(tmp_path / "ref", tmp_path / "cand")
    assert list(local.rows) == list(table.rows)


@pytest.mark.parametrize(
    "secret",
    [
        "https://me:hunter2@store.example/b",
        "GET /b?X-Amz-Signature=hunter2 failed",
        "token=hunter2",
    ],
)
def test_the_text_of_a_stores_error_is_shown_without_its_credentials(secret):
    store = Store("memory://b/run", tries=1)

    def unreachable() -> None:
        raise OSError("no answer") from ConnectionError(secret)

    def unable() -> None:
        raise NotImplementedError(secret)

    for act, kind, words in (
        (unreachable, Unreachable, "cannot be reached: "),
        (unable, BadInput, "cannot do what is needed"),
    ):
        with pytest.raises(kind, match=words) as found:
            store._trying(act)
        assert "hunter2" not in f"{found.value} {found.value.hint}"
        assert "***" in str(found.value)


class _Losing(MemoryFileSystem):
    """Keeps, or gives, only the first bytes of the next so many files, and says nothing of it."""

    protocol = "losing"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cuts: ClassVar[int] = 0
    uploads: ClassVar[int] = 0
    short_answers: ClassVar[int] = 0

    def put_file(self, lpath, rpath, **options):
        super().put_file(lpath, rpath, **options)
        type(self).uploads += 1
        if type(self).cuts:
            type(self).cuts -= 1
            self.pipe_file(rpath, self.cat_file(rpath)[:3])

    def cat_file(self, path, start=None, end=None, **options):
        content = super().cat_file(path, start=start, end=end, **options)
        if start is not None and type(self).short_answers:
            type(self).short_answers -= 1
            return content[:2]
        return content


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> type[_Losing]:
    monkeypatch.setattr("driftline.runs.stores.store._FIRST_WAIT", 0.001)
    monkeypatch.setattr(_Losing, "cuts", 0)
    monkeypatch.setattr(_Losing, "uploads", 0)
    monkeypatch.setattr(_Losing, "short_answers", 0)
    fsspec.register_implementation("losing", _Losing, clobber=True)
    return _Losing


def test_an_upload_of_which_only_a_part_arrives_is_sent_again(losing, tmp_path):
    source = tmp_path / "shard"
    source.write_bytes(b"0123456789")
    losing.cuts = 2
    store = Store("losing://b/run", tries=4)
    assert store.send(source, "shard") == 10
    assert losing.uploads == 3
    assert store.read_all("shard", 100) == b"0123456789"


def test_an_upload_that_never_arrives_whole_is_told_with_what_arrived(losing, tmp_path):
    source = tmp_path / "shard"
    source.write_bytes(b"0123456789")
    losing.cuts = 9
    with pytest.raises(Unreachable, match="3 of 10 bytes arrived") as found:
        Store("losing://b/run", tries=2).send(source, "shard")
    assert "it was tried 2 times" in found.value.hint
    assert losing.uploads == 2


def test_an_answer_that_is_too_short_is_asked_for_again_unless_the_file_is(losing):
    store = Store("losing://b/read", tries=3)
    store.put("file", b"0123456789")
    losing.short_answers = 2
    assert store.read("file", 2, 8) == b"234567"
    assert losing.short_answers == 0
    with pytest.raises(Gone, match="file ends before its last byte"):
        store.read("file", 8, 11)
    losing.short_answers = 3
    with pytest.raises(Unreachable, match="2 of 6 bytes came"):
        store.read("file", 2, 8)


def test_tries_wait_twice_as_long_each_time_and_never_longer_than_five_seconds(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("driftline.runs.stores.store.time.sleep", waits.append)

    def act() -> None:
        raise ConnectionError("busy")

    with pytest.raises(Unreachable, match="busy"):
        Store("memory://b/run", tries=8)._trying(act)
    usual = (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)
    assert len(waits) == len(usual)
    for wait, middle in zip(waits, usual, strict=True):
        assert 0.5 * middle <= wait <= 1.5 * middle
