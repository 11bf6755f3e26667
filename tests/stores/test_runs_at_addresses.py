"""A run or table elsewhere is read and written as one here, the same to the last bit."""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sent_runs import write_run

import driftline as api
from driftline.errors import AlreadyThere, BadInput, BadRun, DriftlineError, NotInstalled
from driftline.runs.records import Record, TensorKey
from driftline.runs.stores import block_cache, remote_run
from driftline.runs.stores.addresses import UrlPath, place_of, url_of
from driftline.runs.stores.api import exists, push
from driftline.runs.stores.remote_run import RemoteFiles
from driftline.runs.stores.store import Store
from driftline.runs.writer import RunWriter


def rows(table):
    return [row.as_json() for row in table.rows]


def sent(path: Path, url: str) -> str:
    assert not push(path, url).reason
    return url


@pytest.fixture
def there(pair_of_runs, memory):
    ref, cand = pair_of_runs
    return sent(ref, f"{memory}/ref"), sent(cand, f"{memory}/cand")


def test_a_comparison_of_runs_elsewhere_has_the_rows_of_the_same_runs_here(pair_of_runs, there):
    here = api.compare(*pair_of_runs)
    assert here.verdict == "fail"
    assert rows(api.compare(*there)) == rows(here)
    assert rows(api.compare(pair_of_runs[0], there[1])) == rows(here)


def test_a_large_tensor_is_fetched_block_by_block(tmp_path, memory, monkeypatch):
    count = 9 << 20
    ref = write_run(tmp_path / "ref", large=count, shard_bytes=1 << 26)
    cand = write_run(tmp_path / "cand", large=count, shift=1e-2, shard_bytes=1 << 26)
    urls = sent(ref, f"{memory}/ref"), sent(cand, f"{memory}/cand")
    asked: list[int] = []
    read = Store.read

    def watched(self, name, start, stop):
        asked.append(stop - start)
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", watched)
    assert rows(api.compare(*urls)) == rows(api.compare(ref, cand))
    assert max(asked) <= 16 << 20 < count * 4


def test_what_is_not_looked_at_is_not_fetched(there, monkeypatch):
    fetched: list[int] = []
    read = Store.read

    def watched(self, name, start, stop):
        if name.endswith(".safetensors"):
            fetched.append(stop - start)
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", watched)
    table = api.compare(*there, sites=["layer.3"])
    assert len(table.rows) == 1
    assert sum(fetched) <= 4 * block_cache.BLOCK


@pytest.mark.parametrize("size", [10, 64, 65, 1000])
def test_a_long_file_is_read_in_pieces_and_is_whole(memory, monkeypatch, size):
    monkeypatch.setattr(remote_run, "_CHUNK", 64)
    store, content = Store(memory), bytes(index % 251 for index in range(size))
    store.put("rank0/index.jsonl", content)
    with RemoteFiles(store).open("rank0/index.jsonl") as file:
        assert file.read() == content
        file.seek(3)
        assert file.read(5) == content[3:8]


def test_blocks_that_are_kept_are_bounded_and_right(memory):
    store = Store(memory)
    content = np.random.default_rng(0).bytes(1 << 20)
    store.put("file", content)
    kept = block_cache.Blocks(store, block=1 << 12, kept=1 << 16)
    draw = np.random.default_rng(1)

    def look() -> None:
        for _ in range(100):
            start = int(draw.integers(0, (1 << 20) - 1))
            stop = min(start + int(draw.integers(1, 1 << 14)), 1 << 20)
            buffer, at = kept.fetch("file", start, stop, 1 << 20)
            assert bytes(buffer[at : at + stop - start]) == content[start:stop]

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept._cached) <= 16
    assert not kept._coming


def test_a_block_that_several_want_at_once_is_fetched_once(memory, monkeypatch):
    store = Store(memory)
    store.put("file", bytes(range(256)))
    reads: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    read = Store.read

    def slow(self, name, start, stop):
        reads.append(start)
        begun.set()
        assert go_on.wait(60)
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", slow)
    kept = block_cache.Blocks(store, block=64, kept=256)
    found: list[bytes] = []

    def look() -> None:
        buffer, at = kept.fetch("file", 70, 80, 256)
        found.append(bytes(buffer[at : at + 10]))

    first, second = threading.Thread(target=look), threading.Thread(target=look)
    first.start()
    assert begun.wait(60)
    second.start()
    second.join(0.2)
    go_on.set()
    first.join(60)
    second.join(60)
    assert found == [bytes(range(70, 80))] * 2
    assert reads == [64]


