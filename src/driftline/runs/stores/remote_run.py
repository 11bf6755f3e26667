"""A run at an address, opened like a local one: first the index is fetched, then ranges of shards.

As with a local folder, nothing in the run is trusted: names of shards are checked before they
become part of an address, sizes are checked against those of the store, and an address inside a run
is never opened.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from driftline.errors import BadFile, BadRun, DriftlineError
from driftline.numerics.kernel import address_of
from driftline.runs.files.local_files import check_inside, object_in, reason_of
from driftline.runs.layout import MANIFEST, is_shard_name, parse_folder
from driftline.runs.reader import DiskRun, check_schema
from driftline.runs.records import Record
from driftline.runs.run import Loss, Memory
from driftline.runs.stores.block_cache import Blocks, aligned
from driftline.runs.stores.store import Store
from driftline.runs.stores.upload import CLAIM

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A request costs more than some extra bytes: reading a little too much is cheaper than asking
# twice.
_SMALL_FILE = 64 << 20
_CHUNK = 4 << 20
_AT_ONCE = 8
_GAP = 128 << 10
_LONGEST_SPAN = 8 << 20
_BEING_SENT = (
    "is still being sent, or its sending was broken off: this is what had arrived when it was read"
)


def open_remote(url: str) -> DiskRun:
    """Open a run at an address. Takes a few small requests; the index is fetched at first use.

    Raises:
        BadRun: There is nothing, or no run of Driftline.
        DriftlineError: The address cannot be reached.
    """
    store = Store(url)
    names = store.sizes()
    folders = [name for name, size in names.items() if size is None and parse_folder(name)]
    if MANIFEST not in names and not folders:
        raise _no_run(store, names)
    files = RemoteFiles(store)
    losses: list[Loss] = []
    manifest: Mapping[str, Any] = {}
    try:
        manifest = object_in(files, MANIFEST, _SMALL_FILE)
    except (OSError, ValueError, RecursionError) as error:
        if not folders:
            raise BadRun(f"{store.name} is no run: {MANIFEST} {reason_of(error)}") from None
        losses.append(Loss(MANIFEST, f"cannot be read: {reason_of(error)}"))
    else:
        check_schema(store.name, manifest)
    if CLAIM in names:
        losses.append(Loss(store.name, _BEING_SENT))
        files.sent = False
    return DiskRun(store.name, files, manifest, folders, losses)


def _no_run(store: Store, names: Mapping[str, int | None]) -> BadRun:
    if "table.json" in names:
        return BadRun(
            f"{store.name} is a comparison table, not a run",
            hint=f"look at it with: driftline show {store.name}",
        )
    if names:
        return BadRun(
            f"{store.name} is no run of driftline",
            hint="dumps of other programs are read from this machine: copy it here, or there: "
            "driftline convert DUMP -o RUN, driftline push RUN URL",
        )
    if (size := store.size("")) is not None:
        return BadRun(
            f"{store.name} is a file of {size} bytes, and only runs and tables are read from "
            "elsewhere",
            hint="copy it to this machine first",
        )
    return BadRun(f"there is nothing at {store.name}")


class RemoteFiles:
    """The files of a run in a store."""

    fetched = True

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sent = True
        self.blocks = Blocks(store)
        self._sizes: dict[str, dict[str, int | None]] = {}

    def open(self, name: str) -> BinaryIO:
        folder, _, own = name.rpartition("/")
        size = self.sizes(folder).get(own)
        if size is None:
            raise FileNotFoundError(2, "is not there")
        if size <= _CHUNK:
            return io.BytesIO(self.store.read(name, 0, size))
        # A long index is read several times, so it is copied to a temporary file.
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        with io.BufferedReader(_Stream(self.store, name, size), _CHUNK) as stream:
            shutil.copyfileobj(stream, copy, _CHUNK)
        copy.seek(0)
        return cast("BinaryIO", copy)

    def read(self, name: str, limit: int) -> bytes:
        folder, _, own = name.rpartition("/")
        size = self.sizes(folder).get(own)
        if size is None:
            raise FileNotFoundError(2, "is not there")
        if size > limit:
            raise OSError(0, f"has {size} bytes, more than anybody would write there")
        return self.store.read(name, 0, size)

    def names(self, folder: str) -> list[str]:
        return sorted(name for name, size in self.sizes(folder).items() if size is not None)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Names and sizes in a folder, fetched once."""
        listing = self._sizes.get(folder)
        if listing is None:
            listing = self._sizes[folder] = self.store.sizes(folder)
        return listing

    def shards(self, folder: str) -> RemoteShards:
        return RemoteShards(self, folder)

    def is_written(self, folder: str) -> bool | None:
        """Whether the upload is incomplete; the writing process itself cannot be seen."""
        del folder
        return not self.sent

    def read_ahead(self, parts: Mapping[tuple[int, int], str]) -> FetchAhead:
        return FetchAhead(self, parts)


