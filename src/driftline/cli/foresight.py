"""What `driftline compare` begins before its words are read, and before most modules are loaded."""

from __future__ import annotations

import itertools

TYPE_CHECKING = False  # what `typing` calls it
if TYPE_CHECKING:
    from collections.abc import Sequence

_HARMLESS = ("--csv", "--force", "-o", "--output", "--format", "--all", "-q", "--quiet")
"""Options that change nothing about what is measured, and how."""


def foresee(words: Sequence[str]) -> None:
    """Begin to measure what a comparison will most likely be about."""
    from driftline.comparison import foreseen
    from driftline.tolerance.defaults import elementwise

    foreseen.forget()
    options = {word.partition("=")[0] for word in words if word.startswith("-")}
    paths = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
    if len(paths) == 2 and options.issubset(_HARMLESS):
        foreseen.begin(paths[0], paths[1], elementwise)
