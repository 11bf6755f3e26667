"""The ranks of one job begin one run, whoever comes first, and none waits for another.

For programs that capture themselves: every rank calls the same line with the same folder. What
`driftline dump` launches finds its run begun already.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
from pathlib import Path

from driftline import settings
from driftline.errors import AlreadyThere, BadInput
from driftline.runs.jobs import is_of_this_job
from driftline.runs.layout import MANIFEST, folder_name
from driftline.runs.manifest import (
    check_room,
    create_run,
    dump_json,
    provenance,
    refuse_addresses,
    refuse_living,
    write_new,
)

_ATTEMPTS = 16


def begin_run(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Starts a run, or joins the one that another rank of this job has started.

    Args:
        path: Its folder.
        force: Replace what an earlier program left there.

    Raises:
        AlreadyThere: Something is there that is not this job's, or this rank has been there.
        BadInput: The folder cannot be made or written.
    """
    place = settings.job_place()
    if not settings.job_id():
        return create_run(path, force=force, world_size=place.world_size)
    refuse_addresses(path)
    folder = Path(path)
    for attempt in reversed(range(_ATTEMPTS)):
        if is_of_this_job(folder):
            break
        try:
            _begin(folder, place.world_size, force=force)
            break
        except (OSError, AlreadyThere) as error:
            # Another rank may be doing the same at this moment: then the folder is ours soon.
            if attempt or is_of_this_job(folder):
                continue
            if isinstance(error, AlreadyThere):
                raise
            raise BadInput(
                f"cannot write a run to '{folder}': {error.strerror or error}",
                hint="choose an output folder that can be written",
            ) from None
    return _joined(folder, place.rank, force=force)


def _begin(folder: Path, world_size: int, *, force: bool) -> None:
    """The first rank writes the manifest; whoever comes second finds it is of its own job."""
    if _holds_something(folder):
        if is_of_this_job(folder):
            return
        if check_room(folder, force=force):
            _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = write_new(folder / MANIFEST, dump_json(provenance(world_size=world_size)))
    if not written and not is_of_this_job(folder):
        raise AlreadyThere(
            f"another program has begun a run in '{folder}' at the same moment",
            hint="choose another output folder",
        )


def _holds_something(folder: Path) -> bool:
    """Whether anything is there but drafts of the manifest that other ranks are writing."""
    if not folder.is_dir():
        return folder.exists()
    return any(not child.name.startswith(f".{MANIFEST}.") for child in folder.iterdir())


def _joined(folder: Path, rank: int, *, force: bool) -> Path:
    mine = folder / folder_name(rank, 0)
    if mine.exists():
        if not force:
            raise AlreadyThere(
                f"rank {rank} of this job has captured into '{folder}' already",
                hint="choose another output folder, or force to replace what this rank left",
            )
        refuse_living(folder)
        shutil.rmtree(mine, ignore_errors=True)
    return folder


def _set_aside(folder: Path) -> None:
    """Move an old run out of the way in one stroke, unless another rank has done it.

    It is deleted when this process ends: while its new name is taken, a slower rank cannot move
    the new run there by mistake.

    Raises:
        OSError: It cannot be moved.
    """
    refuse_living(folder)
    aside = folder.with_name(f".{folder.name}.{settings.job_id()}")
    try:
        folder.rename(aside)
    except OSError:
        if folder.exists() and not is_of_this_job(folder):
            raise
        return
    atexit.register(functools.partial(shutil.rmtree, aside, ignore_errors=True))
