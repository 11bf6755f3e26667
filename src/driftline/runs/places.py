"""What a reader asks of the place where a run's files lie. For types only: never loaded.

Names are relative to the run, with `/` between levels, and only those the format knows are asked
for; none of them comes from inside a file but names of shards, which are matched first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol

from driftline.runs.kept_lines import KeptLines
from driftline.runs.record import Record
from driftline.runs.run import Memory, ReadAhead


class ShardFiles(Protocol):
    """The shards in one folder of a run."""

    def size(self, shard: str) -> int | str:
        """How many bytes a shard has, or why that cannot be said."""
        ...

    def content(self, record: Record) -> tuple[Any, int]:
        """A buffer that holds a record's bytes, and where in it they begin.

        Raises:
            DriftlineError: They cannot be read.
        """
        ...

    def memory(self, record: Record) -> Memory:
        """Where a record's bytes lie.

        Raises:
            DriftlineError: They cannot be read.
        """
        ...

    def window(self, record: Record, start: int, stop: int) -> Memory:
        """The same of some of its bytes, as if the others lay around them.

        Raises:
            DriftlineError: They cannot be read.
        """
        ...

    def release(self) -> None:
        """Let go of what is held in memory."""
        ...


class Files(Protocol):
    """The files of one run."""

    fetched: bool
    """Whether bytes come from another machine, so that a part of a tensor costs less than all."""

    def open(self, name: str) -> BinaryIO:
        """A file to be read from its start.

        Raises:
            OSError: It is not there, or leads out of the run.
        """
        ...

    def read(self, name: str, limit: int) -> bytes:
        """All of a file.

        Raises:
            OSError: As `open`, or it has more bytes than the limit.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """The plain files in a folder; none where it cannot be listed."""
        ...

    def shards(self, folder: str) -> ShardFiles:
        """The shards in a folder."""
        ...

    def is_written(self, folder: str) -> bool | None:
        """Whether a living process writes there now; None where that cannot be told."""
        ...

    def read_ahead(self, parts: Mapping[tuple[int, int], str]) -> ReadAhead | None:
        """What reads many small tensors in the background; folders by rank and process."""
        ...


class Listed(Protocol):
    """What one process listed."""

    rank: int
    process: int
    lines: KeptLines
