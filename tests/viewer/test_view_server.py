"""`driftline view` as a process on loopback: who is answered, who is refused, how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

import driftline
from driftline import open_run
from driftline.comparison.options import CompareOptions
from driftline.comparison.pipeline import RowCache, run_comparison
from driftline.errors import BadInput
from driftline.reporting.html.page import unpack
from driftline.reporting.viewer import server
from driftline.reporting.viewer.api import serve
from driftline.reporting.viewer.server import ENDPOINTS
from driftline.runs.files import local_files
from driftline.runs.records import Record
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

RANDOM = np.random.default_rng(3)
OURS = RANDOM.normal(size=(2, 16, 48)).astype(np.float32)
THEIRS = OURS.copy()
THEIRS[1, 5:7] += 0.5


def write(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    writer = RunWriter(folder)
    for name, values in tensors.items():
        record_into(writer, name, values)
    writer.close()
    return folder


class Told(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def sentence(self) -> str:
        return json.loads(self.body)["error"]

    @property
    def document(self) -> dict[str, Any]:
        return unpack(self.body)


class Asking(NamedTuple):
    """Questions to a server, with any headers one likes."""

    url: str

    def __call__(self, path: str, *, method: str = "GET", body: str = "", **headers: str) -> Told:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            named = {"Host": place.netloc} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            for name, value in named.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders(body.encode() or None)
            answer = connection.getresponse()
            return Told(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    @property
    def base(self) -> str:
        return urlsplit(self.url).path


@contextmanager
def running(*words: str) -> Iterator[tuple[subprocess.Popen[str], Asking]]:
    with subprocess.Popen(
        [sys.executable, "-m", "driftline", "view", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that was started in the background ignores Ctrl-C, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, process.stderr.read() if process.stderr else ""
            yield process, Asking(url)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("runs")
    ours = write(place / "ref", {"embed": OURS, "layer": OURS})
    return str(ours), str(write(place / "cand", {"embed": OURS, "layer": THEIRS}))


@pytest.fixture(scope="module")
def ask(runs: tuple[str, str]) -> Iterator[Asking]:
    with running(*runs) as (_, asking):
        yield asking


def test_the_address_is_on_loopback_and_holds_a_token_nobody_guesses(ask: Asking) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", ask.url)
    page = ask(ask.base)
    assert page.status == 200 and b"driftline-source" in page.body
    assert page.headers["Cache-Control"] == "no-store"
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    assert page.headers["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    assert ask(ask.base, method="HEAD").body == b""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8412", "127.0.0.1", "", "[::1]:80"])
def test_another_host_is_refused_whatever_it_asks_for(ask: Asking, host: str) -> None:
    answer = ask(ask.base, Host=host)
    assert answer.status == 403 and b"<html" not in answer.body


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "iframe"},
    ],
)
def test_another_origin_is_refused(ask: Asking, headers: dict[str, str]) -> None:
    assert ask(ask.base + "api/page", **headers).status == 403
    own = {"Origin": ask.url[: ask.url.index("/", 8)], "Sec_Fetch_Site": "same-origin"}
    assert ask(ask.base + "api/page", **own).status == 200


@pytest.mark.parametrize("path", ["/", "/wrong/", "/api/page", "/wrong/api/page", "", "*"])
def test_a_wrong_token_is_refused(ask: Asking, path: str) -> None:
    assert ask(path or ask.base[:-1]).status == 403
    assert ask(ask.base[:-2] + "/").status == 403


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "/etc/passwd",
        "run.json",
        "api/../../../etc/passwd",
        "api/page/../../run.json",
        "api",
        "api/",
        "API/page",
        "api\\page",
        "api/page%00",
    ],
)
def test_a_path_never_becomes_a_file(ask: Asking, path: str) -> None:
    answer = ask(ask.base + path)
    assert answer.status == 404 and answer.sentence == "there is nothing of that name here"
    assert b"root:" not in ask("/../../etc/passwd").body


def test_only_questions_are_answered_and_only_small_ones(ask: Asking) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(ask.base, method=method).status == 405
    assert ask(ask.base, method="BREW").status == 501
    assert ask(ask.base, body="x" * 10, Content_Length="10").status == 413
    assert ask(ask.base + "api/sheet?row=" + "1" * 100_000).status == 414
    many = "&".join(f"a{n}=1" for n in range(40))
    assert ask(ask.base + "api/sheet?" + many).status == 422


def test_the_page_and_its_tensors_are_answered(ask: Asking) -> None:
    page = ask(ask.base + "api/page").document
    assert page["verdict"]["site"] == "layer" and page["view"] == {"generation": 1, "tensors": True}
    row = f"row={page['verdict']['row']}&page=1"
    sheet = ask(ask.base + f"api/sheet?{row}").document
    assert sheet["shape"] == [2, 16, 48] and sheet["axes"] == ["batch", "token", "channel"]
    where = "top=20&bottom=24&left=0&right=8"
    found = ask(ask.base + f"api/map?{row}&{where}&height=99&width=2").document
    assert (found["height"], found["width"]) == (4, 2)
    expected = np.abs(THEIRS - OURS).reshape(32, 48)[20:24, :8].reshape(4, 2, 4)
    np.testing.assert_allclose(found["max"].reshape(4, 2), expected.max(axis=2), rtol=1e-6)
    values = ask(ask.base + f"api/values?{row}&{where}").document
    np.testing.assert_array_equal(
        values["candidate"].reshape(4, 8), THEIRS.reshape(32, 48)[20:24, :8]
    )
    assert values["names"][1] == "batch 1, token 5"
    part = ask(ask.base + f"api/region?{row}&{where}&bins=8").document
    assert part["statistics"]["different"] == 16 and len(part["histogram"]["edges"]) <= 9
    worst = ask(ask.base + f"api/worst?{row}").document
    assert worst["row"] in (21, 22)
    shown = ask(ask.base + f"api/pictures?{row}").document
    assert shown["bad"][0]["sentence"].startswith(
        "2 of 32 rows (batch 1, token 5; batch 1, token 6)"
    )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("api/sheet?row=99&page=1", "the page has no row 99"),
        ("api/sheet?row=-1&page=1", "'row' must be a whole number"),
        ("api/sheet?page=1", "'row' must be a whole number"),
        ("api/values?row=1&page=1", "'top', 'bottom', 'left' and 'right' say which values"),
        ("api/map?row=1&page=1&top=90&bottom=99&left=0&right=1", "rows 90:99, columns 0:1 are"),
        ("api/map?row=1&page=1&top=9&bottom=2&left=0&right=1", "rows 9:2, columns 0:1 are"),
        ("api/region?row=1&page=1&scale=odd", "'scale' is auto, even or symlog"),
    ],
)
def test_a_question_without_sense_gets_a_sentence(ask: Asking, asked: str, sentence: str) -> None:
    answer = ask(ask.base + asked)
    assert answer.status == 422 and answer.sentence.startswith(sentence)


def test_what_is_no_http_at_all_breaks_nothing(ask: Asking) -> None:
    place = urlsplit(ask.url)
    for noise in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b""):
        with socket.create_connection((place.hostname, place.port), timeout=10) as one:
            one.sendall(noise)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass
    assert ask(ask.base).status == 200


def test_slow_connections_do_not_keep_a_reader_out(ask: Asking) -> None:
    """Two hundred that send a byte now and then, as a port scanner or a hung browser does."""
    place = urlsplit(ask.url)
    slow = [socket.create_connection((place.hostname, place.port), timeout=10) for _ in range(200)]
    try:
        took: list[float] = []
        for turn in range(5):
            for one in slow:
                with contextlib.suppress(OSError):  # those that made room are closed
                    one.send(b"GET / HTTP/1.1\r\nX-"[turn : turn + 1])
            begin = time.monotonic()
            assert ask(ask.base).status == 200
            took.append(time.monotonic() - begin)
        # It was 24 s; one question may meet a busy moment of the machine.
        assert sorted(took)[2] < 3.0 and max(took) < 12.0, took
    finally:
        for one in slow:
            one.close()


def test_a_question_that_never_ends_is_cut_off(
    runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_READ_TIMEOUT", 2.0)  # of a request, in place of ten seconds
    with serve(*runs) as viewer:
        place = urlsplit(viewer.url)
        begin = time.monotonic()
        with socket.create_connection((place.hostname, place.port), timeout=30) as one:
            one.sendall(b"GET / HTTP/1.1\r\n")
            with contextlib.suppress(OSError):
                while time.monotonic() - begin < 25:
                    one.sendall(b"X-Slow: 1\r\n")  # each line is in time; there are 100 at most
                    time.sleep(0.5)
                    one.settimeout(0.01)
                    with contextlib.suppress(TimeoutError):
                        if not one.recv(4096):
                            break
                    one.settimeout(30)
        assert time.monotonic() - begin < 20


def test_a_busy_port_is_passed_over_and_ctrl_c_ends_it_cleanly(
    ask: Asking, runs: tuple[str, str]
) -> None:
    taken = urlsplit(ask.url).port
    with running(*runs, "--port", str(taken)) as (process, another):
        assert urlsplit(another.url).port != taken
        assert another(another.base).status == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines() == [
        "driftline: the page is there until Ctrl-C stops it",
        "driftline: stopped",
    ]


def test_a_run_that_is_still_written_shows_what_is_new_on_reload(tmp_path: Path) -> None:
    ours = write(tmp_path / "ref", {"first": OURS, "second": OURS, "third": OURS})
    writer = RunWriter(tmp_path / "cand")
    record_into(writer, "first", OURS)
    writer.flush()
    with serve(ours, tmp_path / "cand") as viewer:
        ask = Asking(viewer.url)
        before = ask(ask.base + "api/page").document
        assert before["verdict"]["coverage"]["compared"] == 1
        assert any("still being written" in note for note in before["verdict"]["notes"])
        record_into(writer, "second", THEIRS)
        writer.flush()
        assert ask(ask.base).status == 200  # the reload
        after = ask(ask.base + "api/page").document
        assert after["verdict"]["coverage"]["compared"] == 2
        assert after["verdict"]["site"] == "second"
        old = ask(ask.base + "api/sheet?row=0&page=1")
        assert (old.status, old.sentence) == (409, "the runs have changed since this page was made")
        writer.close()


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    ours = write(tmp_path / "ref", {"a": OURS, "b": OURS, "c": OURS, "lone": OURS})
    writer = RunWriter(tmp_path / "cand")
    cache = RowCache()
    for count, name in enumerate("abc", 1):
        record_into(writer, name, THEIRS if name == "b" else OURS)
        writer.flush()
        reference, candidate = open_run(ours), open_run(tmp_path / "cand")
        plan = driftline.align(reference, candidate)
        table = run_comparison(reference, candidate, CompareOptions(), plan=plan, by=cache)
        assert cache.measured == count
        assert table == driftline.compare(reference, candidate, plan=plan)
    assert table.first_site == "b" and table.coverage.missing == 1
    writer.close()


def test_a_shard_that_is_cut_off_is_a_sentence(tmp_path: Path) -> None:
    ours = write(tmp_path / "ref", {"first": OURS, "second": OURS})
    theirs = write(tmp_path / "cand", {"first": OURS, "second": THEIRS})
    shard = next(theirs.glob("rank0/*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    with serve(ours, theirs) as viewer:
        ask = Asking(viewer.url)
        assert ask(ask.base).status == 200
        page = ask(ask.base + "api/page").document
        assert page["verdict"]["coverage"]["incomparable"] == 1
        answer = ask(ask.base + "api/sheet?row=1&page=1")
        assert answer.status == 422
        assert "ends before its last byte" in answer.sentence
        assert ask(ask.base + "api/sheet?row=0&page=1").status == 200
        os.truncate(shard, 200)  # under our eyes: to read what is mapped there would be the end
        cut = ask(ask.base + "api/values?row=0&page=1&top=0&bottom=9&left=0&right=9")
        assert cut.status == 409 and "has become shorter" in cut.sentence
        assert ask(ask.base).status == 200
        assert ask(ask.base + "api/page").document["view"]["generation"] == 2
        lost = ask(ask.base + "api/sheet?row=0&page=2")
        assert lost.status == 422 and "ends before its last byte" in lost.sentence


def test_a_shard_that_is_cut_off_while_it_is_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every look at its size, so that only the lost pages themselves can show it."""
    large = RANDOM.normal(size=(512, 512)).astype(np.float32)
    ours = write(tmp_path / "ref", {"first": large, "second": large})
    theirs = write(tmp_path / "cand", {"first": large, "second": large + 1})
    shard = next(theirs.glob("rank0/*.safetensors"))
    with serve(ours, theirs) as viewer:
        ask = Asking(viewer.url)
        assert ask(ask.base + "api/page").status == 200
        real, cuts = local_files.Shards.content, [300_000]

        def cut_after_mapping(self: local_files.Shards, record: Record) -> Any:
            content = real(self, record)
            if cuts and theirs.samefile(self.root):
                os.truncate(shard, cuts.pop())
            return content

        monkeypatch.setattr(local_files.Shards, "content", cut_after_mapping)
        answer = ask(ask.base + "api/worst?row=1&page=1")
        assert not cuts
        assert answer.status == 409 and "became shorter while it was read" in answer.sentence
        again = ask(ask.base + "api/worst?row=1&page=1")
        assert again.status == 409 and "become shorter" in again.sentence
        assert ask(ask.base).status == 200


