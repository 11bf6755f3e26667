"""Entry points of the stores: open a remote run, read and write a table, push a folder.

Other packages import only this file; fsspec is loaded when an address is used.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driftline.errors import AlreadyThere, BadFile, BadInput, BadRun
from driftline.runs.layout import INDEX, MANIFEST, parse_folder
from driftline.runs.provenance import hold_path, is_held
from driftline.runs.stores.addresses import shown, url_of
from driftline.runs.stores.remote_run import open_remote
from driftline.runs.stores.store import Store
from driftline.runs.stores.upload import PATIENCE, Sending, Sent, read_note

if TYPE_CHECKING:
    from _typeshed import StrPath

__all__ = ["Sent", "exists", "open_remote", "push", "read_file", "uploaded"]


def exists(url: str, name: str = "") -> bool:
    """Whether an address holds a file of that name or, without a name, anything at all.

    Raises:
        DriftlineError: The address cannot be reached.
    """
    store = Store(url)
    return store.size(name) is not None if name else bool(store.sizes())


def read_file(url: str, name: str, limit: int) -> bytes:
    """Read a file at an address.

    Raises:
        BadFile: The file does not exist, or is larger than the limit.
        DriftlineError: The address cannot be reached.
    """
    store = Store(url)
    try:
        return store.read_all(name, limit)
    except OSError as error:
        raise BadFile(
            f"{store.name} holds no {name}: {error.strerror or error}",
            hint="is the address right? driftline push FOLDER URL puts a run or a table there",
        ) from None


def refuse_overwriting(url: StrPath, *, force: bool) -> None:
    """Refuse an address that must not be written to, before hours of work.

    Raises:
        AlreadyThere: The address is not empty, and `force` is false.
        DriftlineError: The address cannot be reached.
    """
    goal = url_of(url)
    if goal is not None and (store := Store(goal)).sizes() and not force:
        raise AlreadyThere(f"{store.name} is not empty", hint="give another -o, or --force")


@contextmanager
def uploaded(url: str, files: tuple[str, ...], *, force: bool) -> Generator[Path]:
    """A local folder whose files are sent to an address when the block ends without an error.

    Args:
        url: The address.
        files: Names of the files, in the order of sending; the last one shows that all have
            arrived.
        force: Replace existing files.

    Raises:
        AlreadyThere: The address is not empty, and may not be replaced.
        DriftlineError: The address cannot be reached or written.
    """
    import tempfile

    refuse_overwriting(url, force=force)
    store = Store(url)
    with tempfile.TemporaryDirectory(prefix="driftline-") as name:
        folder = Path(name)
        yield folder
        for file in files:
            if (folder / file).is_file():
                store.send(folder / file, file)
            elif force:
                # A leftover file of the replaced table would show rows of another comparison.
                store.remove(file)


def push(folder: StrPath, url: StrPath, *, force: bool = False, patience: float = PATIENCE) -> Sent:
    """Send a run or a table to an address, or resume sending one.

    Args:
        folder: A run, a comparison, or the folder of an interrupted `driftline dump -o URL`.
        url: The address. It must be given again, because an address in a file is never used.
        force: Replace the existing run or table.
        patience: Seconds without progress after which sending stops.

    Raises:
        AlreadyThere: The address is not empty, or another process is writing there.
        DriftlineError: The folder is no run or table, or the address cannot be reached.
    """
    place = Path(folder)
    if url_of(folder) is not None:
        raise BadInput("push sends a folder of this machine", hint="driftline push FOLDER URL")
    note = read_note(place)
    goal = url_of(url)
    if goal is None:
        raise BadInput(f"'{url}' is no address", hint="driftline push FOLDER s3://BUCKET/FOLDER")
    # A run may contain a comparison; the manifest decides.
    if (place / "table.json").is_file() and not (place / MANIFEST).exists():
        return _push_table(place, goal, force=force)
    if not (place / MANIFEST).is_file():
        raise BadRun(
            f"'{place}' is neither a run nor a comparison",
            hint="give the folder that `driftline dump` or `compare -o` made",
        )
    # The lock keeps two pushes of one folder from deleting each other's files.
    lock = hold_path(place / MANIFEST)
    try:
        if lock is None or being_written(place):
            raise AlreadyThere(
                f"'{place}' is still being written or sent", hint="wait until that is over"
            )
        # Shards that were sent and deleted here exist only at the first address.
        if note is not None and str(note.get("url", "")) != goal:
            raise BadInput(
                f"part of '{place}' was sent to {shown(str(note.get('url')))[:200]}",
                hint="go on with that address",
            )
        return Sending(place, goal, force=force).finish(patience)
    finally:
        if lock is not None:
            os.close(lock)


def being_written(place: Path) -> bool:
    """Whether a living process writes a part of a run."""
    return any(
        is_held(child / INDEX) is True for child in place.iterdir() if parse_folder(child.name)
    )


def _push_table(place: Path, url: str, *, force: bool) -> Sent:
    import shutil

    # The table's description goes last; it shows that the rows are complete.
    files = ("rows.csv", "rows.parquet", "table.json")
    sizes = [(place / name).stat().st_size for name in files if (place / name).is_file()]
    with uploaded(url, files, force=force) as folder:
        for name in files:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
    return Sent(Store(url).name, len(sizes), sum(sizes))
