"""Bytes of files elsewhere, fetched in blocks, of which a bounded number is kept.

Small tensors lie beside each other: one block brings many of them. Blocks that are wanted and lie
in a row come in one piece. What is large goes past the cache, so that the rest stays in it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from driftline.numerics.kernel import address_of
from driftline.runs.layout import ALIGNMENT
from driftline.runs.stores.store import Store

BLOCK = 1 << 20
KEPT = 128 << 20
LARGE = 4 << 20
"""From so many bytes on a piece is fetched as it is, and not kept."""


class Blocks:
    """Pieces of the files of one store; for any number of threads."""

    def __init__(self, store: Store, *, block: int = BLOCK, kept: int = KEPT) -> None:
        self._store = store
        self._block = block
        self._most = max(1, kept // block)
        self._known: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._coming: dict[tuple[str, int], Future[bytes]] = {}
        self._lock = threading.Lock()

    def fetch(self, name: str, start: int, stop: int, size: int) -> tuple[bytearray, int]:
        """A buffer that holds these bytes of a file, and where in it they begin; see `aligned`.

        Args:
            name: The file.
            start: First byte.
            stop: The byte after the last one.
            size: Of the file.

        Raises:
            OSError: They are not there.
            DriftlineError: The store cannot be reached.
        """
        if stop - start >= LARGE:
            return aligned(self._store.read(name, start, stop), start)
        first, last = start // self._block, (stop - 1) // self._block
        wanted = [(name, number) for number in range(first, last + 1)]
        found, awaited, mine = self._sort(wanted)
        try:
            for run in _in_rows(mine):
                begin, end = run[0] * self._block, min((run[-1] + 1) * self._block, size)
                content = self._store.read(name, begin, end)
                for at, number in enumerate(run):
                    piece = content[at * self._block : (at + 1) * self._block]
                    found[number] = piece
                    self._keep((name, number), piece)
        except BaseException as trouble:
            self._give_up([(name, number) for number in mine], trouble)
            raise
        for number, future in awaited.items():
            found[number] = future.result()
        skipped = start - first * self._block
        if first == last:
            content = memoryview(found[first])
        else:
            content = memoryview(b"".join(found[number] for number in range(first, last + 1)))
        return aligned(content[skipped : skipped + stop - start], start)

    def release(self) -> None:
        with self._lock:
            self._known.clear()

    def _sort(
        self, wanted: list[tuple[str, int]]
    ) -> tuple[dict[int, bytes], dict[int, Future[bytes]], list[int]]:
        """What is here, what somebody else is fetching, and what is ours to fetch."""
        found: dict[int, bytes] = {}
        awaited: dict[int, Future[bytes]] = {}
        mine: list[int] = []
        with self._lock:
            for key in wanted:
                if key in self._known:
                    self._known.move_to_end(key)
                    found[key[1]] = self._known[key]
                elif key in self._coming:
                    awaited[key[1]] = self._coming[key]
                else:
                    self._coming[key] = Future()
                    mine.append(key[1])
        return found, awaited, mine

    def _keep(self, key: tuple[str, int], piece: bytes) -> None:
        with self._lock:
            self._known[key] = piece
            while len(self._known) > self._most:
                self._known.popitem(last=False)
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
    """Bytes in memory as a mapped file would have them, and where in the buffer they begin.

    How sums are grouped depends on how the first element lies in memory: so laid, the last bits of
    every figure are those of the same run on this machine.
    """
    buffer = bytearray(len(content) + ALIGNMENT)
    at = (start - address_of(memoryview(buffer))) % ALIGNMENT
    buffer[at : at + len(content)] = content
    return buffer, at


def _in_rows(numbers: list[int]) -> list[list[int]]:
    """Numbers that follow each other, together.

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
