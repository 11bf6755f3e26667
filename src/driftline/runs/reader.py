"""Open a run: the index is read at first use, and shards are mapped when values are needed.

Everything that a file of the run claims is checked: a damaged or hostile run gives losses, not
crashes. `Files` hides whether the files are in a folder or in a store.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from driftline.errors import BadFile, BadRun
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.local_files import (
    FolderFiles,
    is_inside,
    object_in,
    read_object,
    reason_of,
)
from driftline.runs.index import IndexLines, IndexRecords, MemoryBudget, uncollected
from driftline.runs.index_lines import SHORT, Line, check_line, decode_together, decoder, record_of
from driftline.runs.jobs import gaps, refuse_mixed
from driftline.runs.layout import (
    EVENTS,
    FORMAT,
    INDEX,
    MANIFEST,
    MODEL,
    ORPHAN_EVENTS,
    PROCESS,
    SCHEMA,
    STEPS,
    TOPOLOGY,
    WEIGHTS,
    folder_name,
    is_shard_name,
    parse_folder,
)
from driftline.runs.records import Record
from driftline.runs.run import Loss, Memory, ReadAhead, Run, Storage, no_values

if TYPE_CHECKING:
    from driftline.runs.files.local_files import Files
    from driftline.runs.sinks import JSON


def no_folder(place: Path) -> BadRun:
    """The error for a path that is not a folder, with the nearest name as a hint."""
    if place.is_file():
        return BadRun(
            f"'{place}' is a file, not the folder of a run",
            hint=f"give the folder '{place.parent}'" if place.name == MANIFEST else "",
        )
    hint = "give the folder of a run (`driftline dump -o` writes one), or a file of tensors"
    if place.is_symlink() and not place.exists():
        return BadRun(f"'{place}' is a link that leads nowhere")
    if place.exists():  # a pipe or a device: reading it could wait for ever
        return BadRun(f"'{place}' is neither a file nor a folder")
    if place.parent.is_dir():
        import difflib  # a module import would cost every command a millisecond

        names = [child.name for child in place.parent.iterdir()]
        near = difflib.get_close_matches(place.name, names, n=2)
        if near:
            hint = "did you mean " + " or ".join(f"'{place.parent / name}'" for name in near) + "?"
    return BadRun(f"there is no '{place}'", hint=hint)


# Files of a process that are not side tables.
_USUAL = frozenset({INDEX, EVENTS, TOPOLOGY, PROCESS, MODEL, STEPS, WEIGHTS})
# Facts about models are read like side tables, but not listed among them.
_FACTS = frozenset({MODEL, STEPS, WEIGHTS})
_MOST_BAD_LINES = 1000
_MOST_ALIKE = 100
_FEW_PROCESSES = 64
"""With more processes, their facts are not kept in memory: each takes some kilobytes."""
# A damaged index may have no line ends; none of our lines comes near this length.
_LONGEST_LINE = 16 << 20
_SMALL_FILE = 64 << 20
_LARGE_FILE = 1 << 30
_UNSEALED: Mapping[bool | None, str] = {
    True: "is still being written: this is what was complete when it was read",
    # Usually only the last 0.2 s: a program that holds the interpreter's lock delays our writing.
    False: "was not closed: it was killed, and its last 0.2 s may be missing, at most 64 MB",
    None: "was not closed (killed, or still running): its last 0.2 s may be missing, at most 64 MB",
}
_NO_PROCESS = (
    "no process has called anything that is watched: the program was killed before, or only starts"
)
_NO_FACTS = f"has no {PROCESS}: the disk was full, or the program was killed while it began"
_NO_TENSOR: Mapping[bool | None, str] = {
    True: "is still being written, and has no tensor yet",
    False: "the program was killed before its first tensor was written",
    None: "has no tensor: the program was killed before its first one was written, or still runs",
}


def open_run(path: str | os.PathLike[str]) -> DiskRun:
    """Open a run folder for reading. This is fast, because the index is read at first use.

    Raises:
        BadRun: There is nothing, something else, or a run of a newer format.
    """
    place = Path(path)
    if not place.is_dir():
        raise no_folder(place)
    try:
        names = sorted(child.name for child in place.iterdir())
    except OSError as error:
        raise BadRun(f"'{place}' cannot be read: {error.strerror}") from None
    # Resolved once: everything that is opened later must be below this path.
    root = place.resolve()
    folders = [name for name in names if parse_folder(name) and is_inside(root, root / name)]
    losses: list[Loss] = []
    for name in names:
        if parse_folder(name) and name not in folders:
            losses.append(
                Loss(name, "leads out of the run's folder, or is no folder; not followed")
            )
    manifest: Mapping[str, Any] = {}
    try:
        manifest = read_object(root, root / MANIFEST, _SMALL_FILE)
    except (OSError, ValueError, RecursionError) as error:
        # A manifest may be lost with its machine; the tensors are still worth reading.
        if not any((root / name / INDEX).is_file() for name in folders):
            raise BadRun(
                f"'{place}' is no run: looked for {MANIFEST} and rank*/{INDEX}",
                hint="give the folder that `driftline dump -o` made",
            ) from None
        losses.append(Loss(MANIFEST, f"cannot be read: {reason_of(error)}"))
    else:
        check_schema(str(place), manifest)
        if not folders and not losses:
            losses.append(Loss(MANIFEST, _NO_PROCESS))
    return DiskRun(str(place), FolderFiles(root), manifest, folders, losses)


def check_schema(place: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest of another or a newer format.

    Raises:
        BadRun: The manifest has another or a newer format.
    """
    schema = manifest.get("schema")
    if manifest.get("format") != FORMAT or type(schema) is not int or schema < 1:
        raise BadRun(
            f"'{place}' is no run: its {MANIFEST} does not say format '{FORMAT}' "
            "and a schema number"
        )
    if schema > SCHEMA:
        raise BadRun(
            f"run '{place}' has schema {schema}, and this Driftline reads schema {SCHEMA}",
            hint="install the Driftline that wrote it, or a newer one",
        )


