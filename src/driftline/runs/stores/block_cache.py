"""Cache of remote files: bytes are fetched in blocks, of which a bounded number is kept.

Small tensors are stored next to each other, so one block contains many of them. Consecutive blocks
are fetched in one request. Large tensors bypass the cache, so that they do not displace the rest.
Fetched bytes have the same alignment in memory as in a mapped file: the grouping of sums depends on
the alignment of the first element, so the figures of a remote run equal those of a local run to the
last bit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from driftline.numerics.kernel import address_of
from driftline.runs.layout import ALIGNMENT
from driftline.runs.stores.store import Store

# One block of a megabyte contains many small tensors; 128 of them are kept.
BLOCK = 1 << 20
KEPT = 128 << 20
LARGE = 4 << 20
"""Pieces of at least this many bytes are fetched directly and not kept."""


class Blocks:
    """Blocks of the files of one store; any number of threads may use them."""

    def __init__(self, store: Store, *, block: int = BLOCK, kept: int = KEPT) -> None:
        self._store = store
        self._block = block
        self._most = max(1, kept // block)
        self._cached: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._coming: dict[tuple[str, int], Future[bytes]] = {}
        self._lock = threading.Lock()

    def fetch(self, name: str, start: int, stop: int, size: int) -> tuple[bytearray, int]:
        """Fetch bytes of a file; returns a buffer and their offset in it (see `aligned`).

        Args:
            name: Name of the file.
            start: First byte.
            stop: Offset after the last byte.
            size: Size of the file.

        Raises:
            OSError: The file lacks these bytes.
            DriftlineError: The store cannot be reached.
        """
        if stop - start >= LARGE:
            return aligned(self._store.read(name, start, stop), start)
        first, last = start // self._block, (stop - 1) // self._block
        wanted = [(name, number) for number in range(first, last + 1)]
        blocks, awaited, missing = self._sort(wanted)
        try:
            for row in _in_rows(missing):
                begin, end = row[0] * self._block, min((row[-1] + 1) * self._block, size)
                content = self._store.read(name, begin, end)
                for index, number in enumerate(row):
                    piece = content[index * self._block : (index + 1) * self._block]
                    blocks[number] = piece
                    self._keep((name, number), piece)
        # Other threads wait for these blocks, and must learn of the failure.
        except BaseException as trouble:
            self._give_up([(name, number) for number in missing], trouble)
            raise
        # Wait last: two threads that wait for each other's blocks have then fetched their own
        # first.
        for number, future in awaited.items():
            blocks[number] = future.result()
        skipped = start - first * self._block
        if first == last:
            content = memoryview(blocks[first])
        else:
            content = memoryview(b"".join(blocks[number] for number in range(first, last + 1)))
        return aligned(content[skipped : skipped + stop - start], start)

    def release(self) -> None:
        with self._lock:
            self._cached.clear()

    def _sort(
        self, wanted: list[tuple[str, int]]
    ) -> tuple[dict[int, bytes], dict[int, Future[bytes]], list[int]]:
        """Cached blocks, blocks that another thread is fetching, and blocks to fetch now."""
        cached: dict[int, bytes] = {}
        awaited: dict[int, Future[bytes]] = {}
        missing: list[int] = []
        with self._lock:
            for key in wanted:
                if key in self._cached:
                    self._cached.move_to_end(key)
                    cached[key[1]] = self._cached[key]
                elif key in self._coming:
                    awaited[key[1]] = self._coming[key]
                else:
                    self._coming[key] = Future()
                    missing.append(key[1])
        return cached, awaited, missing

    def _keep(self, key: tuple[str, int], piece: bytes) -> None:
        with self._lock:
            self._cached[key] = piece
            # The least recently used block is dropped.
            while len(self._cached) > self._most:
                self._cached.popitem(last=False)
            future = self._coming.pop(key, None)
        if future is not None:
            future.set_result(piece)

    def _give_up(self, keys: list[tuple[str, int]], trouble: BaseException) -> None:
        for key in keys:
            with self._lock:
                future = self._coming.pop(key, None)
            if future is not None:
                future.set_exception(trouble)


def aligned(content: bytes | memoryview, start: int) -> tuple[bytearray, int]:
    """Copy bytes to a buffer with a mapped file's alignment; returns it and their offset in it.

    The kernel groups sums by the alignment of the first element. With the same alignment, every
    figure has the same last bits as for a local copy of the run.
    """
    buffer = bytearray(len(content) + ALIGNMENT)
    begin = (start - address_of(memoryview(buffer))) % ALIGNMENT
    buffer[begin : begin + len(content)] = content
    return buffer, begin


def _in_rows(numbers: list[int]) -> list[list[int]]:
    """Group consecutive numbers.

    >>> _in_rows([1, 2, 3, 7])
    [[1, 2, 3], [7]]
    """
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return rows
