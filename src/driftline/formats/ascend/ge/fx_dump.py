"""Open an FX dump as a run: inputs and outputs of each node of a traced graph, one `.npy` per
tensor.

    gm_{stamp}_dump/{step}/…                             steps counted from 1
    data_dump/{step}/gm_{stamp}_dump/…                   steps counted from 1
    worldsize{W}_global_rank{R}/{graph}/{step}/…         steps counted from 0
        {node}-{target}.INPUT.{i}[.{j}].{stamp}.npy, ….OUTPUT.{i}.{stamp}.npy

The run counts steps from 0, whatever the layout. A node is a site; if a dump holds several graphs,
the graph's name is the prefix. The writer of the dump widened bfloat16 to float32.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from driftline.formats.ascend.ge.graph_text import as_json, topology
from driftline.formats.dump_run import Leaf, TreeRun, refuse_several
from driftline.formats.folder import Folder, natural, some_names
from driftline.formats.tensor_files import describe, leaf
from driftline.runs.records import TensorKey

NAME = "fx-dump"
SNIFFED = 4000
LEVELS = 4

_FILE = re.compile(
    r"(?P<node>[^-]+)-(?P<target>.+)\.(?P<port>INPUT|OUTPUT)\.(?P<slot>\d{1,9}(?:\.\d{1,9}){0,3})"
    r"\.(?P<stamp>\d{14,20})\.npy",
    re.ASCII,
)
_GM = re.compile(r"gm_(\d+)_dump", re.ASCII)
_WORLD = re.compile(r"worldsize(\d+)_global_rank(\d+)", re.ASCII)
_DESCR = re.compile(rb"'descr': '([<>|=]?)([USO])\d*'")
_LONGEST_WORD = 4096


class Place(NamedTuple):
    """The content of the folder names; `counts_from_one` says that steps count from 1."""

    rank: int = 0
    graph: str = ""
    step: int = 0
    counts_from_one: bool = False


class _TensorFile(NamedTuple):
    place: Place
    path: str
    node: str
    target: str
    port: str
    slot: str
    stamp: str


def parse_place(folders: list[str]) -> Place:
    """Parse folder names, outermost first; folders above the dump are ignored."""
    # Innermost folders decide, so that the dump's location on this machine does not matter.
    last = folders[-1] if folders else ""
    before = folders[-2] if len(folders) > 1 else ""
    if _GM.fullmatch(last):  # data_dump/{step}/gm_…
        return Place(0, last, int(before) if _is_number(before) else 1, True)
    if not _is_number(last):
        return Place(graph=last if len(folders) > 1 and _WORLD.fullmatch(before) else "")
    if _GM.fullmatch(before):  # gm_…/{step}
        return Place(0, before, int(last), True)
    world = next((w for w in map(_WORLD.fullmatch, reversed(folders[-3:-1])) if w), None)
    named = bool(world) and not _WORLD.fullmatch(before)
    return Place(int(world[2][:9]) if world else 0, before if named else "", int(last))


def _top_of(folders: list[str]) -> str:
    """The folders above those of a dump's own layout."""
    for depth, part in enumerate(folders):
        if part == "data_dump" or _GM.fullmatch(part) or _WORLD.fullmatch(part):
            # A number above the graph's folder is a step of the dump, not a part of the path to it.
            steps = part != "data_dump" and depth > 0 and _is_number(folders[depth - 1])
            return "/".join(folders[: depth - 1 if steps else depth])
    return ""


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10


def sniff(path: Path) -> bool:
    """Whether a folder holds FX files, at any level of a dump."""
    names = some_names(str(path), LEVELS + 3, SNIFFED)
    return any(_FILE.fullmatch(name) for name in names)


