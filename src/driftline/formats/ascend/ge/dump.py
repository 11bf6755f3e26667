"""Open a graph-engine (GE) dump as a run: operator files, and the texts that describe the graphs.

    [worldsize{W}_global_rank{R}/]{YYYYmmddHHMMSS}/{device}/{graph}/{graph id}/{step}/
        {type}.{name}.{task}[.{stream}].{stamp}[.{task type}.{context}.{thread}.{device}]

The first part parses names of files and folders; the second reads the folder. `operator_file.py`
reads the content of an operator file, `graph_text.py` that of a graph text.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from driftline.formats.ascend.ge import operator_file
from driftline.formats.ascend.ge.graph_text import (
    LONGEST,
    GraphNode,
    GraphText,
    as_json,
    graph_text_of,
    parse_graph,
    topology,
)
from driftline.formats.ascend.protobuf import Malformed, NotText
from driftline.formats.dump_run import Leaf, TreeRun, refuse_several
from driftline.formats.folder import Folder, natural, some_names
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import Record, TensorKey

IGNORED_SUFFIXES = (
    ".txt",
    ".npy",
    ".bin",
    ".csv",
    ".json",
    ".log",
    ".onnx",
    ".pbtxt",
    ".pb",
    ".md",
)

WORLD = re.compile(r"worldsize(\d+)_global_rank(\d+)", re.ASCII)
_SESSION = re.compile(r"\d{14}", re.ASCII)
_STAMP = re.compile(r"\d{13,20}", re.ASCII)
_FLAT = re.compile(r"[./\\\s]")


class OpFile(NamedTuple):
    """The content of a file's name.

    Attributes:
        class_name: Type of the operator.
        op_name: Name of the operator, flattened as in file names.
        task: Number of the task.
        stamp: Time of the dump, in microseconds.
    """

    class_name: str
    op_name: str
    task: int
    stamp: int


class Place(NamedTuple):
    """The content of the folder names; graph and number are empty if the names lack them."""

    rank: int = 0
    session: str = ""
    graph: str = ""
    graph_id: str = ""
    step: int = 0


def parse_name(name: str) -> OpFile | None:
    """Parse `{type}.{name}.{task}[.{stream}].{stamp}[.{task type}.{context}.{thread}.{device}]`.

    >>> parse_name("Add.Add_2.44.6.1706596912161941")
    OpFile(class_name='Add', op_name='Add_2', task=44, stamp=1706596912161941)
    """
    parts = name.split(".")
    # From the end, because an operator's own name may contain dots and digits.
    for stamp in range(len(parts) - 1, 2, -1):
        if _STAMP.fullmatch(parts[stamp]):
            break
    else:
        return None
    if len(parts) - 1 - stamp > 4 or not all(is_number(part) for part in parts[stamp + 1 :]):
        return None
    if not is_number(parts[stamp - 1]):
        return None
    # The stream may be missing; then the number before the stamp is the task.
    with_stream = stamp >= 4 and is_number(parts[stamp - 2])
    task = stamp - 2 if with_stream else stamp - 1
    op_name = ".".join(parts[1:task])
    return OpFile(parts[0], op_name, int(parts[task]), int(parts[stamp])) if parts[0] else None


def is_operator(name: str) -> bool:
    return not name.lower().endswith(IGNORED_SUFFIXES) and parse_name(name) is not None


def is_number(part: str) -> bool:
    # Nineteen digits might not fit into 64 bits.
    return part.isascii() and part.isdigit() and len(part) < 19


def flat(op_name: str) -> str:
    """A name as in file names: dots, slashes and blanks become underscores."""
    return _FLAT.sub("_", op_name)


def top_of(folders: list[str]) -> tuple[str, ...] | None:
    """The folders above those of a dump's own layout; None if no session folder shows its start.

    >>> top_of(["a", "worldsize2_global_rank0", "20240130064151", "0", "graph_1", "1", "0"])
    ('a',)
    """
    # The innermost session counts, because folders above the dump may look like one too.
    for session in range(len(folders) - 1, -1, -1):
        if _SESSION.fullmatch(folders[session]):
            ranked = session > 0 and WORLD.fullmatch(folders[session - 1])
            return tuple(folders[: session - 1 if ranked else session])
    return None


def parse_place(folders: list[str]) -> Place:
    """Parse folder names, outermost first; folders above the dump are ignored."""
    session = next(
        (index for index in range(len(folders) - 1, -1, -1) if _SESSION.fullmatch(folders[index])),
        None,
    )
    if session is None:
        # The path is below the session, and the session folder is missing: read the folders from
        # the end.
        step = int(folders[-1]) if folders and is_number(folders[-1]) else 0
        named = len(folders) > 2 and is_number(folders[-2]) and is_number(folders[-1])
        return Place(0, "", folders[-3], folders[-2], step) if named else Place(step=step)
    above = WORLD.fullmatch(folders[session - 1]) if session else None
    below = folders[session + 1 :]
    device = int(below[0]) if below and is_number(below[0]) else 0
    # The global rank identifies a process of the job; the device number is only local.
    rank = int(above[2][:9]) if above else device
    inner = below[1:]
    step = int(inner[-1]) if inner and is_number(inner[-1]) and len(inner) != 1 else 0
    graph = inner[0] if inner else ""
    graph_id = inner[1] if len(inner) > 2 else ""
    return Place(rank, folders[session], graph, graph_id, step)


# ---- The dump as a run


NAME = "ge-dump"
SNIFFED = 4000
"""Number of names that are checked before a folder counts as something else."""
LEVELS = 6
MAPPING = "mapping.csv"


class _DumpedFile(NamedTuple):
    place: Place
    file: str
    op: OpFile


def sniff(path: Path) -> bool:
    """Whether a folder holds operator files or graph texts, at any level of a dump."""
    text = fx = False
    for name in some_names(str(path), LEVELS + 3, SNIFFED):
        text = text or graph_text_of(name) is not None
        fx = fx or (name.endswith(".npy") and (".INPUT." in name or ".OUTPUT." in name))
        if is_operator(name):
            return True
    return text and not fx  # a compiler may also leave its text next to an FX dump


def open(path: Path) -> TreeRun:
    """Open the dump as a run, without reading values. Invalid files become lost tensors."""
    dump = _Dump(path)
    chosen = dump.chosen_files()
    ahead = dump.folder.ahead([dumped.file for dumped in chosen])
    leaves = [leaf for dumped, _ in zip(chosen, ahead, strict=True) for leaf in dump.leaves(dumped)]
    if dump.others:
        message = f"{dump.others} files also hold buffers or workspaces, which are no tensors"
        dump.note("info", message)
    return TreeRun(
        path,
        NAME,
        leaves,
        topologies=dump.topologies(leaves),
        # An overflow must not be hidden among messages about files.
        events=sorted(dump.events, key=lambda event: event["kind"] != "overflow"),
        facts={"graphs": sorted(set(dump.prefixes)), "graph_texts": dump.texts_read},
    )


class _Dump:
    """One pass over the folder, and its results."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        self.events: list[dict[str, Any]] = []
        self.others = 0
        self.texts_read: list[str] = []
        self._typed = list(self.folder.real.parts[-LEVELS:])
        self._texts: list[GraphText] = []
        self._parsed_texts: dict[str, list[GraphNode]] = {}
        self._graph_positions: dict[str, int] | None = None
        self._files: dict[tuple[Place, str], list[_DumpedFile]] = defaultdict(list)
        self._collect()
        self._texts += self._texts_above()
        self.processes = self._sessions()
        self.prefixes = self._graph_names()

    def note(self, kind: str, message: str) -> None:
        self.events.append({"kind": kind, "message": message})

    def _collect(self) -> None:
        places: dict[str, Place] = {}
        renamed: dict[str, Mapping[str, str]] = {}
        strange: list[str] = []
        tops: set[tuple[str, ...]] = set()
        for file in self.folder.files(named=is_operator):
            head, _, name = file.rpartition("/")
            text = graph_text_of(file)
            if text is not None:
                self._texts.append(text)
                continue
            if name.lower().endswith(IGNORED_SUFFIXES):
                continue
            # Thousands of files share a folder, so its names are parsed once.
            if head not in places:
                inner = head.split("/") if head else []
                if (top := top_of(inner)) is not None:
                    tops.add(top)
                places[head] = parse_place([*self._typed, *inner])
                renamed[head] = self._renamed(head)
            op = parse_name(renamed[head].get(name, name))
            if op is None:
                strange.append(file)
            # The device's overflow record has the name of an operator, but contains no tensor.
            elif op.class_name.lower() == "opdebug":
                self.note("overflow", f"{file}: the device recorded an overflow; it is no tensor")
            else:
                self._files[places[head], flat(op.op_name)].append(
                    _DumpedFile(places[head], file, op)
                )
        refuse_several(self.folder.path, ("/".join(top) for top in tops))
        for file in strange:
            self._add_by_header(file, places[file.rpartition("/")[0]])
        for why in self.folder.not_entered:
            self.note("warning", why)

    def _add_by_header(self, file: str, place: Place) -> None:
        """Add a file with an uninformative name; its header may still name the operator."""
        try:
            header = operator_file.read_header(self.folder, file)
        except (Malformed, OSError):
            self.note(
                "warning", f"{file}: skipped, neither its name nor its content is that of a dump"
            )
            return
        op = OpFile("", flat(header.op_name) or file, 0, header.dump_time)
        self._files[place, flat(op.op_name)].append(_DumpedFile(place, file, op))

    def _renamed(self, head: str) -> Mapping[str, str]:
        """The full names of files whose names were too long for the file system, from a table."""
        table = f"{head}/{MAPPING}" if head else MAPPING
        try:
            # The limit keeps a damaged table from filling the memory.
            text = self.folder.read(table, 64 << 20).decode("utf-8", "replace")
        except OSError:
            return {}
        pairs = (line.partition(",") for line in text.splitlines())
        return {short.strip(): long.strip() for short, comma, long in pairs if comma}

    def _texts_above(self) -> Iterator[GraphText]:
        """Graph texts are next to the first level; look there if a lower level was opened."""
        if self._texts or not self._files:
            return
        place = self.folder.real
        for _ in range(LEVELS):
            name = place.name
            # Stop at the first folder that does not belong to a dump, so that foreign folders are
            # not listed.
            if not (is_number(name) or WORLD.fullmatch(name) or is_number(place.parent.name)):
                return
            place = place.parent
            try:
                names = sorted(entry.name for entry in os.scandir(place) if entry.is_file())
            except OSError:
                return
            texts = [text for name in names if (text := graph_text_of(name)) is not None]
            if texts:
                yield from (text._replace(file=str(place / text.file)) for text in texts)
                return

    def _sessions(self) -> dict[tuple[int, str], int]:
        """Number the sessions of each rank; those that dumped the same step are two processes."""
        held: dict[tuple[int, str], set[tuple[str, str, int]]] = defaultdict(set)
        for place, _ in self._files:
            held[place.rank, place.session].add((place.graph, place.graph_id, place.step))
        numbers: dict[tuple[int, str], int] = {}
        steps_of_processes: dict[int, list[set[tuple[str, str, int]]]] = defaultdict(list)
        for (rank, session), steps in sorted(held.items()):
            processes = steps_of_processes[rank]
            # Sessions that share no step are one process that was dumped in several parts.
            number = next((n for n, other in enumerate(processes) if not other & steps), None)
            if number is None:
                number = len(processes)
                processes.append(set())
            processes[number] |= steps
            numbers[rank, session] = number
        return numbers

    def _graph_names(self) -> dict[tuple[str, str], str]:
        """Prefix for the sites of each graph; empty if there is only one graph."""
        graphs = sorted(
            {(place.graph, place.graph_id) for place, _ in self._files},
            key=lambda graph: [natural(part) for part in graph],
        )
        # A single graph keeps the names of the program.
        if len(graphs) == 1:
            return {graphs[0]: ""}
        names = [name for name, _ in graphs]
        prefixes = {
            (name, number): (name if names.count(name) == 1 else f"{name}_{number}") + "."
            for name, number in graphs
        }
        if len(set(prefixes.values())) < len(graphs):  # a name equals another with a number
            prefixes = {(name, number): f"{name}.{number}." for name, number in graphs}
        return prefixes

    def chosen_files(self) -> list[_DumpedFile]:
        """One file per operator and step, in the order in which they were dumped."""
        kept: list[_DumpedFile] = []
        for candidates in self._files.values():
            if len(candidates) > 1:
                # If an operator was dumped twice in one step, the larger file holds more tensors.
                candidates.sort(
                    key=lambda dumped: (-self._size(dumped.file), dumped.op.stamp, dumped.file)
                )
                losers = ", ".join(dumped.file.rpartition("/")[2] for dumped in candidates[1:4])
                self.note(
                    "warning",
                    f"{candidates[0].file}: the larger of {len(candidates)} files of one operator "
                    f"and step; skipped: {losers}" + (", ..." if len(candidates) > 4 else ""),
                )
            kept.append(candidates[0])
        # Time stamps have microseconds; tasks of the same microsecond are ordered by number.
        kept.sort(key=lambda dumped: (dumped.op.stamp, dumped.op.task, dumped.file))
        ordered: list[_DumpedFile] = []
        for _, group in groupby(kept, key=lambda dumped: (dumped.place, dumped.op.stamp)):
            ordered += self._as_in_graph(list(group))
        return ordered

    def _as_in_graph(self, files: list[_DumpedFile]) -> list[_DumpedFile]:
        """Sort the operators of one time stamp: a graph shows which feeds which, numbers do not."""
        if len(files) < 2:
            return files
        positions = self._positions()
        placed = [
            (index, place)
            for index, dumped in enumerate(files)
            if (place := _position_of(dumped.op.op_name, positions)) is not None
        ]
        ordered = list(files)
        # Operators that no graph lists keep their places among the others.
        for (slot, _), (index, _) in zip(
            placed, sorted(placed, key=lambda entry: entry[1]), strict=True
        ):
            ordered[slot] = files[index]
        return ordered

    def _positions(self) -> dict[str, int]:
        """Position of every operator, by its name in file names; operators follow their inputs."""
        if self._graph_positions is None:
            nodes = self._nodes(self._texts, self._parsed_texts)
            self._graph_positions = _topological(nodes)
        return self._graph_positions

    def _size(self, file: str) -> int:
        try:
            return self.folder.start(file, 0)[1]
        except OSError:
            return -1

    def leaves(self, dumped: _DumpedFile) -> Iterator[Leaf]:
        place, file, op = dumped
        prefix = self.prefixes[place.graph, place.graph_id]
        process = self.processes[place.rank, place.session]
        try:
            header = operator_file.read_header(self.folder, file)
            # The header has the name before flattening; if the file was renamed, its name is used.
            true = header.op_name if flat(header.op_name) == flat(op.op_name) else op.op_name
            self.others += bool(header.others)
            inside = operator_file.leaves_of(
                self.folder,
                file,
                header,
                TensorKey(prefix + true, "output", "0", place.step, 0, place.rank, process),
                class_name=op.class_name,
                events=self.events,
            )
            yield from inside
            if not header.tensors:
                self.note("warning", f"{file}: holds no tensor")
        except (Malformed, OSError) as trouble:
            key = TensorKey.of(prefix + op.op_name, "output", step=place.step, rank=place.rank)
            yield Leaf(
                Record(
                    key._replace(process=process),
                    0,
                    "",
                    (),
                    class_name=op.class_name,
                    lost=reason_of(trouble),
                ),
                file,
            )

    def topologies(self, leaves: list[Leaf]) -> dict[tuple[int, int], dict[str, Any]]:
        """The graphs of each rank and process, with or without a graph text."""
        classes: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
        for leaf in leaves:
            key = leaf.record.key
            classes[key.rank, key.process].setdefault(key.site, leaf.record.class_name)
        graphs: dict[tuple[int, int], dict[tuple[str, str], str]] = defaultdict(dict)
        for place, _ in self._files:
            process = self.processes[place.rank, place.session]
            graphs[place.rank, process][place.graph, place.graph_id] = place.session
        topologies: dict[tuple[int, int], dict[str, Any]] = {}
        for owner, named in sorted(graphs.items()):
            described: list[dict[str, Any]] = []
            ordered = sorted(named, key=lambda graph: [natural(part) for part in graph])
            for index, graph in enumerate(ordered):
                texts = self._texts_of(graph, index, len(ordered), owner[0], named[graph])
                nodes = self._nodes(texts, self._parsed_texts)
                source = ", ".join(text.file for text in texts)
                described.append(as_json(graph[0], self.prefixes[graph], source, "ge", nodes))
            topologies[owner] = topology(described, classes[owner])
        return topologies

    def _texts_of(
        self, graph: tuple[str, str], index: int, graphs: int, rank: int, session: str
    ) -> list[GraphText]:
        """The original text of a graph and the optimised one, each the newest before the dump."""
        candidates = [text for text in self._texts if _rank_of(text) in (None, rank)] or self._texts
        # `graph_1` is the graph whose text has id 1, if the numbers agree.
        number = re.search(r"\d+", graph[0])
        wanted = int(number[0][:18]) if number else None
        chosen: list[GraphText] = []
        for original in (True, False):
            texts = [text for text in candidates if text.original is original]
            ids = sorted({text.graph_id for text in texts}, key=lambda n: -1 if n is None else n)
            if wanted in ids:
                fitting = [text for text in texts if text.graph_id == wanted]
            # If numbers disagree but counts agree, take them in order.
            elif len(ids) == graphs:
                fitting = [text for text in texts if text.graph_id == ids[index]]
            else:
                continue
            fitting.sort(key=lambda text: text.stamp)
            # A text from after the session began belongs to a later compilation.
            before = [text for text in fitting if not session or text.stamp[:14] <= session]
            chosen.append((before or fitting[:1])[-1])
        return chosen

    def _nodes(self, texts: list[GraphText], parsed: dict[str, list[GraphNode]]) -> list[GraphNode]:
        """Operators of the original graph, and those that optimisation added."""
        nodes: dict[str, GraphNode] = {}
        for text in texts:
            if text.file not in parsed:
                parsed[text.file] = self._parsed(text)
            for node in parsed[text.file]:
                nodes.setdefault(node.name, node)
        return list(nodes.values())

    def _parsed(self, text: GraphText) -> list[GraphNode]:
        place, name = self.folder, text.file
        if Path(name).is_absolute():
            place, name = Folder(Path(name).parent), Path(name).name
        try:
            nodes = parse_graph(place.read(name, LONGEST).decode("utf-8", "replace"))
        except (NotText, OSError) as trouble:
            self.note("warning", f"{text.file}: no graph text: {reason_of(trouble)}")
            return []
        self.texts_read.append(text.file)
        return nodes


