"""Upload: a run's folder is sent to an address, while it is written or afterwards.

Only one writer may send to an address. A store has no locks, so the first writer puts a file
`writer.json` there, the claim, and removes it when everything has arrived. If the writer dies, the
claim remains: a writer on the same machine notices that; for another machine, a person must delete
it. `.sending.json` in the folder lists the files that were sent, so that an interrupted upload can
be resumed. Clocks are not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.errors import AlreadyThere, BadInput, DriftlineError
from driftline.runs.files.local_files import reason_of
from driftline.runs.layout import (
    INDEX,
    MANIFEST,
    ORPHAN_EVENTS,
    PROCESS,
    TOPOLOGY,
    is_shard_name,
    parse_folder,
)
from driftline.runs.stores.store import Store

CLAIM = "writer.json"
_LARGEST_CLAIM = 1 << 16


def claim(store: Store, identity: str, *, force: bool = False) -> None:
    """Become the only writer of a folder in a store.

    Args:
        store: The folder.
        identity: Id of the upload; a resumed upload has the same id.
        force: Replace an existing run, unless another process is writing it.

    Raises:
        AlreadyThere: Another process writes there, or the folder is not empty.
        DriftlineError: The store cannot be reached.
    """
    names = store.sizes()
    stale = False
    if CLAIM in names:
        writer = _read(store)
        # The same run resumes its own upload.
        if writer.get("id") == identity:
            return
        stale = _is_dead(writer)
        who = f"process {writer.get('pid', '?')} on {str(writer.get('host', '?'))[:80]}"
        if not stale:
            raise AlreadyThere(
                f"{store.name} is being written by {who}",
                hint=f"wait for it, or choose another address; if it is gone for good, resume it "
                f"there with driftline push, or delete {store.name}/{CLAIM}",
            )
        if not force:
            raise AlreadyThere(
                f"{store.name} holds what {who} sent before it ended",
                hint="resume it with driftline push, choose another address, or --force to "
                "replace it",
            )
    if names and not (force and _only_a_run(names)):
        if force:
            raise AlreadyThere(
                f"{store.name} holds other things than a run, so it is not replaced",
                hint="choose another address",
            )
        raise AlreadyThere(
            f"{store.name} exists and is not empty",
            hint="choose another address, or --force to replace the run there",
        )
    # The stale claim is removed first; until the new one is written, nobody owns the address.
    if stale:
        store.remove(CLAIM)
    if not store.put_new(CLAIM, _claim_content(identity)):
        raise AlreadyThere(
            f"{store.name}: another writer was there first", hint="choose another address"
        )
    # Nothing is deleted before the claim is ours.
    for name in names:
        if name != CLAIM:
            store.remove(name)


def is_ours(store: Store, identity: str) -> bool:
    """Whether the claim at an address belongs to this run."""
    return store.size(CLAIM) is not None and _read(store).get("id") == identity


def _only_a_run(names: dict[str, int | None]) -> bool:
    run_files = (MANIFEST, ORPHAN_EVENTS, CLAIM)
    is_run = MANIFEST in names or CLAIM in names
    return is_run and all(name in run_files or parse_folder(name) is not None for name in names)


def _claim_content(identity: str) -> bytes:
    claim = {"id": identity, "host": platform.node(), "boot": _boot(), "pid": os.getpid()}
    return (json.dumps(claim, indent=1) + "\n").encode("ascii")


def _read(store: Store) -> dict[str, Any]:
    try:
        about = json.loads(store.read_all(CLAIM, _LARGEST_CLAIM))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", about) if isinstance(about, dict) else {}


def _is_dead(writer: dict[str, Any]) -> bool:
    """Whether a writer ran on this machine and has ended."""
    pid = writer.get("pid")
    # A process of another machine, or of this machine under another name, cannot be judged.
    if writer.get("host") != platform.node() or type(pid) is not int or pid <= 0:
        return False
    boot = _boot()
    if boot and writer.get("boot") and writer["boot"] != boot:
        return True  # the machine was restarted since
    try:
        # Signal 0 only checks whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


# The note `.sending.json`: files of the run that were sent, and may be deleted from the folder.


NOTE = ".sending.json"
_LARGEST_SENT_LIST = 64 << 20


def read_note(root: Path) -> dict[str, Any] | None:
    """The note of an upload; None if nothing is being sent, or the note cannot be read."""
    try:
        with (root / NOTE).open("rb") as file:
            note = json.loads(file.read(_LARGEST_SENT_LIST))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", note) if isinstance(note, dict) else None


def write_note(root: Path, note: dict[str, Any]) -> None:
    """Replace the note in one step.

    Raises:
        OSError: The note cannot be written.
    """
    draft = root / f"{NOTE}.new"
    draft.write_text(json.dumps(note, indent=1), encoding="utf-8")
    # Replaced in one step, because a kill between two writes must leave a readable note.
    draft.replace(root / NOTE)


def sent_to(root: Path, name: str) -> tuple[str, int] | None:
    """Address that a file of a run was sent to, and its size; None if it was not sent."""
    note = read_note(root) or {}
    sent: object = note.get("sent")
    size: object = cast("dict[str, object]", sent).get(name) if isinstance(sent, dict) else None
    return (str(note.get("url", "")), size) if type(size) is int else None


# Sending: sealed shards while the run grows, the other files at its end.


# Seconds between checks of the folder, and seconds without progress before sending stops.
EVERY = 0.5
PATIENCE = 60.0
_TRIES = 3
_LONGEST_PAUSE = 30.0
_LARGEST_EARLY_INDEX = 64 << 20
# An index is sent again only when it has grown by a quarter, because each time all of it is sent.
_GROWN = 1.25
_SHARD = re.compile(rb'"shard":"([^"]+)"')


class Sent(NamedTuple):
    """Result of an upload.

    Attributes:
        url: The address, as messages may show it.
        files: Number of files that arrived.
        size: Number of bytes of these files.
        left: Number of files that did not arrive.
        reason: Why they did not; empty if all arrived.
        folder: Folder with the remaining files; None if there are none.
    """

    url: str
    files: int
    size: int
    left: int = 0
    reason: str = ""
    folder: Path | None = None


class Sending:
    """The upload of one folder."""

    def __init__(
        self, folder: Path, url: str, *, force: bool = False, staged: bool = False
    ) -> None:
        """Claim the address, so that no program is started whose run could not be sent.

        Args:
            folder: The folder of a run, which may not exist yet.
            url: The address.
            force: Replace the run that is there.
            staged: The folder is temporary: files that have arrived are deleted from it.

        Raises:
            DriftlineError: The address cannot be reached or written, or another writer has it.
        """
        self.folder = folder
        self.store = Store(url, tries=_TRIES)
        earlier = read_note(folder) or {}
        self.note: dict[str, Any] = {
            "url": url,
            "id": earlier.get("id") or uuid.uuid4().hex,
            "staged": bool(earlier.get("staged", staged)),
            "sent": dict(earlier.get("sent") or {}),
        }
        claim(self.store, str(self.note["id"]), force=force)
        self.trouble: Exception | None = None
        self._files = 0
        self._size = 0
        self._early: dict[str, int] = {}
        self._small: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- while the program runs

    def begin(self) -> None:
        """Send complete files in the background. The folder must exist."""
        self._note_down()
        self._thread = threading.Thread(target=self._work, name="driftline-send", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        pause = EVERY
        while not self._stop.wait(pause):
            try:
                self._send_complete()
                self.trouble, pause = None, EVERY
            except Exception as trouble:  # the program must go on in any case
                self.trouble = trouble
                # Retry ever more slowly while the store is away, so that the program is not
                # disturbed.
                pause = min(2 * max(pause, 1.0), _LONGEST_PAUSE)

    def _send_complete(self) -> None:
        """Send files that are complete, and the index lines that they cover."""
        if not (self.folder / MANIFEST).is_file():
            return
        self._send_once(MANIFEST)
        for part in self._parts():
            for name in _plain_files(self.folder / part):
                if self._stop.is_set():
                    return
                # An unsealed shard still changes.
                if is_shard_name(name) and _is_sealed(self.folder / part / name):
                    self._send_shard(f"{part}/{name}")
            for name in (PROCESS, TOPOLOGY):
                if (self.folder / part / name).is_file():
                    self._send_once(f"{part}/{name}")
            self._send_early_index(part)

    def _send_early_index(self, part: str) -> None:
        path = self.folder / part / INDEX
        try:
            size = path.stat().st_size
        except OSError:
            return
        before = self._early.get(part, 0)
        if size > _LARGEST_EARLY_INDEX or size <= before * _GROWN:
            return
        sent = {name.encode() for name in self.note["sent"] if name.startswith(f"{part}/")}
        lines: list[bytes] = []
        with path.open("rb") as file:
            for line in file:
                shard = _SHARD.search(line)
                if not line.endswith(b"\n"):
                    break
                # A line may arrive only after the bytes that it names; otherwise a reader would
                # miss them.
                if shard is not None and part.encode() + b"/" + shard[1] not in sent:
                    break
                lines.append(line)
        content = b"".join(lines)
        if len(content) > before * _GROWN:
            self.store.put(f"{part}/{INDEX}", content)
            self._early[part] = len(content)

    # ---- afterwards

    def finish(self, patience: float = PATIENCE) -> Sent:
        """Send all remaining files; the folder must not change any more.

        Args:
            patience: Seconds without progress after which sending stops.
        """
        try:
            self._halt()
            return self._finish(patience)
        except KeyboardInterrupt:
            return self._left("it was interrupted")

    def abandon(self) -> None:
        """Remove everything from the address, because the program never ran."""
        self._halt()
        with contextlib.suppress(Exception):
            for name in self.store.sizes():
                self.store.remove(name)
        self._forget()

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _note_down(self) -> None:
        """Write the note, so that a killed upload can be resumed."""
        with contextlib.suppress(OSError):  # the run's writer reports a full disk
            write_note(self.folder, self.note)

    def _finish(self, patience: float) -> Sent:
        self._note_down()
        moved_at, pause, moved = time.monotonic(), 1.0, self._files
        while True:
            try:
                self._send_rest()
                break
            except (DriftlineError, OSError, RuntimeError) as trouble:
                self.trouble = trouble
                now = time.monotonic()
                # Patience counts from the last file that arrived, however slow the connection is.
                if self._files != moved:
                    moved_at, pause, moved = now, 1.0, self._files
                if now - moved_at + pause > patience:
                    return self._left(_why(trouble))
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        files, size = self._files, self._size
        if self.note["staged"]:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._forget()
        return Sent(self.store.name, files, size)

    def _send_rest(self) -> None:
        """Send everything; each line of an index is sent after the bytes that it names."""
        self._send_once(MANIFEST)
        for part in self._parts():
            names = _plain_files(self.folder / part)
            for name in names:
                if is_shard_name(name):
                    self._send_shard(f"{part}/{name}")
            for name in names:
                if not is_shard_name(name) and name not in (INDEX, PROCESS):
                    self._send_once(f"{part}/{name}")
            # The index names the tensors, and the facts say that a part is complete: both go last.
            for name in (INDEX, PROCESS):
                if name in names:
                    self._send_once(f"{part}/{name}")
        if (self.folder / ORPHAN_EVENTS).is_file():
            self._send_once(ORPHAN_EVENTS)
        self.store.remove(CLAIM)

    def _left(self, reason: str) -> Sent:
        waiting = len(self._waiting())
        return Sent(self.store.name, self._files, self._size, waiting, reason, self.folder)

    def _waiting(self) -> list[str]:
        """Files that have not arrived, as far as known."""
        names = [MANIFEST, ORPHAN_EVENTS]
        names += [f"{p}/{n}" for p in self._parts() for n in _plain_files(self.folder / p)]
        existing = [name for name in names if (self.folder / name).is_file()]
        return [
            name
            for name in existing
            if name not in self.note["sent"] and self._small.get(name) != _state(self.folder / name)
        ]

    # ---- files

    def _parts(self) -> list[str]:
        try:
            return sorted(
                child.name
                for child in self.folder.iterdir()
                if parse_folder(child.name) and child.is_dir() and not child.is_symlink()
            )
        except OSError:
            return []

    def _send_shard(self, name: str) -> None:
        """Send a shard once, because it will not change; then delete it from a staged folder."""
        path = self.folder / name
        if name not in self.note["sent"]:
            size = self.store.send(path, name)
            self._count(size)
            self.note["sent"][name] = size
            write_note(self.folder, self.note)
        # A run is staged to save space on this machine.
        if self.note["staged"]:
            path.unlink(missing_ok=True)

    def _send_once(self, name: str) -> None:
        """Send a small file, unless it was sent in its present state."""
        path = self.folder / name
        state = _state(path)
        if self._small.get(name) == state:
            return
        self._count(self.store.send(path, name))
        self._small[name] = state

    def _count(self, size: int) -> None:
        self._files += 1
        self._size += size

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / NOTE).unlink(missing_ok=True)


def _state(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _plain_files(folder: Path) -> list[str]:
    """Names of the plain files in a folder; hidden files are not part of a run."""
    try:
        return sorted(
            child.name
            for child in folder.iterdir()
            if not child.name.startswith(".") and not child.is_symlink() and child.is_file()
        )
    except OSError:
        return []


def _is_sealed(path: Path) -> bool:
    """Whether a shard has its header, which is written last."""
    try:
        with path.open("rb") as file:
            return any(file.read(8))
    except OSError:
        return False


def _why(trouble: Exception) -> str:
    return str(trouble) if isinstance(trouble, DriftlineError) else reason_of(trouble)


def staging_for(name: str, folder_name: str) -> Path:
    """The folder in which a run is stored until it is sent.

    Raises:
        BadInput: The folder exists and is not empty.
    """
    folder = Path(folder_name or f"{name}.sending").absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        waiting = read_note(folder) is not None
        raise BadInput(
            f"'{folder}' exists" + (": a run waits there to be sent" if waiting else ""),
            hint=f"driftline push {folder} URL"
            if waiting
            else "choose another folder with --stage",
        )
    return folder
