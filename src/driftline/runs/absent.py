"""Why a path is not the folder of a run, with the nearest name that might be meant."""

from __future__ import annotations

from pathlib import Path

from driftline.errors import BadRun
from driftline.runs.layout import MANIFEST


def no_folder(place: Path) -> BadRun:
    """The error for a path that is no folder."""
    if place.is_file():
        return BadRun(
            f"'{place}' is a file, not the folder of a run",
            hint=f"give the folder '{place.parent}'" if place.name == MANIFEST else "",
        )
    hint = ""
    if place.is_symlink() and not place.exists():
        return BadRun(f"'{place}' is a link that leads nowhere")
    if place.exists():  # a pipe or a device: reading it could wait for ever
        return BadRun(f"'{place}' is neither a file nor a folder")
    if place.parent.is_dir():
        import difflib  # at start it would cost every command a millisecond

        names = [child.name for child in place.parent.iterdir()]
        near = difflib.get_close_matches(place.name, names, n=2)
        if near:
            hint = "did you mean " + " or ".join(f"'{place.parent / name}'" for name in near) + "?"
    return BadRun(f"there is no '{place}'", hint=hint)
