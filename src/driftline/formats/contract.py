"""What a format must offer to be opened; `driftline.testing` holds it to more."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from driftline.formats.member import Member
from driftline.runs.run import Run


class Format(Protocol):
    """What a format of named tensors must offer."""

    NAME: str

    def sniff(self, path: Path, /) -> bool:
        """Whether this looks like one of ours; reads a few bytes, never raises for content."""
        ...

    def members(self, path: Path, /) -> list[Member]:
        """The tensors inside, unread; raises a DriftlineError for whatever cannot be believed."""
        ...


class TreeFormat(Protocol):
    """What a format with keys of its own must offer."""

    NAME: str

    def sniff(self, path: Path, /) -> bool:
        """Whether this looks like one of ours; looks at few names and bytes, never raises."""
        ...

    def open(self, path: Path, /) -> Run:
        """The dump as a run, no value read; a file that cannot be believed is a lost tensor."""
        ...