def open(path: Path) -> TreeRun:
    """Open the dump as a run; headers are read, values are not."""
    folder = Folder(path)
    events: list[dict[str, Any]] = []
    files = _collected(folder, events)
    graphs = sorted({file.place.graph for file in files}, key=natural)
    # A single graph needs no prefix, so that its sites are those of the program.
    prefixes = {name: f"{name}." if len(graphs) > 1 and name else "" for name in graphs}
    leaves: list[Leaf] = []
    visits: dict[TensorKey, int] = defaultdict(int)
    for file in sorted(files, key=_execution_order):
        tensor = _leaf(folder, file, prefixes[file.place.graph], visits, events)
        if tensor is not None:
            leaves.append(tensor)
    classes: dict[int, dict[str, str]] = defaultdict(dict)
    for record in (tensor.record for tensor in leaves):
        classes[record.key.rank].setdefault(record.key.site, record.class_name)
    topologies = {
        (rank, 0): topology(
            [as_json(name, prefixes[name], "", "fx", ()) for name in graphs], classes[rank]
        )
        for rank in classes
    }
    facts = {"graphs": graphs, "note": "bfloat16 is widened to float32 in FX dumps"}
    events.sort(key=lambda event: event["kind"] == "argument")  # problems go first
    return TreeRun(path, NAME, leaves, topologies=topologies, events=events, facts=facts)


def _collected(folder: Folder, events: list[dict[str, Any]]) -> list[_TensorFile]:
    typed = list(folder.real.parts[-LEVELS:])
    places: dict[str, Place] = {}
    files: list[_TensorFile] = []
    strange = 0
    tops: set[str] = set()
    for file in folder.files(named=_FILE.fullmatch):
        head, _, name = file.rpartition("/")
        match = _FILE.fullmatch(name)
        if match is None:
            if name.endswith(".npy"):
                strange += 1
                # Messages about thousands of foreign files would hide the important warnings.
                if strange <= 20:
                    events.append(_warning(f"{file}: skipped, its name is not that of an FX dump"))
            continue
        if head not in places:
            inner = head.split("/") if head else []
            places[head] = parse_place([*typed, *inner])
            tops.add(_top_of(inner))
        node, target, port, slot, stamp = match.groups()
        files.append(_TensorFile(places[head], file, node, target, port.lower(), slot, stamp))
    refuse_several(folder.path, tops)
    events += [_warning(why) for why in folder.not_entered]
    if any(place.counts_from_one and place.step == 0 for place in places.values()):
        # The steps count from 0 after all; subtracting 1 would merge two steps.
        events.append(_warning("the steps of this layout usually count from 1, here from 0"))
        return [
            tensor_file._replace(place=tensor_file.place._replace(counts_from_one=False))
            for tensor_file in files
        ]
    return files


def _execution_order(file: _TensorFile) -> tuple[Any, ...]:
    """Sort key.

    Nodes with equal stamps have no order of their own; their numbers are a good guess.
    """
    number = re.search(r"_(\d+)$", file.node)
    return (
        *(file.place.rank, file.stamp, int(number[1][:18]) if number else 0, file.node, file.place),
        *(file.port, natural(file.slot)),
    )


def _leaf(
    folder: Folder,
    file: _TensorFile,
    prefix: str,
    visits: dict[TensorKey, int],
    events: list[dict[str, Any]],
) -> Leaf | None:
    step = file.place.step - (1 if file.place.counts_from_one else 0)
    port = "input" if file.port == "input" else "output"
    key = TensorKey.of(prefix + file.node, port, file.slot, step=step, rank=file.place.rank)
    # A node inside a loop writes the same name several times within a step.
    visit = visits[key]
    visits[key] += 1
    key = key._replace(visit=visit)
    # An `.npy` file holds one array, so there is one member.
    member = describe(folder, file.path)[0]
    if member.trouble and (word := _text_argument(folder, file.path)) is not None:
        what = f"the argument {word!r}" if word else "a Python object, which is not read"
        events.append({"kind": "argument", "message": f"{file.path}: {key} is {what}"})
        return None
    return leaf(key, file.path, member, class_name=file.target)


def _text_argument(folder: Folder, file: str) -> str | None:
    """The text of a file that holds text, "" for one that holds objects, None for any other."""
    try:
        start, _ = folder.start(file, _LONGEST_WORD)
    except OSError:
        return None
    # In version 1, bytes 8 and 9 after the magic number hold the header's length.
    end = 10 + int.from_bytes(start[8:10], "little")
    match = _DESCR.search(start, 0, end)
    if match is None:
        return None
    order, kind = match.groups()
    if kind == b"O":
        return ""
    # numpy stores text with four bytes per letter, byte strings with one.
    coding = "latin-1" if kind == b"S" else "utf-32-be" if order == b">" else "utf-32-le"
    return start[end:].decode(coding, "replace").rstrip("\0")


def _warning(message: str) -> dict[str, Any]:
    return {"kind": "warning", "message": message}
