"""Writes the corpus: small valid inputs of every reader, and inputs that once broke one.

Run again only when a format changes (`python -m fuzz.seeds`); what it writes is checked in, so that
everybody starts from the same bytes. Inputs that a fuzzer found are added by hand.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from driftline.formats.ascend.ge.graph_text import GraphNode
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.kernel import summarize
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter
from fuzz.readers import CORPUS, DATA
from support.ge import GeValue, ge_bytes, ge_tiles, ge_value, graph_text

OLD = DATA / "written_by_0_1_0"
MATRIX = np.arange(6 * 4, dtype=np.float16).reshape(6, 4)


def _npy() -> Iterator[bytes]:
    for values in (
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3)),
        np.array(True),
        np.empty((0, 2**40), np.int8),
        np.array(["word"]),
    ):
        buffer = io.BytesIO()
        np.save(buffer, values)
        yield buffer.getvalue()
    # A shape whose product passes every 64-bit number, and one that is zero all the same.
    for shape in ("(4294967296, 4294967296, 4)", "(0, 9223372036854775807)"):
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        yield b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def _npz() -> Iterator[bytes]:
    arrays = {"a": np.arange(4, dtype=np.float32), "b/c": np.ones((2, 2), np.int16)}
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, **arrays)
        yield buffer.getvalue()


def _torch(legacy: bool) -> Iterator[bytes]:
    values: list[Any] = [
        torch.arange(6, dtype=torch.float32).reshape(2, 3),
        {"weight": torch.ones(3, dtype=torch.bfloat16), "step": 3, "names": ["a", None, 0.5]},
        [torch.zeros(2, 3).T, torch.tensor(1, dtype=torch.int64)],
        {"p": torch.nn.Parameter(torch.ones(2)), "wide": torch.ones(1).expand(4, 4)},
    ]
    for value in values:
        buffer = io.BytesIO()
        torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
        yield buffer.getvalue()
    if not legacy:
        # An archive without a directory at its end: once raised outside of the `try` of a sniffer.
        yield b"PK\x03\x04" + bytes(18) + b"PK\x05\x06" + b"\xff" * 18


def _safetensors() -> Iterator[bytes]:
    header = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [16, 20]},
        "c": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [20, 21]},
        "__metadata__": {"format": "pt"},
    }
    empty = {"a": {"dtype": "F32", "shape": [0, 2**63 - 1], "data_offsets": [0, 0]}}
    for content, data in ((header, bytes(range(21))), (empty, b"")):
        text = json.dumps(content).encode()
        yield struct.pack("<Q", len(text)) + text + data


def _atb() -> Iterator[bytes]:
    for path in sorted((DATA / "ascend" / "atb_bin").glob("*.bin"))[::2]:
        yield path.read_bytes()


def _ge() -> Iterator[bytes]:
    yield ge_bytes("Add_2", [MATRIX, MATRIX], [MATRIX])
    yield ge_bytes("NZ", [ge_tiles(MATRIX)], [ge_value(MATRIX, padding=32)])
    yield ge_bytes("Old", [MATRIX], [MATRIX], version="1.0", bare=True)
    yield ge_bytes("Bits", [GeValue(b"\x05" * 4, 29, (30,))], [GeValue(b"\x21" * 3, 28, (2, 3))])


def _onnx() -> Iterator[bytes]:
    from onnx import TensorProto, helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [weight])
    yield helper.make_model(graph).SerializeToString()
    outside = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    outside.ClearField("float_data")
    outside.data_location = TensorProto.EXTERNAL
    entry = outside.external_data.add()
    entry.key, entry.value = "location", "../outside.bin"
    yield helper.make_model(helper.make_graph([node], "g", [x], [y], [outside])).SerializeToString()


def _tokens() -> Iterator[bytes]:
    from driftline.decoding.files.token_table import SCORES, rows_of, write_part

    scores = {name: np.linspace(0.0, 1.0, 3) for name in SCORES}
    scores["top1_agree"] = np.array([True, False, True])
    scores["rank_of_reference"] = np.arange(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        write_part(path, [rows_of(0, 0, "p", np.arange(3), scores, 3)], {})
        yield path.read_bytes()


def _run(folder: Path) -> None:
    """A small run, whose files are the corpus of the readers of runs."""
    writer = RunWriter(folder)
    writer.first_header = 2048
    writer.topology({"roots": [{"site": "m", "class": "M", "children": []}]})
    summary = summarize(np.arange(4, dtype=np.float32), DTYPES["float32"], count=4)
    for number in range(3):
        key = TensorKey.of(f"site.{number}", "output")
        record = Record(key, 0, "float32", (2, 2), summary=summary)
        writer.put(record, np.full(4, number, np.float32).view(np.uint8))
    writer.event("warning", "a sentence", step=1)
    writer.close()


def _texts() -> dict[str, list[bytes]]:
    tree = {
        "module_path": "M",
        "inputs": {"args": [{"shape": "torch.Size([1, 2])", "dtype": "torch.float32",
                             "mean": "tensor(0.5)", "std": "tensor(1.)", "value": "[1, 2]"}]},
        "outputs": {"shape": "torch.Size([1])", "dtype": "torch.int64", "value": "x.safetensors"},
        "children": [{"module_path": "M.layer.0", "inputs": [], "outputs": None, "children": []}],
    }  # fmt: skip
    nodes = [
        GraphNode("x", "Data"),
        GraphNode('odd "{name}"', "Add", (("x", 0), ("x", 1)), ("add-aten.add.OUTPUT.0", "")),
    ]
    probe = DATA / "msprobe" / "L0_statistics" / "step0" / "proc0"
    dump = json.loads((probe / "dump.json").read_text())
    dump["data"] = dict(list(dump["data"].items())[:3])
    plan = (OLD / "plans" / "names.toml").read_text()
    cut = plan.split("[[pair]]")
    table = json.loads(next((OLD / "tables").glob("**/table.json")).read_text())
    table["rows"] = table["rows"][:2]
    part = json.loads((OLD / "parts" / "shard-1-of-2.json").read_text())
    part["rows"], part["places"], part["pairs"] = part["rows"][:1], [[0, 1]], 2
    calls = next((OLD / "runs").glob("*/rank0/calls.jsonl"), None)
    graphs = next((OLD / "runs").glob("*/rank0/graphs.jsonl"), None)
    return {
        "transformers-debugger": [json.dumps(tree).encode()],
        "ge-graph-text": [graph_text(nodes).encode()],
        "msprobe": [json.dumps(dump).encode()],
        "msprobe-tree": [(probe / "construct.json").read_bytes()],
        "plan": [
            b'plan = 1\n[[pair]]\nreference = "rank0/step0/site.0/output/0"\n'
            b'candidate = "rank0/step0/site.0/output/0"\nby = "name"\n',
            "[[pair]]".join(cut[:3]).encode(),
        ],
        "table": [json.dumps(table).encode()],
        "part": [json.dumps(part).encode()],
        "thresholds": [(OLD / "thresholds" / "tiny-llama-thresholds.json").read_bytes()],
        "mapping-json": [b'{"a.b": "c.d"}', b'{"classes": {"Linear": ["X"]}, "sites": {"a": "b"}}'],
        "mapping-toml": [b'"a.*" = "b.*"\n', b'[sites]\na = "b"\n[classes]\nLinear = ["X"]\n'],
        "calls": [b"\n".join(calls.read_bytes().splitlines()[:4])] if calls else [b"{}"],
        "graphs": [graphs.read_bytes()[:3000]] if graphs else [b'{"off": 1}\n{"name": "g"}'],
        "sending-note": [b'{"url": "s3://a/b", "id": "1", "sent": {"rank0/index.jsonl": 3}}'],
    }  # fmt: skip


def write() -> None:
    binary = {
        "npy": list(_npy()),
        "npz": list(_npz()),
        "torch-zip": list(_torch(False)),
        "torch-legacy": list(_torch(True)),
        "safetensors": list(_safetensors()),
        "atb": list(_atb()),
        "ge": list(_ge()),
        "fx": list(_npy()),
        "paddle": list(_npy()),
        "onnx": list(_onnx()),
        "tokens-parquet": list(_tokens()),
    }
    skeleton = CORPUS.parent / "skeletons" / "run"
    shutil.rmtree(skeleton, ignore_errors=True)
    _run(skeleton)
    process = json.loads((skeleton / "rank0" / "process.json").read_text())
    kept = {name: process[name] for name in ("rank", "process", "sealed", "tensors", "versions")
            if name in process}  # fmt: skip
    (skeleton / "rank0" / "process.json").write_text(json.dumps(kept))
    manifest = json.loads((skeleton / "run.json").read_text())
    kept = {name: manifest[name] for name in ("format", "schema", "id") if name in manifest}
    (skeleton / "run.json").write_text(json.dumps(kept))
    runs = {
        "shard": ["rank0/tensors-00000.safetensors"],
        "run-index": ["rank0/index.jsonl"],
        "run-manifest": ["run.json"],
        "run-process": ["rank0/process.json"],
        "run-events": ["rank0/events.jsonl"],
        "run-topology": ["rank0/topology.json"],
    }
    inputs = {
        name: [(skeleton / file).read_bytes() for file in files] for name, files in runs.items()
    }
    for name, contents in (binary | _texts() | inputs).items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(contents):
            (folder / f"seed-{number}").write_bytes(content)


if __name__ == "__main__":
    write()
