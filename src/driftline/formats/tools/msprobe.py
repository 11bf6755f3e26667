"""Dumps of MindStudio Probe (msprobe): `step{n}/rank{r}/dump.json` and its tensor files.

Levels are L0 (modules), L1 (functions) and mix; tasks are tensor, statistics and md5. A module's
site is its path; a function's site is, for example, `Functional.linear`. The call index is the
visit. What msprobe calls the input of a backward is the gradient of the output, and the reverse.
`construct.json` gives the module tree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.errors import BadFile
from driftline.formats.dump_run import Leaf, TreeRun, partial_summary
from driftline.formats.folder import Folder, natural
from driftline.formats.tensor_files import describe, unreadable
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.local_files import folders_in, reason_of
from driftline.runs.records import Port, Record, TensorKey

NAME = "msprobe"
DUMP = "dump.json"
CONSTRUCT = "construct.json"
DATA = "dump_tensor_data"
LARGEST_JSON = 1 << 30
DEEPEST = 32
_STEP = re.compile(r"step(\d+)")
_PART = re.compile(r"rank(\d*)|proc(\d+)")
# `Module.{path}.{class}.{forward|backward}.{call}`; MindSpore has Cell instead of Module.
_MODULE = re.compile(
    r"(?:Module|Cell)\.(.+)\.([^.]+)\.(forward|backward|parameters_grad)\.(\d{1,18})", re.DOTALL
)
_FUNCTION = re.compile(r"([A-Za-z_]+\..+)\.(\d{1,18})\.(forward|backward)", re.DOTALL)


class _Call(NamedTuple):
    site: str
    class_name: str
    phase: str
    visit: int


class _Part(NamedTuple):
    folder: Path
    step: int
    name: str


def sniff(path: Path) -> bool:
    return next(_parts(path), None) is not None


def open(path: Path) -> TreeRun:
    """Open the dump as a run.

    Raises:
        BadFile: No `dump.json` can be read.
    """
    reader = _Reader(path)
    parts = sorted(_parts(path), key=lambda part: (part.step, natural(part.name)))
    names = sorted({part.name for part in parts}, key=natural)
    ranks = {name: _rank(name) for name in names}
    for part in parts:
        rank = ranks[part.name]
        # Processes without a rank share rank 0 and are distinguished by their position.
        alike = [name for name in names if ranks[name] == rank]
        reader.read(part, rank, alike.index(part.name))
    if not reader.leaves and reader.troubles:
        raise BadFile(f"{path} is a dump of msprobe that cannot be read: {reader.troubles[0]}")
    return TreeRun(
        path,
        NAME,
        reader.leaves,
        topologies=reader.topologies,
        events=reader.events,
        facts=reader.facts,
    )


def _parts(path: Path) -> Iterator[_Part]:
    if (path / DUMP).is_file() and _PART.fullmatch(path.name):
        match = _STEP.fullmatch(path.parent.name)
        yield _Part(path, int(match[1]) if match else 0, path.name)
    # A copied folder may have any name; both files together identify msprobe.
    elif (path / DUMP).is_file() and (path / CONSTRUCT).is_file():
        yield _Part(path, 0, "rank0")
    elif match := _STEP.fullmatch(path.name):
        yield from _in_step(path, int(match[1]))
    else:
        for name in folders_in(path):
            if match := _STEP.fullmatch(name):
                yield from _in_step(path / name, int(match[1]))


def _in_step(path: Path, step: int) -> Iterator[_Part]:
    for name in folders_in(path):
        if _PART.fullmatch(name) and (path / name / DUMP).is_file():
            yield _Part(path / name, step, name)


def _rank(name: str) -> int:
    match = _PART.fullmatch(name)
    return int(match[1]) if match and match[1] else 0


def _call(name: str) -> _Call | None:
    if match := _MODULE.fullmatch(name):
        return _Call(match[1], match[2], match[3], int(match[4]))
    if match := _FUNCTION.fullmatch(name):
        return _Call(match[1], match[1].rpartition(".")[2], match[3], int(match[2]))
    return None


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.leaves: list[Leaf] = []
        self.topologies: dict[tuple[int, int], dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.troubles: list[str] = []
        self.facts: dict[str, Any] = {}

    def read(self, part: _Part, rank: int, process: int) -> None:
        folder = Folder(part.folder)
        try:
            dump = _object(json.loads(folder.read(DUMP, LARGEST_JSON)))
            calls = _object(dump.get("data"))
        except (OSError, ValueError, RecursionError) as trouble:
            message = f"{self._source(part, DUMP)}: {reason_of(trouble)}"
            # One unreadable rank must not hide the others.
            self.troubles.append(message)
            self.events.append({"kind": "dump", "message": message})
            return
        # Taken from the last part read, because all parts of a dump share them.
        for fact in ("task", "level", "framework"):
            if dump.get(fact):
                self.facts[fact] = str(dump[fact])
        # One listing instead of a disk access for every tensor.
        present = set(folder.files(DATA)) if (part.folder / DATA).is_dir() else set[str]()
        base = TensorKey("", "output", "0", part.step, 0, rank, process)
        for name, sides in calls.items():
            call = _call(name)
            if call is None or not isinstance(sides, Mapping):
                self.events.append({"kind": "dump", "message": f"'{name}' is not understood"})
                continue
            for port, slot, entry in _entries(call, cast("Mapping[str, Any]", sides)):
                usual = TensorKey.of(call.site, port, slot)
                key = base._replace(
                    site=call.site,
                    port=port,
                    slot=slot,
                    visit=call.visit,
                    phase=usual.phase,
                    moment=usual.moment,
                )
                self.leaves.append(self._leaf(part, folder, present, key, call, entry))
        tree = _topology(folder)
        if tree is not None:
            self.topologies.setdefault((rank, process), tree)
        for text in folder.not_entered:
            self.events.append({"kind": "dump", "message": text})

    def _leaf(
        self,
        part: _Part,
        folder: Folder,
        present: set[str],
        key: TensorKey,
        call: _Call,
        entry: Mapping[str, Any],
    ) -> Leaf:
        dtype = str(entry.get("dtype", "")).rpartition(".")[2].lower()
        shape = _shape(entry.get("shape"))
        record = Record(key, 0, dtype, shape, class_name=call.class_name)
        data_name = entry.get("data_name")
        # `-1` stands for a tensor that was not saved.
        if isinstance(data_name, str) and data_name not in ("", "-1"):
            file = f"{DATA}/{data_name}"
            members = [unreadable(f"{file} is not there")]
            if file in present:
                members = describe(folder, file)
            member = members[0] if len(members) == 1 else unreadable("it is no single tensor")
            source = self._source(part, file)
            if member.trouble:
                return Leaf(record._replace(lost=member.trouble), source)
            # The file overrides the description: bfloat16 may have been widened when saved.
            record = record._replace(dtype=member.dtype, shape=member.shape)
            return Leaf(record, source, member.fetch)
        source = self._source(part, DUMP)
        if dtype not in DTYPES:
            lost = f"the element type {dtype or 'of it'} is not known"
            return Leaf(record._replace(lost=lost), source)
        digest = entry.get("md5")
        if isinstance(digest, str) and digest:
            return Leaf(record._replace(kept="digest", digest=f"crc32:{digest[:64]}"), source)
        summary = partial_summary(
            math.prod(shape),
            low=_number(entry.get("Min")),
            high=_number(entry.get("Max")),
            mean=_number(entry.get("Mean")),
            l2=_number(entry.get("Norm")),
        )
        return Leaf(record._replace(kept="summary", summary=summary), source)

    def _source(self, part: _Part, name: str) -> str:
        place = part.folder / name
        return str(place.relative_to(self.path)) if part.folder != self.path else name


def _entries(
    call: _Call, sides: Mapping[str, Any]
) -> Iterator[tuple[Port, str, Mapping[str, Any]]]:
    """Port, slot and description of every tensor of a call."""
    if call.phase == "parameters_grad":
        for name, value in sides.items():
            for slot, entry in _tensors(value, "", 0):
                yield "param_grad", name if slot in ("", "0") else f"{name}.{slot}", entry
        return
    ports: dict[str, Port] = {
        "input_args": "input",
        "input_kwargs": "input",
        "input": "input",
        "parameters": "param",
        "output": "output",
    }
    # msprobe names the sides from the view of the backward function.
    if call.phase == "backward":
        ports = {"input": "grad_output", "output": "grad_input"}
    for side, port in ports.items():
        for slot, entry in _tensors(sides.get(side), "", 0):
            yield port, slot or "0", entry


def _tensors(value: Any, slot: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if depth > DEEPEST:
        return
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _tensors(item, f"{slot}.{index}" if slot else str(index), depth + 1)
    elif isinstance(value, dict):
        entry = cast("dict[str, Any]", value)
        # A description has a type; a dict without one is a container of descriptions.
        if isinstance(entry.get("type"), str):
            if "shape" in entry and "dtype" in entry:
                yield slot, entry
            return
        for name, item in entry.items():
            yield from _tensors(item, f"{slot}.{name}" if slot else str(name), depth + 1)


def _topology(folder: Folder) -> dict[str, Any] | None:
    """The module tree of the calls in `construct.json`; None without modules."""
    try:
        parents = _object(json.loads(folder.read(CONSTRUCT, LARGEST_JSON)))
    except (OSError, ValueError, RecursionError):
        return None
    nodes: dict[str, dict[str, Any]] = {}
    above: dict[str, str] = {}
    for name, parent in parents.items():
        match = _MODULE.fullmatch(name)
        # Modules are called several times; the first call determines the place in the tree.
        if match is None or match[3] != "forward" or match[1] in nodes:
            continue
        nodes[match[1]] = {"site": match[1], "class": match[2], "ids": None}
        outer = _MODULE.fullmatch(parent) if isinstance(parent, str) else None
        # A caller whose path does not contain the module could make a circle in the tree.
        if outer is not None and match[1].startswith(f"{outer[1]}."):
            above[match[1]] = outer[1]
    if not nodes:
        return None
    roots: list[dict[str, Any]] = []
    for site, node in nodes.items():
        # A parent's path is a part of its child's path, so there can be no circle.
        outer_node = nodes.get(above.get(site, ""))
        if outer_node is None:
            roots.append(node)
        else:
            node["name"] = site.removeprefix(f"{above[site]}.")
            outer_node.setdefault("children", []).append(node)
    return {"schema": 1, "roots": roots, "order": list(nodes)}


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not the JSON object that it should be")
    return cast("Mapping[str, Any]", value)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    sizes = cast("list[Any]", value)
    return tuple(size if type(size) is int and size >= 0 else 0 for size in sizes)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return math.nan
    return math.nan
