"""Open ATB dump trees of every generation as runs, from any of their folders.

`AtbRun` reads tensors in execution order, and on demand the topology, csv and profile files next to
them. `Aliases` resolves tensors that a dump saved once and names again (`data=1_0_outtensor0.bin`):
such a name is looked up among the operations of the same execution and never used as a path.
`folders.py` finds the folders, and `file.py` reads the content of a file.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from driftline.errors import BadFile, BadRun, DriftlineError
from driftline.formats.ascend.atb.file import FILE_NAME, Header, leaf_of
from driftline.formats.ascend.atb.folders import (
    DEEPEST,
    Execution,
    OperationFolder,
    Place,
    TensorFile,
    Walk,
    locate,
    torch_dumps_next_to,
)
from driftline.formats.ascend.atb.tables import (
    OperationLine,
    StatisticLine,
    profiles_in,
    read_operations,
    read_profile,
    read_statistics,
)
from driftline.formats.ascend.atb.topology import Topology
from driftline.formats.ascend.types import ACL_TYPES, type_named
from driftline.formats.dump_run import DumpTable, Leaf, TreeRun
from driftline.formats.folder import natural
from driftline.runs.files.local_files import read_inside, reason_of
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Loss
from driftline.runs.sinks import JSON

__all__ = ["NAME", "AtbRun", "open", "sniff"]


# Lengths are limited, because the name comes from a file that is not trusted.
_ALIAS = re.compile(r"(\d{1,9}(?:_\d{1,9}){0,62})_((?:in|out)[tT]ensor\d{1,6}(?:_\w{1,200})?\.bin)")
# A pointer normally leads directly to the values; a long chain or a circle means damage.
_LONGEST_CHAIN = 8
_LEVELS = 12
"""Number of parent folders of a file that are searched for the folder of its execution."""

_AliasPlace = tuple[str, str, str]
"""Operation id, port, slot."""


class Aliases:
    """The tensors of one execution by operation id, port and slot."""

    def __init__(self, top: OperationFolder) -> None:
        self._files: dict[_AliasPlace, list[TensorFile]] = {}
        for operation in top.walk():
            for file in operation.files:
                self._files.setdefault((operation.ids, file.port, file.slot), []).append(file)

    def resolve(self, file: TensorFile) -> TensorFile:
        """The same tensor with the location of its values, or with the reason why it has none."""
        header, target = file.header, file
        if header is None:
            return file
        for _ in range(_LONGEST_CHAIN):
            assert target.header is not None
            if not target.header.points_to:
                return self._with_values_of(file, header, target)
            wanted = target.header.points_to
            pointed = self._file_named(wanted)
            if pointed is None:
                return _lost(file, f"says its values are in {wanted[:80]!r}, which is not there")
            if pointed.header is None:
                return _lost(file, f"has its values in {pointed.source}: {pointed.trouble}")
            target = pointed
        return _lost(file, "points to a file that points to a file, and so on")

    def _file_named(self, wanted: str) -> TensorFile | None:
        match = _ALIAS.fullmatch(wanted)
        name = FILE_NAME.fullmatch(match[2]) if match else None
        if match is None or name is None:
            return None
        port = "input" if name[1] == "in" else "output"
        candidates = self._files.get((match[1], port, str(int(name[2]))), [])
        # A tensor may be saved before and after its operation; take the file that has values.
        with_data = [file for file in candidates if file.header and file.header.has_data]
        return next(iter(with_data or candidates), None)

    def _with_values_of(self, file: TensorFile, header: Header, target: TensorFile) -> TensorFile:
        target_header = target.header
        assert target_header is not None
        # A pointer to another shape means that the dump was mixed up.
        if (target_header.kind, target_header.layout, target_header.dims) != (
            header.kind,
            header.layout,
            header.dims,
        ):
            return _lost(
                file, f"has another type or shape than {target.source}, which it points to"
            )
        return file._replace(path=target.path, header=target_header)


def _lost(file: TensorFile, why: str) -> TensorFile:
    return file._replace(trouble=f"the file {why}", path="")


def resolve_lone_file(path: Path, key: TensorKey) -> Leaf | None:
    """Open a single tensor file that points to another file of its dump.

    Returns None if the file is not in the folder of an execution.
    """
    real = path.resolve()
    # An execution's folder is named by its number; the operations are below it.
    for folder in real.parents[1:_LEVELS]:
        if folder.name.isdecimal():
            break
    else:
        return None
    walk = Walk(folder)
    top = walk.execution(folder)
    source = walk.below(str(real))
    for operation in top.walk():
        for file in operation.files:
            if file.source == source:
                resolved = Aliases(top).resolve(file)
                if resolved.header is None or resolved.trouble:
                    return None
                return leaf_of(key, resolved.header, resolved.path, resolved.source)
    return None


# ---- The dump as a run


NAME = "atb"
LARGEST_JSON = 64 << 20
LARGEST_PARAM = 1 << 20
LARGEST_TABLE = 256 << 20
_NUMBER = re.compile(r"_(\d{1,9})\.(?:csv|txt)$")
_UNKNOWN = "unknown"
"""Element type of a tensor whose file gives no valid type."""

Tops = dict[tuple[int, int], list[tuple[Execution, OperationFolder]]]


class AtbRun(TreeRun):
    """A dump of ATB operations.

    It adds to the interface of a run: `operations()` and `kernels()` (the csv files),
    `param(site)`, `tables()` (cpu profiling), and `param`, tensor names and `edges` in
    `topology()`.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self.place = place
        self._walk = Walk(place.root)
        self._tops: Tops = {}
        self._notes: Counter[str] = Counter()
        self._known: dict[tuple[int, int], Mapping[str, JSON]] = {}
        self._built: dict[tuple[int, int], Topology] = {}
        self._unreadable: dict[str, str] = {}
        self._side_files: list[str] | None = None
        # The leaves fill `_tops` and `_notes`, which the following lines need.
        super().__init__(path, NAME, list(self._leaves_of(place)))
        self._note_unknown_files()
        self._events = [
            {"kind": "note", "message": text + (f" ({count} tensors)" if count > 1 else "")}
            for text, count in self._notes.items()
        ]
        for torch_dump in torch_dumps_next_to(path.resolve(), place.root):
            text = f"{torch_dump} is a torch dump next to this one; open it by its own path"
            self._events.append({"kind": "note", "message": text})

    def source(self, record: Record) -> str:
        """The file relative to the opened path, which may be above the dump's root or inside it."""
        opened = Path(self.name).resolve()
        # The usual case; `relpath` for every record would cost more than the comparison.
        if opened == self.place.root:
            return super().source(record)
        return os.path.relpath(self.place.root / super().source(record), opened)

    def _leaves_of(self, place: Place) -> Iterator[Leaf]:
        numbers = _processes(place.executions)
        seen: set[TensorKey] = set()
        for execution in place.executions:
            rank, process = numbers[execution.device, execution.pid]
            top = self._walk.execution(execution.folder, execution.only)
            self._tops.setdefault((rank, process), []).append((execution, top))
            for operation, path in self._walk.statistics:
                self._add_statistics(operation, path)
            # Each execution has its own statistics; the walk collects those of the next one.
            self._walk.statistics.clear()
            aliases: Aliases | None = None
            for operation, file in top.in_order():
                if file.header is not None and file.header.points_to:
                    # Most dumps have no pointers, so the table is built when the first one occurs.
                    aliases = aliases or Aliases(top)
                    file = aliases.resolve(file)
                key = TensorKey(
                    operation.site or "(root)",
                    file.port,
                    file.slot,
                    execution.number,
                    0,
                    rank,
                    process,
                    "forward",
                    file.moment,
                )
                # Two folders may have the same printable name; a visit number keeps both tensors.
                while key in seen:
                    key = key._replace(visit=key.visit + 1)
                seen.add(key)
                yield self._leaf(key, operation, file)

    def _leaf(self, key: TensorKey, operation: OperationFolder, file: TensorFile) -> Leaf:
        header = file.header
        if header is None or file.trouble:
            kind = header.kind.dtype if header else ""
            shape = header.shape if header else ()
            record = Record(key, 0, kind or _UNKNOWN, shape, file.alias, operation.kind)
            return Leaf(record._replace(lost=file.trouble), file.source)
        if (remark := header.remark) and header.has_data:
            self._notes[remark] += 1
        return leaf_of(
            key, header, file.path, file.source, alias=file.alias, class_name=operation.kind
        )

    def _add_statistics(self, top: OperationFolder, path: str) -> None:
        """Add tensors of which only a line of statistic.csv is left."""
        try:
            text = self._text(path, LARGEST_TABLE)
        except OSError as trouble:
            self._unreadable[self._walk.below(path)] = reason_of(trouble)
            return
        # The depth limit of folders holds for names in a table too, because they become nested
        # objects.
        lines = [line for line in read_statistics(text) if len(line.folders) <= DEEPEST]
        if not lines and text.strip():
            self._unreadable[self._walk.below(path)] = "has no line that makes sense"
        for line in lines:
            operation = top
            for name in line.folders:
                operation = operation.child(name)
            port = "output" if line.output else "input"
            # A file has more information than its line in the table.
            if any(file.port == port and file.slot == line.slot for file in operation.files):
                continue
            operation.files.append(_listed(line, self._walk.below(path)))

    def _note_unknown_files(self) -> None:
        walk = self._walk
        if walk.unknown_files:
            names = ", ".join(walk.unknown_files[:3]) + (
                " …" if len(walk.unknown_files) > 3 else ""
            )
            self._notes[f"{len(walk.unknown_files)} files were not understood: {names}"] += 1
        if (walk.root / "torch_tensors").is_dir():
            self._notes[
                "torch_tensors/ of the same dump is not shown; open it by its own path"
            ] += 1

    @property
    def manifest(self) -> Mapping[str, Any]:
        return {
            **super().manifest,
            "generation": self.place.generation,
            "beside": self.side_file_counts(),
        }

    @property
    def losses(self) -> Sequence[Loss]:
        walk = self._walk
        places = [*walk.losses, *self._unreadable.items()]
        return [*super().losses, *(Loss(where, reason) for where, reason in places)]

    def side_file_counts(self) -> dict[str, int]:
        """Number of files of each kind next to the tensors."""
        counts = {
            "model topology": len(self._files("model", ".json")),
            "layer topology": len(self._files("layer", ".json")),
            "operation csv": len(self._files("operation_io_tensors", ".csv")),
            "kernel csv": len(self._files("kernel_io_tensors", ".csv")),
            "cpu profiling": len(profiles_in(self._files("cpu_profiling", ".txt", ".csv"))),
            "tiling": len(self._walk.tilings) + len(self._tiling_files),
        }
        return {name: count for name, count in counts.items() if count}

    def tilings(self) -> list[str]:
        """Files of tiling data in the dump: bytes without a type, which are not tensors."""
        walk = self._walk
        return sorted([*map(walk.below, walk.tilings), *map(walk.below, self._tiling_files)])

    def operations(self) -> list[OperationLine]:
        """The operation csv files: every leaf operation, resolved by its id, not by its paths."""
        return self._lines("operation_io_tensors")

    def kernels(self) -> list[OperationLine]:
        """The kernel csv files."""
        return self._lines("kernel_io_tensors")

    def site_of(self, ids: str, rank: int = 0, process: int = 0) -> str | None:
        """The site of an operation id: `1_Decoder_layer.0_RmsNormOperation` for `1_0`."""
        for _, top in self._tops.get((rank, process), ()):
            for operation in top.walk():
                if operation.ids == ids and ids:
                    return operation.site
        return None

    def executed(self) -> Iterator[tuple[int, int, int, OperationFolder]]:
        """Rank, process, execution and folder of every operation and kernel, in order."""
        for (rank, process), tops in self._tops.items():
            for execution, top in tops:
                for operation in top.walk():
                    if operation.site:
                        yield rank, process, execution.number, operation

    def pids(self) -> dict[tuple[int, int], str]:
        """The process id of each rank and process."""
        return {place: tops[0][0].pid for place, tops in self._tops.items() if tops}

    def own_param(self, operation: OperationFolder) -> Mapping[str, Any] | None:
        """The parameters in an operation's own op_param.json; None if it has none.

        Raises:
            BadFile: The file is damaged.
        """
        if not operation.param:
            return None
        try:
            value = json.loads(self._text(operation.param, LARGEST_PARAM))
        except (OSError, ValueError, RecursionError) as trouble:
            why = reason_of(trouble) if isinstance(trouble, OSError) else "is no JSON"
            raise BadFile(f"{self._walk.below(operation.param)} {why}") from None
        if not isinstance(value, dict) and value not in (None, ""):
            raise BadFile(f"{self._walk.below(operation.param)} holds no parameters")
        return cast("Mapping[str, Any]", value or {})

    def tables(self) -> Sequence[DumpTable]:
        """cpu profiling: times of operations on the host, in µs."""
        tables: list[DumpTable] = []
        for path in profiles_in(self._files("cpu_profiling", ".txt", ".csv")):
            text = self._readable(path, LARGEST_TABLE)
            tables.append(read_profile(text, f"Host times in µs ({self._walk.below(path)})"))
        return tables

    def param(self, site: str, rank: int = 0, process: int = 0) -> Mapping[str, Any] | None:
        """The parameters of an operation: its op_param.json, or those of the topology."""
        for _, top in self._tops.get((rank, process), ()):
            for operation in top.walk():
                if operation.site == site and operation.param:
                    return self._object(operation.param, LARGEST_PARAM)
        return self.listed_param(site, rank, process)

    def listed_param(self, site: str, rank: int, process: int) -> Mapping[str, Any] | None:
        """The parameters that the topology gives for an operation."""
        node = self._topology(rank, process).node(site)
        return node.param if node else None

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        """The operations of a process as a tree, with `param` and `edges`."""
        if (rank, process) not in self._known:
            if (rank, process) not in self._tops and (rank, process) != (0, 0):
                return None
            order = dict.fromkeys(
                record.key.site
                for record in self.records
                if (record.key.rank, record.key.process) == (rank, process)
            )
            built = self._topology(rank, process)
            # Nothing ran and nothing was described, so there is no tree to show.
            if not order and next(built.nodes(), None) is None:
                return None
            self._known[rank, process] = built.to_json(list(order))
        return self._known[rank, process]

    def _topology(self, rank: int, process: int) -> Topology:
        if (earlier := self._built.get((rank, process))) is not None:
            return earlier
        tops = self._tops.get((rank, process), [])
        built = self._built[rank, process] = Topology()
        for _, top in tops:
            built.add_folders(top)
        pids = {f"{e.device}_{e.pid}" for e, _ in tops} | {e.pid for e, _ in tops}
        # Layers first: they are numbered like the folders, and the model's shift is fitted to them.
        for what, add in (("layer", built.add_layer), ("model", built.add_model)):
            for path in self._files(what, ".json"):
                # Some probes use the process id as the folder, some the device and the process id.
                if not pids or Path(path).parent.name in pids:
                    add(self._object(path, LARGEST_JSON))
        for _, top in tops:
            for operation in top.walk():
                node = built.node(operation.site)
                if node is not None and node.param is None and operation.param:
                    node.param = self._object(operation.param, LARGEST_PARAM)
        return built

    def _lines(self, what: str) -> list[OperationLine]:
        lines: list[OperationLine] = []
        # Csv folders are named by the process id, or by device and process id, depending on the
        # generation.
        places = {
            name: place
            for place, tops in self._tops.items()
            for execution, _ in tops
            for name in (execution.pid, f"{execution.device}_{execution.pid}")
        }
        for path in self._files(what, ".csv"):
            folder = Path(path).parent.name
            if not self.place.complete and folder not in places:
                continue  # another process's, when only a part of the dump was opened
            rank, process = places.get(folder, (0, 0))
            number = _NUMBER.search(path)
            text = self._readable(path, LARGEST_TABLE)
            lines += [
                line._replace(rank=rank, process=process)
                for line in read_operations(text, int(number[1]) if number else 0)
            ]
        return lines

    def _files(self, what: str, *suffixes: str) -> list[str]:
        """Files of one kind, in every process's folder, by name; links are skipped."""
        if self._side_files is None:
            self._side_files = []
            root = self.place.root
            # Some probes write the side files into `info`.
            for base in (root, root / "info"):
                for kind in ("layer", "model", *_TABLES):
                    for folder in _listed_below(base / kind, folders=True):
                        self._side_files += _listed_below(Path(folder), folders=False)
        middle = f"/{what}/"
        prefix = len(str(self.place.root))
        return [
            path for path in self._side_files if middle in path[prefix:] and path.endswith(suffixes)
        ]

    @functools.cached_property
    def _tiling_files(self) -> list[str]:
        folder = self.place.root / "tiling"
        # A link could lead out of the dump, or in a circle.
        if folder.is_symlink() or not folder.is_dir():
            return []
        return [str(path) for path in folder.rglob("*.bin")]

    def _text(self, path: str, limit: int) -> str:
        return read_inside(self.place.root, Path(path), limit).decode("utf-8", "replace")

    def _readable(self, path: str, limit: int) -> str:
        """The text of a file next to the tensors; an unreadable one is a loss, and empty."""
        try:
            return self._text(path, limit)
        except OSError as trouble:
            self._unreadable[self._walk.below(path)] = reason_of(trouble)
            return ""

    def _object(self, path: str, limit: int) -> Mapping[str, Any]:
        try:
            value = json.loads(self._text(path, limit))
        except (OSError, ValueError, RecursionError) as trouble:
            self._unreadable[self._walk.below(path)] = f"is no JSON: {reason_of(trouble)}"
            return {}
        return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


