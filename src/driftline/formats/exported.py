"""The list of keys that `driftline convert --to npy|pt|safetensors` leaves beside the files.

`driftline_tensors.jsonl`: a line per tensor says which file it lies in and which key it had, so
that the folder reads back as the run it came from. A line per module tree and per event follows.
The files themselves need no list: any program reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from driftline.errors import BadFile
from driftline.formats.folder import Folder
from driftline.formats.member import Member
from driftline.formats.parts import describe, unreadable
from driftline.formats.tree import Leaf, TreeRun
from driftline.numerics.dtypes import DTYPES
from driftline.runs.facts import RUN_KEYS, read_process
from driftline.runs.inside import reason_of
from driftline.runs.key import PORTS, TensorKey, usual_moment, usual_phase
from driftline.runs.record import Record

LIST = "driftline_tensors.jsonl"
SCHEMA = "driftline.tensors/1"
LARGEST_LIST = 1 << 30
_PHASES = ("forward", "backward", "recompute")
_MOMENTS = ("before", "after")


def is_there(path: Path) -> bool:
    return (path / LIST).is_file()


def line_of(record: Record, file: str, name: str, stored: str) -> dict[str, Any]:
    """What the list says of one tensor.

    Args:
        record: The tensor in the run.
        file: File it was written to, relative to the folder.
        name: Its name inside that file; empty in a file of one tensor.
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
    """The folder as the run that was converted.

    Raises:
        BadFile: The list cannot be believed.
    """
    place = folder.path / LIST
    try:
        text = folder.read(LIST, LARGEST_LIST).decode()
    except (OSError, UnicodeDecodeError) as trouble:
        raise BadFile(f"{place} cannot be read: {reason_of(trouble)}") from trouble
    there = set(folder.files())
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
                leaves.append(_leaf(folder, line, there, members))
            elif "topology" in line:
                topologies[int(line["rank"]), int(line["process"])] = line["topology"]
            elif "event" in line:
                events.append(dict(line["event"]))
            elif line.get("schema") != SCHEMA:
                raise ValueError("it is of no kind that is known")
            else:
                told = dict(line.get("facts", {}))  # not there in lists of 0.1.0
                facts = {name: told[name] for name in RUN_KEYS if name in told}
                facts["converted_from"] = str(line.get("converted_from", ""))
                processes = [read_process(each).to_json() for each in told.get("processes", [])]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as trouble:
            raise BadFile(
                f"{place}, line {number}, cannot be believed: {reason_of(trouble)}",
                hint="remove that file to read the folder as plain tensor files",
            ) from trouble
    return TreeRun(
        folder.path,
        format_name,
        leaves,
        topologies=topologies,
        events=events,
        facts=facts,
        processes=processes,
    )


def _leaf(
    folder: Folder,
    line: Mapping[str, Any],
    there: set[str],
    members: dict[str, dict[str, Member]],
) -> Leaf:
    file = str(line["file"])
    if file not in members:
        found = describe(folder, file) if file in there else [unreadable("the file is not there")]
        members[file] = {member.name: member for member in found}
    inside = members[file]
    member = inside.get(str(line["name"])) or _only(inside)
    port = line["port"]
    if port not in PORTS:
        raise ValueError(f"there is no port {str(port)[:40]!r}")
    phase, moment = line.get("phase", usual_phase(port)), line.get("moment", usual_moment(port))
    if phase not in _PHASES or moment not in _MOMENTS:
        raise ValueError("its phase or moment is none")
    key = TensorKey(
        str(line["site"]),
        port,
        str(line["slot"]),
        _whole(line, "step"),
        _whole(line, "visit"),
        _whole(line, "rank"),
        _whole(line, "process"),
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
    if line["stored"] == "bytes":
        dtype = str(line["dtype"])
        if DTYPES[dtype].byte_count(_elements(shape, kept, stride)) != _elements(member.shape):
            raise ValueError("its bytes are not those of its shape")

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


def _only(inside: Mapping[str, Member]) -> Member:
    if len(inside) == 1:
        member = next(iter(inside.values()))
        if member.trouble or not member.name:
            return member
    return unreadable("the file does not hold it")


def _whole(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name, 0)
    if type(value) is not int or value < 0:
        raise ValueError(f"its {name} is no count")
    return value


def _elements(shape: tuple[int, ...], kept: str = "full", stride: int = 1) -> int:
    count = 1
    for size in shape:
        count *= size
    return -(-count // stride) if kept == "sample" else count