def _size(file: BinaryIO) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


class _Part:
    """The part of one process: its folder, lines and shards."""

    def __init__(self, files: Files, name: str, room: MemoryBudget, *, keeps_facts: bool) -> None:
        place = parse_folder(name)
        assert place is not None
        self.rank, self.process = place
        self.files = files
        self.name = name
        self.growing = False
        self._keeps_facts = keeps_facts
        self._sealed_facts: Mapping[str, Any] | None = None
        self.lines = IndexLines(room, lambda: files.open(f"{name}/{INDEX}"))
        self.shards = files.shards(name)

    def load(self, losses: list[Loss]) -> None:
        try:
            with self.files.open(f"{self.name}/{INDEX}") as file:
                self._decode(file, losses)
        except OSError as error:
            losses.append(Loss(f"{self.name}/{INDEX}", f"cannot be read: {reason_of(error)}"))
            return
        self._check_process(losses)

    def _decode(self, file: BinaryIO, losses: list[Loss]) -> None:
        size = _size(file)
        decode = decoder(size)
        source, together = file, None
        # Nearly every index is short and undamaged, and can be decoded in one call.
        if size <= SHORT:
            content = file.read()
            source, together = io.BytesIO(content), decode_together(content)
            if together is not None and self._add_lines(together):
                return
        # Each shard is opened once for its size, not once for every tensor in it.
        sizes: dict[str, int | str] = {}
        keep = self.lines.append
        by_reason: dict[str, int] = {}
        bad = end = 0
        # Bounded, because a file without line ends must not become one string.
        rows = iter(lambda: source.readline(_LONGEST_LINE), b"")
        for number, row in enumerate(rows, 1):
            start, end = end, end + len(row)
            if row == b"\n":
                continue
            try:
                line = decode(row) if together is None else together[number - 1]
                check_line(line)
            except (ValueError, RecursionError, OverflowError) as error:
                bad += 1
                # A foreign index may have a million bad lines; the first ones say enough.
                if bad <= _MOST_BAD_LINES:
                    losses.append(self._bad_line(number, row, error))
                continue
            if line.shard and not line.lost:
                size = sizes.get(line.shard)
                if size is None:
                    size = sizes[line.shard] = self.shards.size(line.shard)
                if type(size) is str:
                    line.lost = size
                # The process was killed after the line was written, but before its bytes were on
                # disk.
                elif line.offset + line.length > cast("int", size):
                    line.lost = f"{line.shard} ends before its last byte"
            if line.lost:
                self._add_loss(line, by_reason, losses)
            keep(line, start, end - start, ended=row[-1:] == b"\n")
        self.lines.finish(file)
        if bad > _MOST_BAD_LINES:
            more = bad - _MOST_BAD_LINES
            losses.append(Loss(f"{self.name}/{INDEX}", f"{more} more lines cannot be read"))
        for reason, count in by_reason.items():
            if count > _MOST_ALIKE:
                losses.append(Loss(self.name, f"{count - _MOST_ALIKE} more tensors: {reason}"))

    def _add_lines(self, lines: list[Line]) -> bool:
        """Take a short index without errors; False if errors must be located line by line."""
        ends: dict[str, int] = {}
        try:
            for line in lines:
                check_line(line)
                if line.lost:
                    return False
                if line.shard:
                    # The last byte of each shard is enough to show whether any tensor is cut off.
                    end = line.offset + line.length
                    ends[line.shard] = max(ends.get(line.shard, 0), end)
        except (ValueError, RecursionError, OverflowError):
            return False
        sizes = ((self.shards.size(shard), end) for shard, end in ends.items())
        if any(type(size) is str or end > cast("int", size) for size, end in sizes):
            return False
        return self.lines.take(lines)

    def _add_loss(self, line: Line, by_reason: dict[str, int], losses: list[Loss]) -> None:
        """Add one loss per tensor, up to a hundred for each reason, such as a full disk."""
        count = by_reason[line.lost] = by_reason.get(line.lost, 0) + 1
        if count <= _MOST_ALIKE:
            key = record_of(line, self.rank, self.process).key
            losses.append(Loss(str(key), line.lost, key))

    def _bad_line(self, number: int, row: bytes, error: BaseException) -> Loss:
        where = f"{self.name}/{INDEX}:{number}"
        if not row.endswith(b"\n") and len(row) < _LONGEST_LINE:
            return Loss(
                where,
                "the last line is cut in half; while it was written, the process was killed or the "
                "disk was full",
            )
        return Loss(where, f"cannot be read: {reason_of(error)}")

    def _check_process(self, losses: list[Loss]) -> None:
        facts = self.facts()
        # An unsealed part was left by a killed or living process; its numbers are not final.
        if facts.get("sealed") is not True:
            written = self.files.is_written(self.name)
            self.growing = written is True
            reason = (_UNSEALED if len(self.lines) else _NO_TENSOR)[written]
            # If the disk was too full for the last facts, the process was not killed.
            if not self.growing and (failure := self._failure()):
                reason = f"was not closed: {failure}"
            elif not self.growing and not facts:
                reason = _NO_FACTS
            losses.append(Loss(self.name, reason))
            return
        promised = facts.get("tensors")
        # Fewer lines than the process counted: the index was truncated after it was closed.
        if type(promised) is int and promised > len(self.lines):
            missing = promised - len(self.lines)
            losses.append(Loss(self.name, f"{missing} of {promised} tensors are not in its index"))
        failure = facts.get("failure")
        if isinstance(failure, str) and failure:
            losses.append(Loss(self.name, f"writing stopped before the end: {failure}"))

    def _failure(self) -> str:
        """The process's message about a full disk; empty if there is none."""
        try:
            text = self.files.read(f"{self.name}/{EVENTS}", _SMALL_FILE)
        except OSError:
            return ""
        for line in text.split(b"\n"):
            if b'"disk"' not in line:
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and cast("dict[str, Any]", event).get("kind") == "disk":
                return str(cast("dict[str, Any]", event).get("message"))[:300]
        return ""

    def facts(self) -> Mapping[str, Any]:
        """Content of process.json; kept if there are few processes and this one is closed."""
        if self._sealed_facts is not None:
            return self._sealed_facts
        try:
            facts = object_in(self.files, f"{self.name}/{PROCESS}", _SMALL_FILE)
        except (OSError, ValueError, RecursionError):
            return {}
        # Facts of a growing run change, so only those of a closed one are kept.
        if self._keeps_facts and facts.get("sealed") is True:
            self._sealed_facts = facts
        return facts