def test_whatever_is_asked_gets_an_answer_or_a_sentence(tmp_path: Path) -> None:
    odd = {
        "plain": OURS,
        "half": OURS.astype(np.float16),
        "ids": np.arange(7),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(3).reshape(()),
        "nan": np.full((3, 4), np.nan, np.float32),
        "complex": (OURS[0] + 1j * OURS[1]).astype(np.complex64),
        "flags": OURS > 0,
    }
    other = {**odd, "plain": THEIRS, "half": THEIRS, "ids": np.arange(7) + 2**60}
    other["nan"] = np.full((3, 4), np.inf, np.float32)
    dice = random.Random(1)
    with serve(write(tmp_path / "r", odd), write(tmp_path / "c", other)) as viewer:
        ask = Asking(viewer.url)
        for _ in range(150):
            top, left = dice.randint(0, 40), dice.randint(0, 60)
            asked: dict[str, object] = {"row": dice.randint(0, 8), "page": 1}
            if dice.random() < 0.6:
                bottom, right = (dice.choice([0, 1, 9, 10**12]) for _ in range(2))
                asked |= {"top": top, "bottom": top + bottom, "left": left, "right": left + right}
            if dice.random() < 0.5:
                size = dice.choice([0, 1, 7, 10**10])
                asked |= {"height": size, "width": size, "bins": size}
            question = dice.choice(list(ENDPOINTS))
            words = "&".join(f"{name}={value}" for name, value in asked.items())
            answer = ask(f"{ask.base}{question}?{words}")
            assert answer.status in (200, 422), (question, words, answer.body)


