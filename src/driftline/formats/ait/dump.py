"""`ait llm` dumps of torch models: `ait_dump/torch_tensors/{device}_{pid}/{token}/{module}/`.

The first folder may be `ait_dump*` or `msit_dump*`. A dump can be opened at any level, from the
folder that contains it down to one token. Files are `.pth` tensors or a `statistics.csv` for each
module; `model_tree.json` gives classes and the module tree. Dumps made by hand
(`golden_tensor/{token}/{id}_tensor.pth`) can be read too. ATB's own `tensors/` folder is read by
`ascend/atb`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from driftline.errors import BadFile
from driftline.formats.ait import execution, module_tree
from driftline.formats.ait.module_tree import Place, places_of, topology_of
from driftline.formats.dump_run import Leaf, TreeRun, partial_summary, refuse_several
from driftline.formats.folder import Folder, natural
from driftline.formats.tensor_files import describe, leaf
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.facts import Order
from driftline.runs.files.local_files import folders_in, reason_of
from driftline.runs.records import Record, TensorKey
from driftline.runs.sidecars.calls import CALLS, read_calls

NAME = "ait torch dump"
TORCH = "torch_tensors"
GOLDEN = "golden_tensor"
TREE = "model_tree.json"
METADATA = "metadata.json"
STATISTICS = "statistics.csv"
SHEET = "driftline_"
"""Prefix of our own files in the folder of a process."""
LARGEST_JSON = 1 << 28
_LARGEST_STATISTICS = 1 << 26
_NUMBER = re.compile(r"\d+")
_ROOTS = ("ait_dump", "msit_dump")
_BY_HAND = re.compile(r"\d+_\d+")


class _Process(NamedTuple):
    """One process of a dump: its folder, and the token if only one was opened."""

    folder: Path
    token: int | None = None


def sniff(path: Path) -> bool:
    return next(_processes(path), None) is not None or next(_by_hand(path), None) is not None


def open(path: Path) -> TreeRun:
    """Open the dump as a run.

    Raises:
        BadFile: The dump has no tensor.
        BadRun: The folder contains several dumps.
    """
    # Two dumps in one folder belong to two runs; mixing them would duplicate every key.
    holding = [r for r in _roots(path) if r != path and sniff(r)]
    refuse_several(path, (root.name for root in holding))
    reader = _Reader(path)
    # Several processes of one device are numbered in the order of their names.
    numbers: dict[int, int] = {}
    for process in sorted(_processes(path), key=lambda process: natural(str(process.folder))):
        rank = module_tree.rank_of(process.folder.name)
        reader.read(process, rank, numbers.setdefault(rank, 0))
        numbers[rank] += 1
    for folder in sorted(_by_hand(path), key=lambda folder: natural(str(folder))):
        rank = int(folder.name.rpartition("_")[2]) if _BY_HAND.fullmatch(folder.name) else 0
        reader.read_by_hand(folder, rank, numbers.setdefault(rank, 0))
        numbers[rank] += 1
    if not reader.leaves:
        raise BadFile(f"{path} is laid out like a dump of `ait llm` and holds no tensor")
    run = AitRun(
        path,
        NAME,
        reader.leaves,
        order=reader.order,
        topologies=reader.topologies,
        events=reader.events,
        facts=reader.facts,
    )
    run.folders = reader.folders
    run.token = next((process.token for process in _processes(path)), None)
    return run


class AitRun(TreeRun):
    """A dump of `ait llm`, with the list of calls that our own dumps of operators add."""

    folders: Mapping[tuple[int, int], Path] = MappingProxyType({})
    token: int | None = None
    """The token, if only one was opened; None for all."""

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        folder = self.folders.get((rank, process))
        return [CALLS] if folder is not None and (folder / f"{SHEET}{CALLS}").is_file() else []

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        folder = self.folders.get((rank, process))
        if folder is None or name != CALLS:
            return ""
        try:
            text = Folder(folder).read(f"{SHEET}{CALLS}", LARGEST_JSON).decode("utf-8", "replace")
        except OSError:
            return ""
        if self.token is None:
            return text
        # The list contains all tokens of the process.
        return "".join(f"{line}\n" for line in text.split("\n") if _step_of(line) == self.token)


def _step_of(line: str) -> int | None:
    call = next(read_calls(line), None)
    return None if call is None else call.step


def _processes(path: Path) -> Iterator[_Process]:
    # The innermost level is checked first, because a token's folder is inside all other levels.
    if path.name.isdigit() and _has_modules(path):
        yield _Process(path.parent, int(path.name))
    elif _has_tokens(path):
        yield _Process(path)
    else:
        for root in _roots(path):
            tensors = root if root.name == TORCH else root / TORCH
            for name in folders_in(tensors):
                # A process without tensors still has its module tree.
                if _has_tokens(tensors / name) or (tensors / name / TREE).is_file():
                    yield _Process(tensors / name)


def _by_hand(path: Path) -> Iterator[Path]:
    if path.name == GOLDEN and (path / METADATA).is_file():
        yield path.parent
    elif (path / GOLDEN).is_dir():
        yield path
    else:
        for root in _roots(path):
            for name in folders_in(root):
                if _BY_HAND.fullmatch(name) and (root / name / GOLDEN).is_dir():
                    yield root / name


def _roots(path: Path) -> Iterator[Path]:
    if path.name == TORCH or (path / TORCH).is_dir() or path.name.startswith(_ROOTS):
        yield path
        return
    for name in folders_in(path):
        if name.startswith(_ROOTS):
            yield path / name


def _is_tensor(name: str) -> bool:
    return name.endswith((".pth", ".pt"))


def _has_tokens(path: Path) -> bool:
    return any(name.isdigit() and _has_modules(path / name) for name in folders_in(path))


def _has_modules(path: Path) -> bool:
    names = folders_in(path)
    return any(
        name == module_tree.ROOT or name.startswith(f"{module_tree.ROOT}.") for name in names
    )


class _Reader:
    """Collects the leaves of all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.leaves: list[Leaf] = []
        self.topologies: dict[tuple[int, int], dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._prefixes: dict[Path, str | None] = {}
        self._all_in_order = True
        self.folders: dict[tuple[int, int], Path] = {}

    @property
    def order(self) -> Order:
        """The meaning of the leaves' order."""
        # Files have no order of their own; the module tree lists modules in registration order.
        if not self.topologies:
            return "none"
        return "execution" if self._all_in_order else "registration"

    def note(self, message: str, rank: int, process: int) -> None:
        self.events.append({"kind": "dump", "message": message, "rank": rank, "process": process})

    def read(self, process: _Process, rank: int, number: int) -> None:
        folder = Folder(process.folder)
        self.folders[rank, number] = process.folder
        places: dict[str, Place] = {}
        roots = self._tree(folder, rank, number)
        if roots:
            places = places_of(roots)
            self.topologies[rank, number] = topology_of(roots)
        ordered: list[tuple[tuple[Any, ...], Leaf]] = []
        # If one token was opened, the others are not read.
        below = [str(process.token)] if process.token is not None else []
        for token in below or sorted(folders_in(process.folder), key=natural):
            if token.isdigit():
                for name in folder.files(token, named=_is_tensor):
                    ordered += self._file(folder, name, places, int(token), rank, number)
        ordered.sort(key=lambda entry: entry[0])
        steps: dict[int, list[Leaf]] = {}
        for _, entry in ordered:
            steps.setdefault(entry.record.key.step, []).append(entry)
        for leaves in steps.values():
            in_order = execution.in_order(leaves)
            self._all_in_order &= in_order is not None
            self.leaves += in_order or leaves
        for text in folder.not_entered:
            self.note(text, rank, number)

    def _tree(self, folder: Folder, rank: int, number: int) -> list[dict[str, Any]]:
        if not (folder.path / TREE).is_file():
            return []
        try:
            tree = json.loads(folder.read(TREE, LARGEST_JSON))
            if not isinstance(tree, dict):
                raise ValueError("not a JSON object")
            node = cast("dict[str, Any]", tree)
            # `more` is our own addition: the trees of further models of the process.
            return [node, *node.get("more", [])]
        except (OSError, ValueError, RecursionError) as trouble:
            self.note(f"{TREE} cannot be read: {reason_of(trouble)}", rank, number)
            return []

    def _file(
        self,
        folder: Folder,
        name: str,
        places: dict[str, Place],
        step: int,
        rank: int,
        number: int,
    ) -> Iterator[tuple[tuple[Any, ...], Leaf]]:
        parts = name.split("/")
        site = module_tree.site_of("/".join(parts[1:-1]))
        place = places.get(site)
        class_name = place.class_name if place else ""
        source = self._source(folder, name)
        if parts[-1] == STATISTICS:
            lines, notes = _statistics(folder, name)
            for note in notes:
                self.note(f"{source}: {note}", rank, number)
            for line in lines:
                key = TensorKey.of(site, line.port, line.slot, step=step, rank=rank)
                record = line.record(key._replace(process=number), class_name)
                yield _order(key, place), Leaf(record, source)
        elif _is_tensor(parts[-1]):
            key = module_tree.key_of(parts[-1].rpartition(".")[0], site, step, rank, number)
            # Recorded rather than ignored, because the user may miss the file.
            if key is None:
                self.note(f"{source} has a name that says nothing", rank, number)
                return
            for member in describe(folder, name):
                # A file may hold a dict or a tuple, whose parts become separate slots.
                slot = f"{key.slot}.{member.name}" if member.name else key.slot
                own = key.with_slot(slot)
                yield _order(own, place), leaf(own, source, member, class_name=class_name)

    def read_by_hand(self, path: Path, rank: int, number: int) -> None:
        folder = Folder(path)
        paired: dict[str, Any] = {}
        try:
            paired = json.loads(folder.read(f"{GOLDEN}/{METADATA}", LARGEST_JSON))
        except (OSError, ValueError, RecursionError) as trouble:
            self.note(f"{GOLDEN}/{METADATA} cannot be read: {reason_of(trouble)}", rank, number)
        for name in folder.files(GOLDEN, named=_is_tensor):
            parts = name.split("/")
            # Exactly golden_tensor/token/file; any other file is foreign.
            if len(parts) != 3 or not parts[1].isdigit() or not name.endswith(".pth"):
                continue
            site = parts[2].removesuffix(".pth").removesuffix("_tensor")
            key = TensorKey.of(site, "output", step=int(parts[1]), rank=rank)
            for member in describe(folder, name):
                own = key._replace(process=number, slot=member.name or "0")
                self.leaves.append(leaf(own, self._source(folder, name), member))
        if paired:
            self.facts["golden_tensor"] = paired

    def _source(self, folder: Folder, name: str) -> str:
        """The path of a file relative to the opened folder."""
        # Needed for every file; paths are slow to compute, so prefixes are cached.
        if folder.path not in self._prefixes:
            inside = folder.path.is_relative_to(self.path)
            prefix = str(folder.path.relative_to(self.path)) if inside else None
            self._prefixes[folder.path] = "" if prefix == "." else prefix
        prefix = self._prefixes[folder.path]
        if prefix is None:  # one token was opened: its files are below that folder
            return name.partition("/")[2]
        return f"{prefix}/{name}" if prefix else name


def _order(key: TensorKey, place: Place | None) -> tuple[Any, ...]:
    """Sort key: inputs when the walk enters a module, other tensors when it leaves the module."""
    if place is None:
        return (key.step, 1, 0, natural(key.site), key.visit, key.port != "input", _slot(key))
    when = place.entered if key.port in ("input", "param") else place.left
    return (key.step, 0, when, [], key.visit, key.port != "input", _slot(key))


def _slot(key: TensorKey) -> tuple[Any, ...]:
    return (key.port, natural(key.slot))


# Figures without values.


class _StatisticsLine(NamedTuple):
    """One tensor of a `statistics.csv`: a few numbers instead of its values.

    NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm
    """

    port: Literal["input", "output"]
    slot: str
    dtype: str
    shape: tuple[int, ...]
    summary: Summary
    node_type: str

    def record(self, key: TensorKey, class_name: str) -> Record:
        has_figures = any(not math.isnan(figure) for figure in self.summary[1:6])
        return Record(
            key,
            0,
            self.dtype,
            self.shape,
            class_name=class_name or self.node_type,
            kept="summary" if has_figures else "describe",
            summary=self.summary if has_figures else None,
        )


def _statistics(folder: Folder, name: str) -> tuple[list[_StatisticsLine], list[str]]:
    """The valid lines, and a sentence about each invalid one."""
    notes: list[str] = []
    try:
        # `utf-8-sig`: spreadsheet programs add a byte order mark.
        text = folder.read(name, _LARGEST_STATISTICS).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text)))
    except (OSError, ValueError, csv.Error) as trouble:
        return [], [f"cannot be read: {reason_of(trouble)}"]
    lines: list[_StatisticsLine] = []
    # Line 1 is the heading, so the numbers agree with those of an editor.
    for number, row in enumerate(rows, 2):
        try:
            lines.append(_line(row))
        except (KeyError, ValueError, TypeError, AttributeError) as trouble:
            notes.append(f"line {number} makes no sense: {reason_of(trouble)}")
    # A file of another kind has thousands of bad lines; twenty are enough.
    return lines, notes[:20]


def _line(row: Mapping[str, str]) -> _StatisticsLine:
    side = row["InputOutput"].strip().lower()
    if side not in ("input", "output"):
        raise ValueError(f"neither input nor output: {side[:40]!r}")
    dtype = row["DataType"].strip().removeprefix("torch.")
    # Without the width of an element, even the size of the tensor would be unknown.
    if dtype not in DTYPES:
        raise ValueError(f"the element type {dtype[:40]!r} is not known")
    shape = tuple(int(size) for size in _NUMBER.findall(row["Shape"]))
    index = row["Index"].strip()
    return _StatisticsLine(
        "input" if side == "input" else "output",
        index if index.isdigit() else "0",
        dtype,
        shape,
        partial_summary(
            math.prod(shape),
            low=_number(row["Min"]),
            high=_number(row["Max"]),
            mean=_number(row["Mean"]),
            l2=_number(row["L2Norm"]),
        ),
        row.get("NodeType", "").strip(),
    )


def _number(text: str) -> float:
    """A number; NaN for other text, such as `N/A`, or for none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