def many_small(path: Path, count: int, shift: float) -> Path:
    draw = np.random.default_rng(0)
    writer = RunWriter(path, seal_at_exit=False)
    for at in range(count):
        values = draw.standard_normal(50).astype(np.float32) + np.float32(shift * (at > 100))
        writer.put(
            Record(TensorKey.of(f"l{at}", "output"), at, "float32", (50,)), values.view("u1")
        )
    writer.close()
    return path


def test_many_small_tensors_are_fetched_together_and_ahead(tmp_path, memory, monkeypatch):
    runs = [many_small(tmp_path / name, 200, shift) for name, shift in (("a", 0.0), ("b", 0.5))]
    urls = [sent(path, f"{memory}/{path.name}") for path in runs]
    here = rows(api.compare(*runs))
    reads: list[str] = []
    read = Store.read

    def watched(self, name, start, stop):
        reads.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", watched)
    assert rows(api.compare(*urls)) == here
    shards = [name for name in reads if name.endswith(".safetensors")]
    assert 2 <= len(shards) <= 2 * 4 + 2  # 64 pairs at a time, and one look at each file


@pytest.mark.parametrize(("between", "reads"), [(100 << 10, 1), (140 << 10, 2), (9 << 20, 2)])
def test_tensors_that_lie_near_each_other_are_one_request(
    tmp_path, memory, monkeypatch, between, reads
):
    writer = RunWriter(tmp_path / "run", seal_at_exit=False)
    for at, count in enumerate((1000, between, 1000)):
        values = np.full(count, at + 1, np.uint8)
        writer.put(Record(TensorKey.of(f"l{at}", "output"), at, "uint8", (count,)), values)
    writer.close()
    run = api.open_run(sent(tmp_path / "run", f"{memory}/run"))
    ends = [run.records[0], run.records[2]]
    asked: list[int] = []
    read = Store.read

    def watched(self, name, start, stop):
        asked.append(stop - start)
        return read(self, name, start, stop)

    ahead = run.read_ahead()
    monkeypatch.setattr(Store, "read", watched)
    ahead.begin(ends)
    found = ahead.take()
    ahead.close()
    assert len(asked) == reads
    assert [memory.length for memory in found] == [1000, 1000]
    values = [ctypes.string_at(memory.address, memory.length) for memory in found]
    assert values == [b"\1" * 1000, b"\3" * 1000]


def test_everything_a_run_says_of_itself_comes_along(pair_of_runs, there):
    here, elsewhere = api.open_run(pair_of_runs[0]), api.open_run(there[0])
    assert elsewhere.manifest == here.manifest
    assert list(elsewhere.events()) == list(here.events())
    assert elsewhere.topology() == here.topology()
    assert elsewhere.processes() == here.processes()
    assert list(elsewhere.losses) == []
    assert np.array_equal(elsewhere.get("layer.48").numpy(), here.get("layer.48").numpy())


def test_a_table_goes_elsewhere_and_comes_back(pair_of_runs, memory):
    table = api.compare(*pair_of_runs)
    table.write(f"{memory}/table")
    assert rows(api.open_table(f"{memory}/table")) == rows(table)
    assert rows(api.open_table(f"{memory}/table/table.json")) == rows(table)
    with pytest.raises(AlreadyThere):
        table.write(f"{memory}/table")
    table.write(f"{memory}/table", force=True)
    with pytest.raises(BadRun, match="comparison table"):
        api.open_run(f"{memory}/table")


def test_a_folder_of_a_comparison_is_pushed_like_a_run(pair_of_runs, memory, tmp_path):
    api.compare(*pair_of_runs).write(tmp_path / "table")
    assert push(tmp_path / "table", f"{memory}/table").files == 3
    assert api.open_table(f"{memory}/table").verdict == "fail"


def test_a_table_that_replaces_another_leaves_no_file_of_it(pair_of_runs, memory, tmp_path):
    table = api.compare(*pair_of_runs)
    table.write(f"{memory}/table")
    table.write(tmp_path / "table")
    (tmp_path / "table" / "rows.parquet").unlink(missing_ok=True)
    push(tmp_path / "table", f"{memory}/table", force=True)
    assert not exists(f"{memory}/table", "rows.parquet")
    assert exists(f"{memory}/table", "rows.csv")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("compare", "{ref}", "{cand}", "-o", "{url}/table"), 1),
        (("compare", "{ref}", "{ref}", "--jobs", "1"), 0),
        (("show", "{ref}"), 0),
        (("show", "{ref}", "--tensors", "--verify"), 0),
        (("diagnose", "{ref}", "{cand}"), 1),
        (("report", "{ref}", "{cand}", "-o", "report.html"), 0),
        (("topology", "{ref}"), None),
        (("convert", "{ref}", "-o", "copy"), 0),
        (("convert", "{ref}", "-o", "{url}/copy"), 0),
        (("compare", "{ref}", "{cand}", "--python"), 0),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_commands_take_addresses(driftline, there, memory, tmp_path, monkeypatch, words, code):
    monkeypatch.chdir(tmp_path)
    filled = [word.format(ref=there[0], cand=there[1], url=memory) for word in words]
    said = driftline(*filled)
    if code is not None:
        assert said.code == code, said
    assert "Traceback" not in said.err
    assert "memory:/" not in (said.out + said.err).replace("memory://", "")
    written = words[0] == "compare" and "-o" in words
    assert ("memory:// is the memory of this command" in said.err) == written