class _Stream(io.RawIOBase):
    """A remote file, read from start to end; the next piece is fetched in the background."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._size = size
        self._at = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="driftline-fetch")
        self._next = self._begin(0)

    def _begin(self, start: int) -> Future[bytes] | None:
        if start >= self._size:
            return None
        stop = min(start + _CHUNK, self._size)
        return self._pool.submit(self._store.read, self._name, start, stop)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        if self._next is None or not view:
            return 0
        content = self._next.result()
        count = min(len(view), len(content))
        view[:count] = content[:count]
        self._at += count
        # The caller's buffer was smaller than the piece; the rest is the next answer.
        if count < len(content):
            rest: Future[bytes] = Future()
            rest.set_result(content[count:])
            self._next = rest
        else:
            self._next = self._begin(self._at)
        return count

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()


class RemoteShards:
    """The shards in one folder of a remote run."""

    def __init__(self, files: RemoteFiles, folder: str) -> None:
        self._files = files
        self._folder = folder

    def size(self, shard: str) -> int | str:
        size = self._files.sizes(self._folder).get(shard)
        return size if size is not None else f"{shard} is missing"

    def content(self, record: Record) -> tuple[bytearray, int]:
        blob = record.blob
        assert blob is not None
        return self._fetch(record, blob.offset, blob.offset + blob.length)

    def memory(self, record: Record) -> Memory:
        content, offset = self.content(record)
        assert record.blob is not None
        return Memory(address_of(memoryview(content)) + offset, record.blob.length, content)

    def window(self, record: Record, start: int, stop: int) -> Memory:
        blob = record.blob
        assert blob is not None
        stop = min(stop, blob.length)
        content, offset = self._fetch(record, blob.offset + start, blob.offset + stop)
        # The address that the complete tensor would have; callers of a window stay inside it.
        address = address_of(memoryview(content)) + offset - start
        return Memory(address, blob.length, content)

    def shortened(self) -> dict[str, int]:
        """Nothing: an object that is fetched in parts is checked with each part."""
        return {}

    def release(self) -> None:
        self._files.blocks.release()

    def _fetch(self, record: Record, start: int, stop: int) -> tuple[bytearray, int]:
        blob = record.blob
        assert blob is not None
        # The name comes from the run's index, and becomes part of an address.
        if not is_shard_name(blob.shard):
            raise BadFile(f"'{blob.shard[:60]}' is not the name of a shard")
        size = self.size(blob.shard)
        if isinstance(size, str):
            raise BadFile(f"{record.key} has no values: {size}")
        check_inside(record, size)
        if stop <= start:
            return bytearray(1), 0
        name = f"{self._folder}/{blob.shard}"
        try:
            return self._files.blocks.fetch(name, start, stop, size)
        except OSError as error:
            raise BadFile(f"{name} cannot be read: {reason_of(error)}") from None


class _Span(NamedTuple):
    """Consecutive bytes that are fetched together."""

    name: str
    start: int
    stop: int


class FetchAhead:
    """Fetches the values of small tensors while others are measured; only one thread may use it."""

    def __init__(self, files: RemoteFiles, parts: Mapping[tuple[int, int], str]) -> None:
        self._files = files
        self._parts = parts
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="driftline-fetch")
        self._records: Sequence[Record] = ()
        self._coming: dict[_Span, Future[bytes]] = {}
        self._where: list[_Span | None] = []

    def begin(self, records: Sequence[Record]) -> None:
        self._records = records
        self._where = [None] * len(records)
        asked: list[tuple[str, int, int, int]] = []
        for position, record in enumerate(records):
            name = self._name_of(record)
            if name and record.blob is not None:
                blob = record.blob
                asked.append((name, blob.offset, blob.offset + blob.length, position))
        # Sorted by file and offset, so that neighbours can be joined into one request.
        asked.sort()
        spans: list[_Span] = []
        members: list[list[int]] = []
        for name, start, stop, position in asked:
            # A small gap is fetched too; a span is bounded, so that several requests run in
            # parallel.
            last = spans[-1] if spans else None
            if (
                last is not None
                and last.name == name
                and start - last.stop <= _GAP
                and stop - last.start <= _LONGEST_SPAN
            ):
                spans[-1] = last._replace(stop=max(stop, last.stop))
                members[-1].append(position)
            else:
                spans.append(_Span(name, start, stop))
                members.append([position])
        self._coming = {}
        # Tensors that share their bytes share a span.
        for span, positions in zip(spans, members, strict=True):
            if span not in self._coming:
                self._coming[span] = self._pool.submit(self._files.store.read, *span)
            for position in positions:
                self._where[position] = span

    def take(self) -> list[Memory | None]:
        memories: list[Memory | None] = []
        fetched: dict[_Span, tuple[bytearray, int] | None] = {}
        for record, span in zip(self._records, self._where, strict=True):
            if span is None or record.blob is None:
                memories.append(None)
                continue
            if span not in fetched:
                try:
                    content, begin = aligned(self._coming[span].result(), span.start)
                    fetched[span] = content, address_of(memoryview(content)) + begin
                except (DriftlineError, OSError):
                    fetched[span] = None  # reading the tensor itself will raise the reason
            buffer = fetched[span]
            if buffer is None:
                memories.append(None)
                continue
            content, address = buffer
            offset = record.blob.offset - span.start
            memories.append(Memory(address + offset, record.blob.length, content))
        return memories

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _name_of(self, record: Record) -> str:
        """The file of a record whose bytes are complete; empty for any other record."""
        blob = record.blob
        folder = self._parts.get((record.key.rank, record.key.process), "")
        if blob is None or record.lost or not folder or not is_shard_name(blob.shard):
            return ""
        size = self._files.sizes(folder).get(blob.shard)
        inside = size is not None and 0 <= blob.offset <= blob.offset + blob.length <= size
        return f"{folder}/{blob.shard}" if inside and blob.length else ""