class DiskRun(Run):
    """An opened run; made by `open_run`, or by `stores.remote_run` for a run at an address."""

    def __init__(
        self,
        name: str,
        files: Files,
        manifest: Mapping[str, Any],
        folders: Sequence[str],
        losses: Sequence[Loss],
    ) -> None:
        self.name = name
        self.fetched = files.fetched
        self._files = files
        self._manifest = manifest
        room = MemoryBudget()
        few = len(folders) <= _FEW_PROCESSES
        parts = [_Part(files, name, room, keeps_facts=few) for name in folders]
        parts.sort(key=lambda part: (part.rank, part.process))
        self._parts = {(part.rank, part.process): part for part in parts}
        self._losses = list(losses)
        self._records: IndexRecords | None = None
        # Only several parts can belong to different runs; a single part is read when it is needed.
        if len(parts) > 1:
            refuse_mixed(name, manifest, [(part.name, part.facts()) for part in parts])

    def _load(self) -> IndexRecords:
        if self._records is None:
            # A hundred thousand small lists keep the collector busier than the decoder.
            with uncollected():
                parts = list(self._parts.values())
                for part in parts:
                    part.load(self._losses)
                self._records = IndexRecords(parts)
                ends = [part.lines.last_step for part in parts]
                self._losses += gaps(list(zip(self.processes(), ends, strict=True)))
        return self._records

    @property
    def records(self) -> Sequence[Record]:
        return self._load()

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The content of run.json."""
        return self._manifest

    @property
    def losses(self) -> Sequence[Loss]:
        self._load()
        return self._losses

    @property
    def growing(self) -> bool:
        self._load()
        return any(part.growing for part in self._parts.values())

    @property
    def sealed(self) -> bool:
        """Whether every process closed its part."""
        return all(facts.get("sealed") is True for facts in self.processes())

    def processes(self) -> list[Mapping[str, Any]]:
        """The facts that each process stored: process.json, with rank and process."""
        return [
            {**part.facts(), "rank": part.rank, "process": part.process}
            for part in self._parts.values()
        ]

    def raw(self, record: Record) -> Storage:
        blob = record.blob
        if blob is None or record.lost:
            return no_values(record)
        content, offset = self._part_of(record).shards.content(record)
        storage = np.dtype(DTYPES[record.dtype].storage)
        return np.frombuffer(content, storage, blob.length // storage.itemsize, offset)

    def memory(self, record: Record) -> Memory | None:
        if record.blob is None or record.lost:
            return None
        return self._part_of(record).shards.memory(record)

    def window(self, record: Record, start: int, stop: int) -> Memory | None:
        if record.blob is None or record.lost:
            return None
        return self._part_of(record).shards.window(record, start, stop)

    def read_ahead(self) -> ReadAhead | None:
        return self._files.read_ahead({place: part.name for place, part in self._parts.items()})

    def _part_of(self, record: Record) -> _Part:
        part = self._parts.get((record.key.rank, record.key.process))
        if part is None:
            raise BadFile(
                f"run '{self.name}' has no {folder_name(record.key.rank, record.key.process)}"
            )
        return part

    def cut_off(self) -> Callable[[Record], str] | None:
        shorter = {
            (place, shard): size
            for place, part in self._parts.items()
            for shard, size in part.shards.shortened().items()
        }
        if not shorter:
            return None

        def reason(record: Record) -> str:
            blob = record.blob
            size = blob and shorter.get(((record.key.rank, record.key.process), blob.shard))
            if blob is None or size is None or blob.offset + blob.length <= size:
                return ""
            return f"{blob.shard} became shorter while it was read"

        return reason

    def release(self) -> None:
        for part in self._parts.values():
            part.shards.release()

    def release_some(self) -> None:
        if not self.fetched:  # memory of fetched values is bounded anyway
            self.release()

    def events(self) -> Iterator[Mapping[str, Any]]:
        parts = self._parts.values()
        places = [(f"{part.name}/{EVENTS}", part.rank, part.process) for part in parts]
        # Events of processes without a folder come first: they were written before any tensor.
        for name, rank, process in [(ORPHAN_EVENTS, None, None), *places]:
            try:
                text = self._files.read(name, _LARGE_FILE)
            except OSError:
                continue
            for line in text.split(b"\n"):
                try:
                    event = json.loads(line) if line else None
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield {**cast("dict[str, Any]", event), "rank": rank, "process": process}

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        part = self._parts.get((rank, process))
        if part is None:
            return None
        try:
            return object_in(self._files, f"{part.name}/{TOPOLOGY}", _LARGE_FILE)
        except (OSError, ValueError, RecursionError):
            return None

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        part = self._parts.get((rank, process))
        names = [] if part is None else self._files.names(part.name)
        others = [name for name in names if name not in _USUAL and not is_shard_name(name)]
        if not others:
            return others
        from driftline.runs.sidecars.operator_sheets import (
            sheets_among,  # a millisecond, which few runs need
        )

        return sheets_among(others)

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        # Names are checked against the listing, so that a caller's text never becomes a path.
        part = self._parts.get((rank, process))
        if part is None or (name not in _FACTS and name not in self.sheets(rank, process)):
            return ""
        try:
            content = self._files.read(f"{part.name}/{name}", _LARGE_FILE)
        except OSError:
            return ""
        return content.decode("utf-8", "replace")

    def _site_names(self) -> Iterator[str]:
        return self._load().sites()

    def __repr__(self) -> str:
        return f"<run '{self.name}'>"
