"""Anything that opens as a run → a run of ours, or files that other programs read.

Everything a run knows goes along: summaries, descriptions, module trees, events, losses. A result
is whole or not there, and nothing is replaced unasked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from driftline.errors import AlreadyThere, BadInput, Unreachable
from driftline.formats import exported
from driftline.formats.converting import Conversion, Progress, Target, command_of, world_of
from driftline.formats.opening import open_run
from driftline.formats.unfinished import finished_at
from driftline.remote.urls import UrlPath, url_of
from driftline.runs.inside import reason_of
from driftline.runs.key import TensorKey
from driftline.runs.manifest import check_room, create_run
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath


class Converted(NamedTuple):
    """What a conversion did.

    Attributes:
        path: Where the result is.
        tensors: How many were written.
        size: Bytes of values.
        skipped: Reason → how many tensors have no values in the result for it.
        left_out: Those tensors: key and reason. Into a run they go along as lost ones.
    """

    path: Path
    tensors: int
    size: int
    skipped: Mapping[str, int]
    left_out: tuple[tuple[TensorKey, str], ...] = ()


def convert(
    source: Run | StrPath,
    output: StrPath,
    *,
    to: Target = "run",
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a run, or a dump or tensor file of another program, in another format.

    Args:
        source: What `open_run` opens.
        output: Folder of the result.
        to: `run` for ours; `npy`, `pt` and `safetensors` for files of these with a list of keys
            beside them; `ait` for the tree of `ait llm dump`, that of ATB if it came from there.
        force: Replace an earlier result of the same kind.
        progress: Called with (tensors done, tensors in all).

    Raises:
        AlreadyThere: The output exists and may not be replaced.
        DriftlineError: The source cannot be read, or the output not be written.
    """
    if ":/" in os.fspath(output) and (url := url_of(output)) is not None:
        return _sent(source, url, output, to=to, force=force, progress=progress)
    run = source if isinstance(source, Run) else open_run(source)
    place = Path(output)
    if not isinstance(source, Run) and _same(Path(source), place):
        raise BadInput(f"{place} cannot be converted into itself", hint="give another output")
    sheets = to in ("run", "ait") and any(
        run.sheets(int(one.get("rank", 0)), int(one.get("process", 0))) for one in run.processes()
    )
    if not len(run) and not sheets:
        raise BadInput(f"{run.name} holds no tensors")
    values = sheets or any(record.kept in ("full", "sample") for record in run.records)
    if to != "run" and not values:
        raise BadInput(
            f"nothing of {run.name} can be written as {to}: only {run.records[0].kept} was kept",
            hint="--to run keeps what there is",
        )
    final = place / "ait_dump" if to == "ait" else place
    if to == "run":
        check_room(place, force=force)
    else:
        _check_room(final, force, of_ours=to == "ait" or exported.is_there(place))
    try:
        with finished_at(final, "ait_dump" if to == "ait" else "") as beside:
            work = Conversion(run, beside, to, progress)
            if to == "run":
                create_run(beside, command=command_of(run), world_size=world_of(run))
                work.into_run()
            elif to == "ait":
                work.into_ait()
            else:
                work.into_files(to)
            if not work.written and not work.sheets:
                why = next(iter(work.skipped), "it has no values")
                raise BadInput(f"nothing of {run.name} can be written as {to}: {why}")
    except OSError as trouble:
        raise BadInput(
            f"{place} cannot be written: {reason_of(trouble)}", hint="nothing was left there"
        ) from trouble
    return Converted(place, work.written, work.size, dict(work.skipped), tuple(work.left_out))


def _sent(
    source: Run | StrPath,
    url: str,
    output: StrPath,
    *,
    to: Target,
    force: bool,
    progress: Progress | None,
) -> Converted:
    """The same to an address: made here, then sent there."""
    import tempfile

    from driftline.remote.door import push, refuse_overwriting

    if to != "run":
        raise BadInput(
            f"--to {to} writes files of this machine, and the output is an address",
            hint="give a folder; a run may go to an address",
        )
    refuse_overwriting(url, force=force)
    with tempfile.TemporaryDirectory(prefix="driftline-") as folder:
        done = convert(source, Path(folder) / "run", to=to, progress=progress)
        sent = push(done.path, url, force=force)
        if sent.reason:
            raise Unreachable(f"not all of it is at {sent.url}: {sent.reason}")
    return done._replace(path=UrlPath(os.fspath(output)))


def _same(source: Path, output: Path) -> bool:
    return output.exists() and source.exists() and output.resolve() == source.resolve()


def _check_room(place: Path, force: bool, *, of_ours: bool) -> None:
    """See that what is there may be replaced: only if asked, and only if it is of this kind.

    Raises:
        AlreadyThere: Something is there and may not be replaced.
    """
    if place.exists() and not place.is_dir():
        raise AlreadyThere(f"'{place}' exists and is a file", hint="choose another output folder")
    if not place.is_dir() or not any(place.iterdir()):
        return
    if not force:
        raise AlreadyThere(
            f"output folder '{place}' exists and is not empty",
            hint="choose another one, or --force to replace what is in it",
        )
    if not of_ours:
        raise AlreadyThere(
            f"'{place}' holds other things than converted tensors, so it is not replaced",
            hint="choose another output folder",
        )
