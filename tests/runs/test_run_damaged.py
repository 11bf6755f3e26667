"""Runs that are broken, foreign or hostile: a clear sentence, the rest intact, nothing trusted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftline.errors import BadFile, BadInput, BadRun, DriftlineError
from driftline.numerics.fields import Summary
from driftline.runs import index_lines
from driftline.runs import verify as verification
from driftline.runs.files.local_files import folders_in
from driftline.runs.reader import open_run
from driftline.runs.records import Blob, Record, TensorKey
from driftline.runs.verify import verify
from driftline.runs.writer import RunWriter


def write_run(path: Path, count: int = 3) -> Path:
    writer = RunWriter(path)
    for i in range(count):
        data = np.full(1000, i, np.float32)
        record = Record(TensorKey.of(f"site.{i}", "output"), 0, "float32", (10, 100))
        writer.put(record, data.view(np.uint8))
    writer.close()
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def index_of(folder: Path) -> Path:
    return folder / "rank0" / "index.jsonl"


def change_line(folder: Path, number: int, **changes: Any) -> None:
    rows = index_of(folder).read_text().splitlines()
    rows[number] = json.dumps({**json.loads(rows[number]), **changes})
    index_of(folder).write_text("\n".join(rows) + "\n")


def sites(folder: Path) -> list[str]:
    run = open_run(folder)
    return [t.key.site for t in run.tensors() if t.numpy().shape == (10, 100)]


def test_a_missing_path_is_named_with_its_nearest_neighbour(run_folder: Path) -> None:
    with pytest.raises(BadRun, match="there is no") as caught:
        open_run(run_folder.with_name("runn"))
    assert "run'" in caught.value.hint


def test_a_folder_that_is_no_run_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadRun, match=r"is no run: looked for run.json and rank\*/index.jsonl"):
        open_run(tmp_path)
    with pytest.raises(BadRun, match="is a file"):
        open_run(tmp_path / "notes.txt")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00" * 50, "[" * 100_000])
def test_a_broken_manifest_alone_is_no_run_but_loses_nothing_else(
    text: str, tmp_path: Path, run_folder: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text(text)
    with pytest.raises(BadRun):
        open_run(tmp_path / "bare")
    (run_folder / "run.json").write_text(text)
    assert len(sites(run_folder)) == 3
    assert [loss.where for loss in open_run(run_folder).losses] == ["run.json"]


def test_a_run_of_a_newer_schema_names_both_versions_and_the_way_out(run_folder: Path) -> None:
    manifest = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps({**manifest, "schema": 2}))
    with pytest.raises(BadRun, match="has schema 2, and this Driftline reads schema 1") as caught:
        open_run(run_folder)
    assert caught.value.hint == "install the Driftline that wrote it, or a newer one"
    (run_folder / "run.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(BadRun, match="does not say format"):
        open_run(run_folder)


def test_an_index_cut_anywhere_keeps_every_whole_line(run_folder: Path) -> None:
    whole = index_of(run_folder).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole)):
        index_of(run_folder).write_bytes(whole[:cut])
        run = open_run(run_folder)
        # A line without its line end is whole if its last brace is there.
        complete = sum(end - 1 <= cut for end in ends)
        assert len(run) == complete
        assert any("not in its index" in loss.reason for loss in run.losses) == (complete < 3)
        if cut not in ends and cut + 1 not in ends and cut > 0:
            assert any("cut in half" in loss.reason for loss in run.losses)


def test_a_truncated_shard_loses_only_the_tensors_behind_the_cut(run_folder: Path) -> None:
    shard = run_folder / "rank0" / "tensors-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    run = open_run(run_folder)
    assert [bool(t.lost) for t in run.tensors()] == [False, False, True]
    (loss,) = run.losses
    assert loss.key == run.get("site.2").key and "ends before" in loss.reason
    assert run.get("site.1").numpy()[0, 0] == 1
    with pytest.raises(BadInput, match="ends before its last byte"):
        run.get("site.2").numpy()
    assert [v.key.site for v in verify(run) if v.key] == ["site.2"]


def test_a_missing_or_empty_shard_is_a_reason_per_tensor(run_folder: Path) -> None:
    shard = run_folder / "rank0" / "tensors-00000.safetensors"
    shard.write_bytes(b"")
    assert all("ends before" in t.lost for t in open_run(run_folder).tensors())
    shard.unlink()
    run = open_run(run_folder)
    assert len(run) == 3 and all("is missing" in t.lost for t in run.tensors())


def test_an_unsealed_shard_needs_no_header(run_folder: Path) -> None:
    shard = run_folder / "rank0" / "tensors-00000.safetensors"
    with shard.open("r+b") as file:
        file.write(b"\x00" * 4096)
    assert len(sites(run_folder)) == 3 and not list(verify(open_run(run_folder)))


def test_a_header_that_claims_two_to_the_sixty_bytes_is_never_believed(run_folder: Path) -> None:
    shard = run_folder / "rank0" / "tensors-00000.safetensors"
    with shard.open("r+b") as file:
        file.write((2**60).to_bytes(8, "little"))
    assert len(sites(run_folder)) == 3


def test_a_file_cut_after_opening_does_not_crash_the_first_read(run_folder: Path) -> None:
    run = open_run(run_folder)
    record = run.records[2]
    os.truncate(run_folder / "rank0" / "tensors-00000.safetensors", 1000)
    with pytest.raises(BadFile, match="ends before"):
        run.raw(record)


HOSTILE: list[dict[str, Any]] = [
    {"shard": "../../secret"},
    {"shard": "/etc/passwd"},
    {"shard": "tensors-00000.safetensors/../../x"},
    {"shard": "tensors-00000.safetensors\n"},
    {"shard": 7},
    {"offset": -1},
    {"offset": 1.5},
    {"offset": "0"},
    {"offset": 2**70},
    {"length": -4000},
    {"length": 4001},
    {"length": True},
    {"shape": [2**31, 2**31]},
    {"shape": [-10, -100]},
    {"shape": [10.0, 100]},
    {"shape": [10, "100"]},
    {"shape": [True, 1000]},
    {"shape": "ten"},
    {"shape": None},
    {"shape": [10, 100, 2**61]},
    {"shape": [10**4000]},
    {"dtype": "object"},
    {"dtype": None},
    {"dtype": ["float32"]},
    {"site": 3},
    {"site": None},
    {"port": ""},
    {"slot": {}},
    {"step": -1},
    {"visit": "many"},
    {"order": -5},
    {"order": 1e300},
    {"kept": "everything"},
    {"kept": []},
    {"sample_stride": 0},
    {"sample_stride": -3},
    {"digest": 5},
    {"lost": 5},
    {"phase": 1},
]


@pytest.mark.parametrize("claim", HOSTILE, ids=lambda c: repr(c)[:40])
def test_a_line_that_cannot_be_true_is_refused_and_the_rest_stays(
    claim: dict[str, Any], run_folder: Path
) -> None:
    change_line(run_folder, 1, **claim)
    run = open_run(run_folder)
    assert [t.key.site for t in run.tensors()] == ["site.0", "site.2"]
    assert any(loss.where == "rank0/index.jsonl:2" for loss in run.losses)
    assert sites(run_folder) == ["site.0", "site.2"]


FINE = {"count": 1, "zeros": 0, "nan": 0, "pos_inf": 0, "neg_inf": 0}
FINE |= {"min": 1.0, "max": "inf", "mean": 1, "std": 0.0, "l2": "nan"}


@pytest.mark.parametrize(
    "summary",
    [5, {}, {**FINE, "count": -1}, {**FINE, "min": "huge"}, {**FINE, "l2": None}],
    ids=repr,
)
def test_a_summary_that_cannot_be_one_refuses_its_line(summary: object, run_folder: Path) -> None:
    change_line(run_folder, 1, summary=summary)
    assert sites(run_folder) == ["site.0", "site.2"]


def test_a_garbled_sketch_is_left_out_of_its_summary(run_folder: Path) -> None:
    change_line(run_folder, 1, summary={**FINE, "sketch": "!!"})
    tensor = open_run(run_folder).get("site.1")
    assert (
        tensor.summary is not None and tensor.summary.sketch == () and tensor.numpy().size == 1000
    )


def test_links_out_of_the_run_are_not_followed(run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other")
    shard = run_folder / "rank0" / "tensors-00000.safetensors"
    shard.unlink()
    shard.symlink_to(other / "rank0" / "tensors-00000.safetensors")
    run = open_run(run_folder)
    assert len(run.losses) == 3 and all("leads out" in t.lost for t in run.tensors())
    index_of(run_folder).unlink()
    index_of(run_folder).symlink_to(index_of(other))
    assert len(open_run(run_folder)) == 0
    assert "leads out" in open_run(run_folder).losses[0].reason
    shutil.rmtree(run_folder / "rank0")
    (run_folder / "rank0").symlink_to(other / "rank0")
    run = open_run(run_folder)
    assert len(run) == 0 and [loss.where for loss in run.losses] == ["rank0"]


def test_links_to_folders_are_not_folders_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "inside" / "rank0").mkdir(parents=True)
    (tmp_path / "inside" / "rank1").symlink_to(tmp_path / "inside" / "rank0")
    (tmp_path / "inside" / "rank2").touch()
    assert folders_in(tmp_path / "inside") == ["rank0"]
    assert folders_in(tmp_path / "none") == []


def test_bytes_that_several_tensors_share_are_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run")
    for step, value in enumerate([1.0, 1.0, 1.0, 2.0]):
        key = TensorKey.of("norm", "param", "weight", step=step)
        data = np.full(1000, value, np.float32)
        writer.put(Record(key, 0, "float32", (1000,)), data.view(np.uint8))
    writer.close()
    compared: list[str] = []
    clash = verification._clash

    def counted(raw: Any, expected: str) -> str:
        compared.append(expected)
        return clash(raw, expected)

    monkeypatch.setattr(verification, "_clash", counted)
    assert not list(verify(open_run(tmp_path / "run")))
    assert len(compared) == 2


def test_a_named_pipe_in_the_place_of_a_file_does_not_block(run_folder: Path) -> None:
    index_of(run_folder).unlink()
    os.mkfifo(index_of(run_folder))
    assert "not a regular file" in open_run(run_folder).losses[0].reason
    (run_folder / "rank0" / "events.jsonl").unlink(missing_ok=True)
    os.mkfifo(run_folder / "rank0" / "events.jsonl")
    assert list(open_run(run_folder).events()) == []


def test_other_files_in_a_run_are_left_alone(run_folder: Path) -> None:
    for name in ("rank", "rank00", "rank0.p0", "rank-1", "rankx", "notes"):
        (run_folder / name).mkdir()
    assert len(open_run(run_folder)) == 3 and not open_run(run_folder).losses


def test_garbage_events_are_skipped(run_folder: Path) -> None:
    events = run_folder / "rank0" / "events.jsonl"
    events.write_bytes(b'{"kind":"a"}\n\xff\xfe\n[1]\n{"kind":"b"}\n{"ki')
    assert [e["kind"] for e in open_run(run_folder).events()] == ["a", "b"]


def test_thousands_of_bad_lines_are_counted_and_not_listed(run_folder: Path) -> None:
    with index_of(run_folder).open("ab") as file:
        file.write(b"\x00\x01garbage\n" * 5000)
    run = open_run(run_folder)
    assert len(run) == 3 and len(run.losses) < 1100
    assert any("4000 more lines" in loss.reason for loss in run.losses)


SUMMARY = Summary(4, 0.0, 1.0, 0.5, 0.5, 1.4, 2, 0, 0, 0, tuple(float(i) for i in range(64)))
RECORD = Record(
    TensorKey.of("a.b", "input", "x", step=3),
    5,
    "float32",
    (2, 2),
    "0",
    "Linear",
    "cpu",
    "full",
    "d:00",
    Blob("tensors-00000.safetensors", 4096, 16),
    1,
    SUMMARY,
)
LINE = index_lines.encode_line(RECORD, 5, "d:00", RECORD.blob, "").encode()


def read_both_ways(text: bytes) -> list[Record | None]:
    """What msgspec and the standard library make of one line; None for refused."""
    outcomes: list[Record | None] = []
    for decode in (index_lines.decoder(), index_lines._decode_with_json):
        try:
            line = decode(text)
            index_lines.check_line(line)
            outcomes.append(index_lines.record_of(line, 0, 0))
        except (ValueError, RecursionError, OverflowError):
            outcomes.append(None)
    return outcomes


def test_both_decoders_read_a_line_alike() -> None:
    assert read_both_ways(LINE) == [RECORD, RECORD]
    assert index_lines.decoder() is not index_lines._decode_with_json


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(LINE) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, 3),
)
def test_no_change_of_bytes_in_a_line_raises_anything_unexpected(
    changes: list[tuple[int, int]], deletions: int
) -> None:
    text = bytearray(LINE)
    for position, byte in changes:
        text[position] = byte
    if changes and deletions:
        del text[changes[0][0] : changes[0][0] + deletions]
    for record in read_both_ways(bytes(text)):
        if record is not None and record.blob is not None:
            assert record.blob.length <= 2**62 and record.blob.offset >= 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(sorted(json.loads(LINE))), VALUES, min_size=1, max_size=3))
def test_no_values_in_a_line_make_the_reader_fail(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        write_run(folder)
        shutil.copy(index_of(folder), tmp_path / "index")
    shutil.copy(tmp_path / "index", index_of(folder))
    change_line(folder, 1, **changes)
    run = open_run(folder)
    assert len(run) in (2, 3)
    for tensor in run.tensors():
        try:
            tensor.numpy()
            tensor.float64()
        except DriftlineError:
            pass
    assert run.get("site.2").numpy()[0, 0] == 2


def test_a_pipe_in_place_of_a_run_is_refused_without_waiting_for_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadRun, match="neither a file nor a folder"):
        open_run(pipe)