def _topological(nodes: Sequence[GraphNode]) -> dict[str, int]:
    """Position of each operator; one that is part of a circle keeps its position in the text."""
    feeds: dict[str, list[str]] = {node.name: [] for node in nodes}
    waits = {node.name: 0 for node in nodes}
    for node in nodes:
        for maker in {maker for maker, _ in node.inputs if maker in feeds}:
            feeds[maker].append(node.name)
            waits[node.name] += 1
    ready = deque(name for name, count in waits.items() if not count)
    order: dict[str, int] = {}
    while ready:
        name = ready.popleft()
        order[name] = len(order)
        for reader in feeds[name]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    for node in nodes:
        order.setdefault(node.name, len(order))
    return {flat(name): place for name, place in order.items()}


def _position_of(op_name: str, positions: Mapping[str, int]) -> int | None:
    """The position of an operator, or of the first one inside a fused operator."""
    name = flat(op_name)
    if name in positions:
        return positions[name]
    # The name of a fused operator consists of the names of its parts, one after the other.
    starts = [operator for operator in positions if operator and name.startswith(operator)]
    return positions[max(starts, key=len)] if starts else None


def _rank_of(text: GraphText) -> int | None:
    if text.rank is not None:
        return text.rank
    for part in reversed(text.file.split("/")[:-1]):
        if match := WORLD.fullmatch(part):
            return int(match[2][:9])
    return None
