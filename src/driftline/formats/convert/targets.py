"""Write files for other programs from a run, with a list of keys next to them.

`driftline_tensors.jsonl` has a line for each tensor with its file and its key, so that the folder
can be read as the run from which it was written; lines for module trees and events follow. The
first part of this file reads the list; the second writes it, and the `.npy`, `.pt` or
`.safetensors` files. Other programs read these files without the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from driftline.errors import BadFile
from driftline.formats.dump_run import Leaf, Member, TreeRun
from driftline.formats.folder import Folder
from driftline.formats.tensor_files import describe, unreadable
from driftline.numerics.dtypes import DTYPES, unpack_nibbles, value_table
from driftline.registry import require
from driftline.runs.facts import RUN_KEYS, read_process
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import PORTS, Record, TensorKey, usual_moment, usual_phase
from driftline.runs.run import Storage, kept_elements
from driftline.runs.sinks import JSON

LIST = "driftline_tensors.jsonl"
SCHEMA = "driftline.tensors/1"
LARGEST_LIST = 1 << 30
_PHASES = ("forward", "backward", "recompute")
_MOMENTS = ("before", "after")


def has_list(path: Path) -> bool:
    return (path / LIST).is_file()


def line_of(record: Record, file: str, name: str, stored: str) -> dict[str, Any]:
    """The line of one tensor in the list.

    Args:
        record: The tensor in the run.
        file: Path of the file, relative to the folder.
        name: Name of the tensor inside that file; empty if the file has one tensor.
        stored: Element type in the file; `bytes` for the plain bytes of `record.dtype`.
    """
    key = record.key
    line: dict[str, Any] = {
        "file": file,
        "name": name,
        "rank": key.rank,
        "process": key.process,
        "step": key.step,
        "site": key.site,
        "visit": key.visit,
        "port": key.port,
        "slot": key.slot,
        "phase": key.phase,
        "moment": key.moment,
        "dtype": record.dtype,
        "stored": stored,
        "shape": list(record.shape),
        "kept": record.kept,
        "sample_stride": record.sample_stride,
        "alias": record.alias,
        "class": record.class_name,
        "device": record.device,
        "placement": record.placement,
    }
    return {name: value for name, value in line.items() if value != "" or name == "name"}


def open_exported(folder: Folder, format_name: str) -> TreeRun:
    """Open the folder as the run that was converted.

    Raises:
        BadFile: The list is not valid.
    """
    place = folder.path / LIST
    try:
        text = folder.read(LIST, LARGEST_LIST).decode()
    except (OSError, UnicodeDecodeError) as trouble:
        raise BadFile(f"{place} cannot be read: {reason_of(trouble)}") from trouble
    # The list is not trusted: only files that were found in the folder are opened.
    present = set(folder.files())
    members: dict[str, dict[str, Member]] = {}
    leaves: list[Leaf] = []
    events: list[Mapping[str, Any]] = []
    topologies: dict[tuple[int, int], Mapping[str, Any]] = {}
    facts: dict[str, Any] = {}
    processes: list[Mapping[str, Any]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(raw)
            if "file" in line:
                leaves.append(_leaf(folder, line, present, members))
            elif "topology" in line:
                topologies[int(line["rank"]), int(line["process"])] = line["topology"]
            elif "event" in line:
                events.append(dict(line["event"]))
            elif line.get("schema") != SCHEMA:
                raise ValueError("it is of no kind that is known")
            else:
                listed_facts = dict(line.get("facts", {}))  # missing in lists of 0.1.0
                facts = {name: listed_facts[name] for name in RUN_KEYS if name in listed_facts}
                facts["converted_from"] = str(line.get("converted_from", ""))
                processes = [
                    read_process(process_facts).to_json()
                    for process_facts in listed_facts.get("processes", [])
                ]
        # A line may hold any JSON; any error becomes one refusal with the line's number.
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as trouble:
            raise BadFile(
                f"{place}, line {number}, cannot be believed: {reason_of(trouble)}",
                hint="remove that file to read the folder as plain tensor files",
            ) from trouble
    run = _ExportedRun(
        folder.path, format_name, leaves, topologies=topologies, events=events, facts=facts
    )
    run.listed_processes = processes
    return run


class _ExportedRun(TreeRun):
    """A converted folder; its list also stores the facts of each process."""

    listed_processes: Sequence[Mapping[str, Any]] = ()

    def processes(self) -> list[Mapping[str, Any]]:
        return list(self.listed_processes)


def _leaf(
    folder: Folder,
    line: Mapping[str, Any],
    present: set[str],
    members: dict[str, dict[str, Member]],
) -> Leaf:
    file = str(line["file"])
    if file not in members:
        described = (
            describe(folder, file) if file in present else [unreadable("the file is not there")]
        )
        members[file] = {member.name: member for member in described}
    inside = members[file]
    # A file of one tensor may give it any name.
    member = inside.get(str(line["name"])) or _only_member(inside)
    port = line["port"]
    # Checked before a key is made, because an unknown port would fail far from here.
    if port not in PORTS:
        raise ValueError(f"there is no port {str(port)[:40]!r}")
    phase, moment = line.get("phase", usual_phase(port)), line.get("moment", usual_moment(port))
    if phase not in _PHASES or moment not in _MOMENTS:
        raise ValueError("its phase or moment is none")
    key = TensorKey(
        str(line["site"]),
        port,
        str(line["slot"]),
        _count(line, "step"),
        _count(line, "visit"),
        _count(line, "rank"),
        _count(line, "process"),
        phase,
        moment,
    )
    if member.trouble:
        return Leaf(Record(key, 0, member.dtype, member.shape, lost=member.trouble), file)
    kept, stride = line.get("kept", "full"), int(line.get("sample_stride", 1))
    if kept not in ("full", "sample") or stride < 1:
        raise ValueError(f"a tensor in a file was not kept as {str(kept)[:40]!r}")
    shape = tuple(int(size) for size in line["shape"])
    dtype, fetch = member.dtype, member.fetch
    # The file's format lacks the type, so the plain bytes were written.
    if line["stored"] == "bytes":
        dtype = str(line["dtype"])
        if DTYPES[dtype].byte_count(_elements(shape, kept, stride)) != _elements(member.shape):
            raise ValueError("its bytes are not those of its shape")

        # Defaults bind the values now; a plain closure would see those of the last line.
        def raw_bytes(fetch: Any = fetch, storage: str = DTYPES[dtype].storage) -> Any:
            return fetch().view(storage)

        fetch = raw_bytes
    elif _elements(shape, kept, stride) != _elements(member.shape):
        raise ValueError(f"{file} holds another number of elements")
    record = Record(
        key,
        0,
        dtype,
        shape,
        alias=str(line.get("alias", "")),
        class_name=str(line.get("class", "")),
        device=str(line.get("device", "")),
        kept=cast("Any", kept),
        sample_stride=stride,
        placement=str(line.get("placement", "")),
    )
    return Leaf(record, file, fetch)


def _only_member(inside: Mapping[str, Member]) -> Member:
    if len(inside) == 1:
        member = next(iter(inside.values()))
        if member.trouble or not member.name:
            return member
    return unreadable("the file does not hold it")


def _count(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name, 0)
    # `True` is an int in Python, but not a count.
    if type(value) is not int or value < 0:
        raise ValueError(f"its {name} is no count")
    return value


def _elements(shape: tuple[int, ...], kept: str = "full", stride: int = 1) -> int:
    count = 1
    for size in shape:
        count *= size
    return -(-count // stride) if kept == "sample" else count


# ---- Writing


_UNSAFE = re.compile(r"[^0-9A-Za-z_.+@=()-]")
# File systems allow 255 bytes; suffixes and numbers are added.
_LONGEST_NAME = 120
_HEADER_UNIT = 8

Values = Callable[[Record], Storage]
Array = np.ndarray[Any, np.dtype[Any]]


class TensorList:
    """The list of keys, written line by line."""

    def __init__(self, folder: Path, source: str, facts: Mapping[str, JSON]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / LIST).open("w", encoding="utf-8")
        self._write({"schema": SCHEMA, "converted_from": source, "facts": facts})

    def tensor(self, record: Record, file: str, name: str, stored: str) -> None:
        self._write(line_of(record, file, name, stored))

    def topology(self, rank: int, process: int, tree: Mapping[str, Any]) -> None:
        self._write({"topology": tree, "rank": rank, "process": process})

    def event(self, event: Mapping[str, Any]) -> None:
        self._write({"event": dict(event)})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def widened(raw: Storage, record: Record) -> Array:
    """Values in their shape; types that numpy lacks become wider types, exactly."""
    dtype = DTYPES[record.dtype]
    count = kept_elements(record)
    values: Array
    # numpy has no four-bit types, so each value becomes a byte or a float32.
    if dtype.bits == 4:
        codes = unpack_nibbles(raw.view(np.uint8), count)
        if dtype.kind == "float":
            values = value_table(dtype.name).astype(np.float32)[codes]
        elif dtype.kind == "int":
            signed = codes.view(np.int8)
            values = np.where(signed > 7, signed - 16, signed).astype(np.int8)
        else:
            values = codes
    elif dtype.name == "bfloat16":
        # bfloat16 is the upper half of a float32.
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif dtype.name == "complex32":
        values = raw.view("<f2").astype(np.float32).view(np.complex64)
    elif dtype.kind == "float" and dtype.bits == 8:
        # float32 holds all values of these types, from 2**-127 to 448 and beyond.
        values = value_table(dtype.name).astype(np.float32)[raw.view(np.uint8)]
    else:
        values = raw
    return values if record.kept == "sample" else values.reshape(record.shape)


def safe_name(text: str) -> str:
    """A path component without separators and special characters, of limited length."""
    plain = _UNSAFE.sub("_", text)[:_LONGEST_NAME]
    # `.` and `..` consist only of dots.
    return f"_{plain}" if plain.strip(".") == "" else plain


class FilePerTensor:
    """Writes `.npy` or `.pt` files below a folder."""

    def __init__(self, folder: Path, suffix: str, listed: TensorList) -> None:
        self.folder = folder
        self.suffix = suffix
        self._listed = listed
        self._taken: set[str] = set()
        self._torch: Any = require("torch", install="torch") if suffix == ".pt" else None

    def put(self, record: Record, raw: Storage) -> int:
        """Write one tensor; returns the number of bytes of its values in the file.

        Raises:
            OSError: The disk refused the write.
        """
        name = self._name(record)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._torch is None:
            array = widened(raw, record)
            np.save(path, array, allow_pickle=False)
            stored, size = array.dtype.name, array.nbytes
        else:
            tensor = self._tensor(record, raw)
            try:
                self._torch.save(tensor, path)
            except RuntimeError as trouble:  # torch's error for a full disk
                raise OSError(0, str(trouble).splitlines()[0][:160]) from trouble
            stored, size = str(tensor.dtype).removeprefix("torch."), int(tensor.nbytes)
        self._listed.tensor(record, name, "", stored)
        return size

    def _tensor(self, record: Record, raw: Storage) -> Any:
        dtype = getattr(self._torch, record.dtype, None)
        shape = tuple(record.shape) if record.kept == "full" else (-1,)
        if DTYPES[record.dtype].bits == 4:
            if record.dtype in ("int4", "uint4") or not shape or shape[-1] % 2 or shape[-1] < 0:
                return self._torch.from_numpy(widened(raw, record).copy())
            shape = (*shape[:-1], shape[-1] // 2)
        if raw.nbytes == 0:
            return self._torch.empty(tuple(record.shape), dtype=dtype)
        # A copy, because torch warns about read-only memory, and must not alias a mapped file.
        owned = self._torch.frombuffer(bytearray(raw.tobytes()), dtype=self._torch.uint8)
        return owned.view(dtype).reshape(shape)

    def _name(self, record: Record) -> str:
        key = record.key
        rank = f"rank{key.rank}" + (f".p{key.process}" if key.process else "")
        stem = f"{key.port}_{key.slot}"
        stem += f".visit{key.visit}" if key.visit else ""
        stem += f".{key.phase}" if key.phase != usual_phase(key.port) else ""
        stem += f".{key.moment}" if key.moment != usual_moment(key.port) else ""
        plain = f"{rank}/step{key.step}/{safe_name(key.site)}/{safe_name(stem)}"
        name, count = plain + self.suffix, 1
        # Different names may become the same safe name; neither file may be overwritten.
        while name in self._taken:
            count += 1
            name = f"{plain}~{count}{self.suffix}"
        self._taken.add(name)
        return name


def write_safetensors(
    folder: Path, records: Iterable[Record], values: Values, listed: TensorList
) -> int:
    """Write the tensors of one rank, one file per step; returns the number of bytes of values.

    Raises:
        OSError: The disk refused the write.
    """
    by_step: dict[int, list[Record]] = {}
    for record in records:
        by_step.setdefault(record.key.step, []).append(record)
    return sum(_write_step(folder, step, some, values, listed) for step, some in by_step.items())


def _write_step(
    folder: Path, step: int, records: Sequence[Record], values: Values, listed: TensorList
) -> int:
    key = records[0].key
    rank = f"rank{key.rank}" + (f".p{key.process}" if key.process else "")
    file = f"{rank}/step{step}.safetensors"
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    offset = 0
    for record in records:
        # Without rank and step, which the file's name has.
        name = str(record.key).partition("/")[2].partition("/")[2]
        dtype = DTYPES[record.dtype]
        size = dtype.byte_count(kept_elements(record))
        # U8 stands for every type that safetensors lacks.
        plain = dtype.safetensors != "U8" or dtype.name == "uint8"
        shape = list(record.shape) if record.kept == "full" else [kept_elements(record)]
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": shape if plain else [size],
            "data_offsets": [offset, offset + size],
        }
        listed.tensor(record, file, name, record.dtype if plain else "bytes")
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # safetensors requires a header whose length is a multiple of eight bytes.
    text += b" " * (-len(text) % _HEADER_UNIT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for record in records:
            stream.write(cast("Any", np.ascontiguousarray(values(record))).view(np.uint8).data)
    return offset