def test_a_program_is_not_run_for_memory_that_ends_with_the_command(driftline, memory, tmp_path):
    mark = tmp_path / "mark"
    said = driftline("dump", "-o", f"{memory}/run", "--", "touch", mark)
    assert said.code == 2 and "memory of this command, and gone when it ends" in said.err
    assert not mark.exists()


def test_commands_take_tables_at_addresses(driftline, there, memory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    driftline("compare", *there, "-o", f"{memory}/table")
    again = driftline("compare", *there, "-o", f"{memory}/table")
    assert again.code == 2 and "is not empty" in again.err
    shown = driftline("show", f"{memory}/table")
    assert shown.code == 0 and "layer.20" in shown.out
    assert driftline("check", f"{memory}/table", "--max", "relative_l2=9").code == 0
    assert driftline("diagnose", f"{memory}/table").code == 1
    assert driftline("report", f"{memory}/table", "-o", "page.html").code == 0
    clean = driftline("compare", there[0], there[0], "-o", f"{memory}/clean")
    assert clean.code == 0
    limits = driftline("calibrate", f"{memory}/clean", f"{memory}/clean", "-o", "limits.json")
    assert limits.code == 0, limits.err


@pytest.mark.parametrize(
    ("url", "sentence", "kind"),
    [
        ("nosuch://a/b", "no store is called nosuch://", BadInput),
        ("gs://bucket/run", "need the package gcsfs", NotInstalled),
        ("memory://{}/nothing", "there is nothing at", BadRun),
        ("memory://", "names no folder", BadInput),
        ("s3://me:secret@bucket/run", "holds a password", BadInput),
        ("memory://a/../../b", "names no folder", BadInput),
        ("file:///tmp/run", "is on this machine", BadInput),
    ],
)
def test_an_address_that_cannot_be_is_told_in_a_sentence(url, sentence, kind, memory):
    with pytest.raises(kind, match=sentence) as told:
        api.open_run(url.format(memory.partition("://")[2]))
    assert "secret" not in str(told.value) + told.value.hint


def test_without_fsspec_the_install_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(NotInstalled) as told:
        api.open_run("s3://bucket/run")
    assert told.value.hint == "pip install s3fs"


def test_dumps_of_other_programs_are_not_read_from_elsewhere_and_it_says_what_to_do(memory):
    Store(memory).put("tree/a.npy", b"\x93NUMPY")
    with pytest.raises(BadRun, match="no run of driftline") as told:
        api.open_run(f"{memory}/tree")
    assert "driftline convert" in told.value.hint
    with pytest.raises(BadRun, match="is a file of 6 bytes"):
        api.open_run(f"{memory}/tree/a.npy")


def test_options_that_take_no_address_say_so(driftline, there):
    said = driftline("compare", *there, "--thresholds", "s3://bucket/limits.json")
    assert said.code == 2 and "takes a path of this machine" in said.err


def test_a_path_of_this_machine_stays_one():
    assert url_of("runs/a") is url_of(Path("C:/x")) is url_of("C:/x") is None
    assert (
        url_of(Path("s3://bucket/run"))
        == url_of(UrlPath("s3://bucket/run/"))
        == ("s3://bucket/run")
    )
    assert str(place_of("s3://bucket/run")) == "s3://bucket/run"
    assert str(place_of("s3://bucket/run") / "x") == "s3://bucket/run/x"
    assert place_of("file:///tmp/a%20b") == Path("/tmp/a b")


# ---- strangers


def test_names_inside_a_run_never_lead_out_of_it(memory, pair_of_runs):
    store = Store(memory)
    store.put("secret/rank0/tensors-00000.safetensors", b"x" * 4096)
    sent(pair_of_runs[0], f"{memory}/run")
    line = store.read_all("run/rank0/index.jsonl", 1 << 20).split(b"\n")[0]
    for name in (
        b"../../secret/rank0/tensors-00000.safetensors",
        b"/etc/passwd",
        b"s3://elsewhere/tensors-00000.safetensors",
    ):
        bad = line.replace(b"tensors-00000.safetensors", name)
        store.put("run/rank0/index.jsonl", bad + b"\n")
        run = api.open_run(f"{memory}/run")
        assert len(run.records) == 0
        assert any("is not the name of a shard" in str(loss) for loss in run.losses)
    for name in ("../x", "a/../../x", "a//b", "/x", "a\\b", "."):
        with pytest.raises(BadInput):
            store.path(name)


def test_odd_folders_beside_the_ranks_are_not_looked_into(memory, pair_of_runs):
    sent(pair_of_runs[0], f"{memory}/run")
    store = Store(memory)
    for name in ("rank00", "rank0.p0", "rank-1", "rank0 ", "etc"):
        store.put(f"run/{name}/index.jsonl", b"{}\n")
    assert {r.key.rank for r in api.open_run(f"{memory}/run").records} == {0}
    assert list(api.open_run(f"{memory}/run").losses) == []


def test_an_address_that_stands_in_a_file_is_never_asked(pair_of_runs, tmp_path, driftline):
    """A stranger's table names its runs; looking at it must not tell them."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.2)
        url = f"http://127.0.0.1:{door.getsockname()[1]}/run"
        table = api.compare(*pair_of_runs)
        table.write(tmp_path / "table")
        text = (tmp_path / "table" / "table.json").read_text()
        for side in pair_of_runs:
            text = text.replace(str(side), url)
        assert url in text
        (tmp_path / "table" / "table.json").write_text(text)
        driftline("report", tmp_path / "table", "-o", tmp_path / "page.html")
        driftline("show", tmp_path / "table")
        driftline("diagnose", tmp_path / "table")
        (tmp_path / "ref").mkdir()
        with pytest.raises(TimeoutError):
            door.accept()


def test_a_link_in_a_folder_is_not_sent(tmp_path, memory):
    run = write_run(tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    (run / "rank0" / "calls.jsonl").symlink_to(tmp_path / "secret")
    (run / "rank1").symlink_to("/etc")
    sent(run, f"{memory}/run")
    assert "calls.jsonl" not in Store(f"{memory}/run").sizes("rank0")
    assert "rank1" not in Store(f"{memory}/run").sizes()


def test_a_run_elsewhere_that_is_garbled_says_so(memory, pair_of_runs):
    sent(pair_of_runs[0], f"{memory}/run")
    store = Store(f"{memory}/run")
    store.put("rank0/tensors-00000.safetensors", b"short")
    run = api.open_run(f"{memory}/run")
    assert any("ends before its last byte" in str(loss) for loss in run.losses)
    store.put("run.json", b"{")
    assert any("run.json" in str(loss) for loss in api.open_run(f"{memory}/run").losses)
    store.put("run.json", b'{"format": "driftline-run", "schema": 99}')
    with pytest.raises(BadRun, match="schema 99"):
        api.open_run(f"{memory}/run")


def test_what_is_missing_of_a_run_elsewhere_is_named(memory, pair_of_runs):
    done = push(pair_of_runs[0], f"{memory}/run")
    store = Store(f"{memory}/run")
    assert done.files == 1 + len(store.sizes("rank0"))
    assert done.size == sum(store.sizes("rank0").values()) + store.size("run.json")
    store.remove("rank0/tensors-00000.safetensors")
    run = api.open_run(f"{memory}/run")
    assert any("tensors-00000.safetensors is missing" in str(loss) for loss in run.losses)
    store.remove("rank0")
    store.put("run.json", b"{")
    with pytest.raises(BadRun, match=r"is no run: run\.json"):
        api.open_run(f"{memory}/run")


def test_capture_into_an_address_is_refused_with_the_way_to_do_it():
    import torch

    with pytest.raises(BadInput) as told:
        api.capture(torch.nn.Linear(1, 1), "s3://bucket/run")
    assert "driftline dump -o URL" in told.value.hint


def test_a_folder_that_is_neither_is_not_pushed(tmp_path, memory):
    with pytest.raises(BadRun, match="neither a run nor a comparison"):
        push(tmp_path, memory)
    with pytest.raises(DriftlineError, match="is no address"):
        push(tmp_path, str(tmp_path / "x"))


def test_a_small_file_of_a_store_is_read_up_to_its_limit_and_refused_beyond(memory):
    store = Store(memory)
    store.put("manifest.json", b"0123456789")
    files = RemoteFiles(store)
    assert files.read("manifest.json", 10) == b"0123456789"
    with pytest.raises(OSError, match="has 10 bytes, more than anybody would write there"):
        files.read("manifest.json", 9)
    with pytest.raises(FileNotFoundError):
        files.read("other.json", 10)
