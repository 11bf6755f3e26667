"""Jobs: several ranks write one run, and a reader notices missing, early or foreign ranks.

Every process stores the id of the run that it joined and the name of its job. The first rank starts
the run, and no rank waits for another. Clocks are not used, because the machines of a job may
disagree on the time.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from driftline import settings
from driftline.errors import AlreadyThere, BadInput, BadRun
from driftline.runs.json_values import MOST_RANKS, count_of
from driftline.runs.layout import MANIFEST, folder_name
from driftline.runs.provenance import (
    check_room,
    create_run,
    dump_json,
    provenance,
    refuse_addresses,
    refuse_living,
    write_new,
)
from driftline.runs.run import Loss

if TYPE_CHECKING:
    from driftline.runs.sinks import JSON


# A manifest has a few kilobytes; a larger file is not one.
_LARGEST = 1 << 20
_SHOWN = 8

Facts = Mapping[str, Any]


def membership(folder: Path) -> dict[str, JSON]:
    """The ids of the run in a folder and of this process's job, for `process.json`."""
    facts: dict[str, JSON] = {"run": run_id(folder)}
    if job := settings.job_id():
        facts["job"] = job
    return facts


def run_id(folder: Path) -> str:
    """The id of the run in a folder; empty if it cannot be read."""
    return str(_manifest(folder).get("id", ""))


def is_of_this_job(folder: Path) -> bool:
    """Whether another rank of this process's job has started the run in a folder."""
    job = settings.job_id()
    return bool(job) and _manifest(folder).get("job") == job


def _manifest(folder: Path) -> Facts:
    try:
        with (folder / MANIFEST).open("rb") as file:
            content: Any = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("Facts", content) if isinstance(content, dict) else {}


def refuse_mixed(name: str, manifest: Facts, parts: Sequence[tuple[str, Facts]]) -> None:
    """Refuse a folder that holds parts of several runs or jobs.

    Args:
        name: Name of the run, for the message.
        manifest: Content of its run.json.
        parts: Names of the processes' folders, with their facts.

    Raises:
        BadRun: The folder holds parts of several runs or jobs.
    """
    runs: dict[str, list[str]] = {}
    jobs: dict[str, list[str]] = {}
    for folder, facts in parts:
        for folders_by_id, field in ((runs, "run"), (jobs, "job")):
            identity = facts.get(field)
            if isinstance(identity, str) and identity:
                folders_by_id.setdefault(identity, []).append(folder)
    # A run without an id, or with parts that name none, is accepted.
    if runs and (own := manifest.get("id")) and isinstance(own, str):
        runs.setdefault(own, [])
        if strangers := [
            f for identity, folders in runs.items() if identity != own for f in folders
        ]:
            raise BadRun(
                f"'{name}' holds parts of two runs: {_listed(strangers)} "
                f"{'was' if len(strangers) == 1 else 'were'} written for another one",
                hint="give each run a folder of its own",
            )
    if len(jobs) > 1:
        shown = " and ".join(_listed(folders) for folders in jobs.values())
        raise BadRun(
            f"'{name}' holds ranks of {len(jobs)} jobs: {shown}",
            hint="dump each job into a folder of its own, or move the folders of one of them away "
            f"(a copy of {MANIFEST} goes with them)",
        )