_TABLES = ("operation_io_tensors", "kernel_io_tensors", "cpu_profiling")


def _listed_below(folder: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            paths = [
                entry.path
                for entry in entries
                if (
                    entry.is_dir(follow_symlinks=False)
                    if folders
                    else entry.is_file(follow_symlinks=False)
                )
            ]
    except OSError:
        return []
    return sorted(paths, key=natural)


def _processes(executions: Sequence[Execution]) -> dict[tuple[int, str], tuple[int, int]]:
    """Rank and process of each (device, pid); several processes of one device are numbered."""
    numbers: dict[tuple[int, str], tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    for execution in executions:
        process = (execution.device, execution.pid)
        if process not in numbers:
            rank = max(0, execution.device)  # the probe writes -1 if the device is unknown
            numbers[process] = (rank, counts[rank])
            counts[rank] += 1
    return numbers


def _listed(line: StatisticLine, source: str) -> TensorFile:
    """A line of statistic.csv, as the file that it stands for."""
    kind = type_named(line.dtype) or ACL_TYPES[-1]
    named = TensorFile(
        "output" if line.output else "input",
        line.slot,
        "",
        "after" if line.output else "before",
        source,
    )
    if line.shape is None:
        return named._replace(trouble=f"the line of {line.folders[-1]} in {source} has no shape")
    # The table announces a file; if it is missing, the line is a loss, not a summary.
    if line.saved:
        return named._replace(trouble="the file that statistic.csv names is not in the dump")
    header = Header(kind, 2, line.shape, statistics=line.statistics, has_data=False)
    return named._replace(header=header)


# ---- Entry points of the format


def sniff(path: Path) -> bool:
    """Whether a path is an ATB dump, from the names of a few folders."""
    try:
        return locate(path) is not None
    except DriftlineError:
        return True  # several dumps: `open` names them
    except OSError:
        return False


def open(path: Path) -> AtbRun:
    """Open the dump, or the part of it that the path points to.

    Raises:
        BadRun: There is no dump, or there are several.
    """
    place = locate(path)
    if place is None:
        raise BadRun(f"{path} is no ATB dump, and no part of one")
    return AtbRun(path, place)
