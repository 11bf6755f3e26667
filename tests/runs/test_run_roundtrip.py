"""What is written is what is read: every type, every shape, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.memory import MemorySink
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.sinks import Sink
from driftline.runs.verify import verify
from driftline.runs.writer import RunWriter

TORCH_DTYPES = sorted(
    name
    for name in DTYPES
    if isinstance(getattr(torch, name, None), torch.dtype) and name not in ("int4", "uint4")
)


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def record(site: str, dtype: str, shape: tuple[int, ...], **changes: Any) -> Record:
    return Record(TensorKey.of(site, "output"), 0, dtype, shape)._replace(**changes)


def put(sink: Sink, site: str, array: np.ndarray[Any, Any], **changes: Any) -> None:
    sink.put(record(site, array.dtype.name, array.shape, **changes), bytes_of(array))


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "run")


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,)], ids=str)
def test_every_torch_dtype_comes_back_byte_for_byte(
    name: str, shape: tuple[int, ...], writer: RunWriter
) -> None:
    count = int(np.prod(shape))
    dtype = DTYPES[name]
    rng = np.random.default_rng(1)
    if name == "bool":
        data = rng.integers(0, 2, count, np.uint8)
    else:
        data = rng.integers(0, 256, dtype.byte_count(count), np.uint8)
    if dtype.bits >= 8 and count:  # the bytes really are a torch tensor of that type
        tensor = torch.from_numpy(data.copy()).view(getattr(torch, name))
        assert tensor.numel() == count
        data = tensor.contiguous().view(torch.uint8).numpy()
    writer.put(record("a", name, shape), data)
    writer.close()
    run = open_run(writer.path)
    tensor_back = run.get(site="a")
    assert tensor_back.dtype == name and tensor_back.shape == shape
    assert tensor_back.raw().view(np.uint8).tobytes() == data.tobytes()
    values = tensor_back.numpy()
    assert values.shape == shape and not values.flags.writeable
    if dtype.bits >= 8 and name != "complex32":
        assert values.tobytes() == data.tobytes()
    decoded = tensor_back.float64()
    assert decoded.shape == shape
    if dtype.bits >= 8 and name in TORCH_DTYPES and count:
        wide = torch.complex128 if dtype.kind == "complex" else torch.float64
        expected = torch.from_numpy(data.copy()).view(getattr(torch, name)).to(wide)
        assert np.array_equal(decoded.reshape(-1), expected.numpy(), equal_nan=True)
    assert not run.losses


def test_numpy_gives_the_type_a_person_expects(writer: RunWriter) -> None:
    writer.put(record("bf16", "bfloat16", (2,)), np.array([0x80, 0x3F, 0, 0xC0], np.uint8))
    writer.put(record("fp8", "float8_e4m3fn", (1,)), np.array([0x38], np.uint8))
    writer.put(record("fp4", "float4_e2m1fn_x2", (3,)), np.array([0x21, 0x0F], np.uint8))
    writer.put(record("int4", "int4", (3,)), np.array([0x8F, 0x07], np.uint8))
    writer.put(record("uint4", "uint4", (3,)), np.array([0x8F, 0x07], np.uint8))
    half = np.array([1.5, -2.0], np.float16)
    writer.put(record("c32", "complex32", (1,)), half.view(np.uint8))
    writer.close()
    run = open_run(writer.path)
    bf16 = run.get("bf16").numpy()
    assert bf16.dtype == ml_dtypes.bfloat16 and bf16.tolist() == [1.0, -2.0]
    assert run.get("fp8").numpy().dtype == ml_dtypes.float8_e4m3fn
    assert run.get("fp8").numpy().tolist() == [1.0]
    fp4 = run.get("fp4").numpy()
    assert fp4.dtype == ml_dtypes.float4_e2m1fn
    assert fp4.astype(np.float64).tolist() == [0.5, 1.0, -6.0]
    assert run.get("fp4").float64().tolist() == [0.5, 1.0, -6.0]
    int4 = run.get("int4").numpy()
    assert int4.dtype == np.int8 and int4.tolist() == [-1, -8, 7]
    assert run.get("uint4").numpy().tolist() == [15, 8, 7]
    assert run.get("c32").numpy().dtype == np.complex64
    assert run.get("c32").numpy().tolist() == [1.5 - 2j]


def test_a_record_keeps_everything_it_knows(writer: RunWriter) -> None:
    sketch = tuple(float(i) / 3 for i in range(64))
    nan, inf = float("nan"), float("inf")
    summary = Summary(7, nan, inf, -inf, 0.1, 1e300, 1, 2, 3, 4, sketch)
    key = TensorKey('a "b" \\ é \n/x', "grad_input", "x.0", 3, 2, phase="forward", moment="before")
    full = Record(
        key,
        99,
        "float32",
        (7,),
        "0",
        "Linear",
        "cuda:0",
        "summary",
        "d:ff",
        None,
        1,
        summary,
        "Shard(0)",
    )
    writer.put(full, None)
    writer.put(full._replace(kept="describe", summary=None, digest=""), None)
    writer.close()
    first, second = open_run(writer.path).records
    assert str(first.summary) == str(summary)  # nan is not equal to itself; as text it is
    assert first._replace(summary=None) == full._replace(summary=None, order=0)
    assert (second.kept, second.order, second.digest) == ("describe", 1, "")


def test_a_live_tensor_may_change_right_after_put(writer: RunWriter) -> None:
    live = np.arange(3_000_000, dtype=np.int64)  # three staging buffers long
    expected = live.copy()
    put(writer, "a", live)
    live[:] = -1
    writer.close()
    assert np.array_equal(open_run(writer.path).get("a").numpy(), expected)


def test_equal_bytes_are_stored_once_whatever_their_type(writer: RunWriter) -> None:
    ones = np.ones(1000, np.float32)
    put(writer, "out", ones)
    put(writer, "next", ones.copy())
    put(writer, "as_ints", ones.view(np.int32))
    put(writer, "other", ones + 1)
    writer.close()
    run = open_run(writer.path)
    assert writer.bytes_written == 8000 and writer.tensors_written == 4
    blobs = [r.blob for r in run.records]
    assert blobs[0] == blobs[1] == blobs[2] != blobs[3]
    assert run.get("as_ints").numpy().dtype == np.int32
    assert run.processes()[0]["repeats"] == 2


def test_tensors_come_in_execution_order_and_not_by_name(writer: RunWriter) -> None:
    names = [f"layers.{i}" for i in (2, 10, 1, 11)]
    for position, name in enumerate(names):
        put(writer, name, np.full(3, position, np.float32))
    writer.close()
    run = open_run(writer.path)
    assert [t.key.site for t in run.tensors()] == names == run.sites()
    assert [t.record.order for t in run.tensors()] == [0, 1, 2, 3] and len(run) == 4


def test_sealed_shards_are_ordinary_safetensors(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", shard_bytes=1 << 20)
    writer.first_header = 4096
    rng = np.random.default_rng(0)
    arrays = {f"layer.{i}": rng.standard_normal(int(rng.integers(1, 9000))) for i in range(120)}
    for name, array in arrays.items():
        put(writer, name, array)
    writer.put(record("bf16 é", "bfloat16", (3, 1)), np.arange(6, dtype=np.uint8))
    writer.put(record("c128", "complex128", (1,)), np.arange(16, dtype=np.uint8))
    writer.put(record("s" * 5000, "int8", (1,)), np.arange(1, dtype=np.uint8))
    writer.close()
    folder = tmp_path / "run" / "rank0"
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        found |= safetensors.torch.load_file(shard)
        with safe_open(shard, "np") as file:
            assert file.metadata() == {"format": "driftline-run 1"}
    for name, array in arrays.items():
        assert np.array_equal(found.pop(f"step0/{name}/output/0").numpy(), array)
    assert found.pop("step0/bf16 é/output/0").dtype == torch.bfloat16
    assert found.pop("step0/c128/output/0").tolist() == list(range(16))
    assert sum(not name.startswith("__pad") for name in found) == 1  # the long one, cut
    run = open_run(tmp_path / "run")
    for tensor in run.tensors():
        blob = tensor.record.blob
        assert blob is not None and blob.offset % 64 == 0
    assert not list(verify(run)) and not run.losses


def test_two_tensors_of_one_name_are_both_in_the_header(writer: RunWriter) -> None:
    for value in range(3):
        put(writer, 'a "quoted" one', np.full(2, value, np.float32))
    writer.close()
    found = safetensors.torch.load_file(writer.path / "rank0" / "tensors-00000.safetensors")
    name = 'step0/a "quoted" one/output/0'
    assert {name: found[name][0].item() for name in found if "__pad" not in name} == {
        name: 0.0,
        f"{name}~1": 1.0,
        f"{name}~2": 2.0,
    }


@pytest.mark.parametrize("header_bytes", [64, 200, 1000])
def test_a_header_too_small_for_one_name_is_followed_by_larger_ones(
    tmp_path: Path, header_bytes: int
) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.first_header = header_bytes
    names = ["\u00e9" * 480, *(f"layer.{i}" for i in range(100))]
    for value, name in enumerate(names):
        put(writer, name, np.full(3, value, np.float32))
    writer.close()
    found: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "run" / "rank0").glob("*.safetensors"):
        found |= safetensors.torch.load_file(shard)
    assert [found[f"step0/{name}/output/0"][0].item() for name in names] == list(range(101))
    run = open_run(tmp_path / "run")
    assert not list(verify(run)) and not run.losses and len(run) == 101


def test_a_sample_keeps_its_elements_and_says_how_sparse_it_is(writer: RunWriter) -> None:
    values = np.arange(10, dtype=np.float32)
    writer.put(
        record("a", "float32", (2, 5), kept="sample", sample_stride=3), bytes_of(values[::3])
    )
    writer.close()
    run = open_run(writer.path)
    tensor = run.get("a")
    assert tensor.shape == (2, 5) and tensor.numpy().tolist() == [0.0, 3.0, 6.0, 9.0]
    assert tensor.float64().tolist() == [0.0, 3.0, 6.0, 9.0] and not list(verify(run))


def test_a_summary_run_has_no_shards_and_says_why_there_are_no_values(writer: RunWriter) -> None:
    summary = Summary(4, 0, 1, 0.5, 0.5, 1.4, 2, 0, 0, 0, tuple([0.0] * 64))
    writer.put(record("a", "float32", (4,), kept="summary", summary=summary), None)
    writer.put(record("b", "float32", (4,), kept="digest"), np.zeros(16, np.uint8))
    writer.close()
    names = sorted(path.name for path in (writer.path / "rank0").iterdir())
    assert names == ["index.jsonl", "process.json"]
    run = open_run(writer.path)
    assert run.get("a").summary == summary and not run.get("a").has_values
    assert run.get("b").record.digest
    with pytest.raises(BadInput, match="only its summary was kept"):
        run.get("a").raw()


def test_events_topology_and_facts_come_back(writer: RunWriter) -> None:
    writer.event("early", "before the first tensor", ratio=float("inf"))
    writer.describe(devices=["cpu"], seeds={"torch": 7})
    writer.topology({"class": "Model", "children": []})
    put(writer, "a", np.ones(2, np.float32))
    writer.step_done(0)
    writer.event("late", "--api-key abc was given")
    writer.close()
    writer.event("later", "after closing")
    run = open_run(writer.path)
    events = list(run.events())
    assert [e["kind"] for e in events] == ["early", "step", "late", "later"]
    assert events[0]["details"] == {"ratio": "inf"} and events[0]["rank"] == 0
    assert "abc" not in events[2]["message"]
    assert run.topology(0) == {"class": "Model", "children": []} and run.topology(5) is None
    facts = run.processes()[0]
    assert (
        facts["seeds"] == {"torch": 7} and facts["dtypes"] == ["float32"] and facts["tensors"] == 1
    )
    assert run.sealed


def test_a_process_without_tensors_leaves_no_folder_but_keeps_its_events(tmp_path: Path) -> None:
    RunWriter(tmp_path / "none").close()
    assert not (tmp_path / "none").exists()
    writer = RunWriter(tmp_path / "run")
    writer.event("refused", "sparse tensors cannot be stored")
    writer.close()
    run = open_run(tmp_path / "run")
    assert [e["kind"] for e in run.events()] == ["refused"] and len(run) == 0
    assert not list((tmp_path / "run").glob("rank*"))


def test_ranks_and_processes_keep_apart(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path / "run", rank=r, world_size=2) for r in (1, 0, 0)]
    for number, writer in enumerate(writers):
        put(writer, "a", np.full(1, number, np.int64))
    for writer in writers:
        writer.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "rank0",
        "rank0.p1",
        "rank1",
        "run.json",
    ]
    run = open_run(tmp_path / "run")
    assert run.get("a", rank=1).numpy() == 0 and run.get("a").numpy() == 1
    assert run.get("a", process=1).numpy() == 2
    assert [str(t.key) for t in run.tensors()] == [
        "rank0/step0/a/output/0",
        "rank0.p1/step0/a/output/0",
        "rank1/step0/a/output/0",
    ]
    assert run.manifest["world_size"] == 2


def test_get_finds_a_slot_by_its_position_and_says_what_is_near(writer: RunWriter) -> None:
    data = np.ones(1, np.float32)
    key = TensorKey.of("model.layers.0", "input", "hidden_states")
    writer.put(Record(key, 0, "float32", (1,), alias="0"), bytes_of(data))
    writer.put(
        Record(key._replace(moment="after"), 0, "float32", (1,), alias="0"), bytes_of(data * 2)
    )
    writer.close()
    run = open_run(writer.path)
    assert run.get("model.layers.0", "input", "hidden_states").numpy() == 1
    assert run.get("model.layers.0", "input").numpy() == 1
    assert run.get("model.layers.0", "input", moment="after").numpy() == 2
    with pytest.raises(BadInput) as caught:
        run.get("model.layer.0")
    assert "model.layers.0" in caught.value.hint
    with pytest.raises(BadInput) as caught:
        run.get("model.layers.0", "input", "hiden_states")
    assert "hidden_states" in caught.value.hint


def test_the_size_limit_lists_what_it_leaves_out(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", max_bytes=10_000)
    for i in range(5):
        put(writer, f"a{i}", np.full(1000, i, np.float32))
    put(writer, "again", np.full(1000, 0, np.float32))
    writer.close()
    run = open_run(tmp_path / "run")
    assert [bool(t.lost) for t in run.tensors()] == [False, False, True, True, True, False]
    assert [e["kind"] for e in run.events()] == ["limit"] and len(run.losses) == 3
    with pytest.raises(BadInput, match="size limit"):
        run.get("a3").numpy()


def test_memory_gives_the_same_run_as_the_disk(writer: RunWriter) -> None:
    sink = MemorySink()
    assert isinstance(sink, Sink) and isinstance(writer, Sink)
    live = np.arange(6, dtype=np.float32).reshape(2, 3)
    for target in (sink, writer):
        put(target, "a", live)
        put(target, "empty", live[:0])
        put(target, "b", live)
        target.topology({"x": 1})
        target.event("k", "m")
    live[:] = 0
    writer.close()
    disk, memory = open_run(writer.path), sink.run()
    assert [(r.key, r.order, r.digest) for r in disk.records] == [
        (r.key, r.order, r.digest) for r in memory.records
    ]
    for there, here in zip(disk.tensors(), memory.tensors(), strict=True):
        assert np.array_equal(there.numpy(), here.numpy()) and not here.numpy().flags.writeable
    assert (
        sink.bytes_written == 24
        and memory.topology() == {"x": 1}
        and memory.get("b").shape == (2, 3)
    )


def test_changed_bytes_do_not_verify(writer: RunWriter) -> None:
    put(writer, "a", np.arange(100, dtype=np.float32))
    put(writer, "b", np.arange(7, dtype=np.float32))
    writer.close()
    run = open_run(writer.path)
    blob = run.get("a").record.blob
    assert blob is not None
    with (writer.path / "rank0" / blob.shard).open("r+b") as file:
        file.seek(blob.offset + 17)
        file.write(b"\xff")
    assert [loss.key.site for loss in verify(open_run(writer.path)) if loss.key] == ["a"]


def test_the_index_holds_one_json_object_per_line(writer: RunWriter) -> None:
    put(writer, "a", np.arange(100, dtype=np.float32), class_name="Linear")
    writer.close()
    (line,) = (writer.path / "rank0" / "index.jsonl").read_text().splitlines()
    parsed = json.loads(line)
    assert parsed["class"] == "Linear" and parsed["shape"] == [100] and parsed["length"] == 400
    assert parsed["digest"].partition(":")[0] in ("xxh3-128", "blake2b-128")


def test_a_hundred_thousand_tensors_open_without_building_them(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    shape = (1, 128, 768)
    for i in range(100_000):
        writer.put(
            record(
                f"model.layers.{i % 997}.mlp", "float32", shape, kept="digest", digest=f"d:{i:x}"
            ),
            None,
        )
    writer.close()
    run = open_run(tmp_path / "run")
    assert len(run) == 100_000 and len(run.sites()) == 997 and not run.losses
    assert run.records[99_999].order == 99_999


def test_a_bare_environment_reads_runs_too(writer: RunWriter) -> None:
    put(writer, "a", np.arange(3, dtype=np.float32))
    writer.put(record("b", "bfloat16", (1,)), np.array([0x80, 0x3F], np.uint8))
    writer.close()
    code = (
        "import sys\n"
        "sys.modules['msgspec'] = sys.modules['ml_dtypes'] = None\n"
        "from driftline.errors import NotInstalled\n"
        "from driftline.runs.reader import open_run\n"
        "run = open_run(sys.argv[1])\n"
        "assert not run.losses and run.get('a').numpy().tolist() == [0, 1, 2]\n"
        "assert run.get('b').float64().tolist() == [1.0]\n"
        "try:\n"
        "    run.get('b').numpy()\n"
        "except NotInstalled as error:\n"
        "    print(error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(writer.path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "pip install ml_dtypes\n", done.stderr


def test_writing_a_run_imports_neither_a_framework_nor_a_reader() -> None:
    code = (
        "import sys, driftline.runs.writer, driftline.runs.memory\n"
        "print(sorted(set(sys.modules) & {'torch', 'pyarrow', 'msgspec', 'ml_dtypes'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_many_losses_of_one_kind_are_said_in_a_hundred(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", max_bytes=4)
    for i in range(500):
        put(writer, f"a{i}", np.full(1, i, np.float32))
    writer.close()
    losses = open_run(tmp_path / "run").losses
    assert len(losses) == 101
    assert str(losses[-1]) == "rank0: 399 more tensors: beyond the size limit of the dump"


def test_too_many_events_before_the_first_tensor_are_counted(writer: RunWriter) -> None:
    for i in range(1005):
        writer.event("note", str(i))
    put(writer, "a", np.ones(1, np.float32))
    writer.close()
    events = list(open_run(writer.path).events())
    assert len(events) == 1001 and events[-1]["message"].startswith("5 more events")
