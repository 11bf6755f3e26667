"""A folder that holds several dumps of one kind: one has to be chosen, they are never mixed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from driftline.errors import BadRun

_SHOWN = 8


def refuse_several(path: Path, dumps: Iterable[str]) -> None:
    """Says nothing where there is one dump, or none.

    Args:
        path: What was opened.
        dumps: The folders of its dumps, relative to it.

    Raises:
        BadRun: There is more than one.
    """
    names = sorted(dumps)
    if len(names) > 1:
        shown = ", ".join(name or "." for name in names[:_SHOWN])
        raise BadRun(
            f"{path} holds {len(names)} dumps: {shown}" + (" …" if len(names) > _SHOWN else ""),
            hint=f"give one of them: {path / next(filter(None, names))}",
        )