def test_a_run_that_is_taken_away_leaves_the_server_standing(tmp_path: Path) -> None:
    ours = write(tmp_path / "ref", {"first": OURS})
    theirs = write(tmp_path / "cand", {"first": OURS})
    with serve(ours, theirs) as viewer:
        ask = Asking(viewer.url)
        theirs.rename(tmp_path / "gone")
        gone = ask(ask.base)
        assert gone.status == 422 and b"there is no" in gone.body
        (tmp_path / "gone").rename(theirs)
        assert ask(ask.base).status == 200


def test_a_comparison_is_looked_at_through_the_runs_behind_it(tmp_path: Path) -> None:
    ours, theirs = (write(tmp_path / n, {"a": v}) for n, v in (("r", OURS), ("c", THEIRS)))
    table = driftline.compare(ours, theirs).write(tmp_path / "table")
    with serve(table) as viewer:
        ask = Asking(viewer.url)
        assert ask(ask.base + "api/sheet?row=0&page=1").status == 200
    theirs.rename(tmp_path / "elsewhere")
    with serve(table) as viewer:
        ask = Asking(viewer.url)
        assert ask(ask.base + "api/page").document["view"]["tensors"] is False
        lone = ask(ask.base + "api/sheet?row=0&page=1")
        assert lone.status == 422 and "there are no two tensors to look at" in lone.sentence


def test_a_port_that_is_none_and_a_lone_run_are_refused(tmp_path: Path) -> None:
    ours = write(tmp_path / "r", {"a": OURS})
    with pytest.raises(BadInput, match="70000 is no port"):
        serve(ours, ours, port=70000)
    with pytest.raises(BadInput, match="there is only one run"):
        serve(ours)