def gaps(parts: Sequence[tuple[Facts, int | None]]) -> Iterator[Loss]:
    """Losses for ranks of a job that stored nothing, or ended before the others.

    Args:
        parts: Facts of each process, and the last step of its tensors.
    """
    # A single process without a job or process groups has no other ranks that could be missing.
    job = [(facts, last) for facts, last in parts if facts.get("job") or facts.get("groups")]
    if not job:
        return
    world = max(count_of(facts.get("world_size"), MOST_RANKS) for facts, _ in job)
    present = {count_of(facts.get("rank"), MOST_RANKS) for facts, _ in job}
    wanted = [facts for facts, _ in job if facts.get("only_ranks")]
    missing = [rank for rank in range(world) if rank not in present]
    # With --rank, the other ranks store nothing on purpose.
    if missing and not wanted:
        yield Loss(
            f"rank{'s' if len(missing) > 1 else ''} {_listed(list(map(str, missing)))}",
            f"left nothing: the job had {world} ranks, {len(present)} of them are here",
        )
    ends: dict[int, int] = {}
    for facts, last in job:
        rank = count_of(facts.get("rank"), MOST_RANKS)
        if last is not None:
            ends[rank] = max(last, ends.get(rank, last))
    # A rank that stopped earlier than the others crashed, or was killed with unwritten steps.
    latest = max(ends.values(), default=0)
    early = [(rank, last) for rank, last in sorted(ends.items()) if last < latest]
    for rank, last in early[:_SHOWN]:
        yield Loss(f"rank {rank}", f"ends with step {last}, the longest rank with step {latest}")
    if len(early) > _SHOWN:
        yield Loss("ranks", f"{len(early) - _SHOWN} more end before step {latest}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


_ATTEMPTS = 16


def begin_run(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Start a run, or join the run that another rank of this job has started.

    Args:
        path: Folder of the run.
        force: Replace what an earlier program left in the folder.

    Raises:
        AlreadyThere: The folder holds something of another job, or of this rank.
        BadInput: The folder cannot be created or written.
    """
    place = settings.job_place()
    # Without a launcher, there are no other ranks that might start the same run.
    if not settings.job_id():
        return create_run(path, force=force, world_size=place.world_size)
    refuse_addresses(path)
    folder = Path(path)
    # Ranks race for the manifest; a rank that loses finds the manifest a moment later, and joins.
    for attempt in reversed(range(_ATTEMPTS)):
        if is_of_this_job(folder):
            break
        try:
            _begin(folder, place.world_size, force=force)
            break
        except (OSError, AlreadyThere) as error:
            # Another rank may be doing the same at this moment; then the folder is this job's soon.
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
    """Write the manifest, unless another rank of this job has written it."""
    if _holds_something(folder):
        if is_of_this_job(folder):
            return
        if check_room(folder, force=force):
            _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Created with its complete content, so that no other rank reads half a manifest.
    written = write_new(folder / MANIFEST, dump_json(provenance(world_size=world_size)))
    if not written and not is_of_this_job(folder):
        raise AlreadyThere(
            f"another program has begun a run in '{folder}' at the same moment",
            hint="choose another output folder",
        )


def _holds_something(folder: Path) -> bool:
    """Whether a folder holds more than drafts of the manifest that other ranks are writing."""
    if not folder.is_dir():
        return folder.exists()
    return any(not child.name.startswith(f".{MANIFEST}.") for child in folder.iterdir())


def _joined(folder: Path, rank: int, *, force: bool) -> Path:
    own_folder = folder / folder_name(rank, 0)
    if own_folder.exists():
        if not force:
            raise AlreadyThere(
                f"rank {rank} of this job has captured into '{folder}' already",
                hint="choose another output folder, or force to replace what this rank left",
            )
        # A run that a living process still writes is never removed, not even with --force.
        refuse_living(folder)
        shutil.rmtree(own_folder, ignore_errors=True)
    return folder


def _set_aside(folder: Path) -> None:
    """Move an old run away with one rename, unless another rank has done so.

    The moved run is deleted when this process ends. Until then its new name exists, so that a
    slower rank cannot move the new run there by mistake.

    Raises:
        OSError: The run cannot be moved.
    """
    refuse_living(folder)
    moved = folder.with_name(f".{folder.name}.{settings.job_id()}")
    try:
        folder.rename(moved)
    except OSError:
        if folder.exists() and not is_of_this_job(folder):
            raise
        return
    atexit.register(functools.partial(shutil.rmtree, moved, ignore_errors=True))
