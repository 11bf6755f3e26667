"""Who may write at an address: one writer, who says so in `writer.json` until all has arrived.

A folder here has a lock that ends with its process; a store elsewhere has none. So the first writer
leaves a file, which the store itself refuses to a second one where it can, and takes it away at the
end. If the writer died, the file stays: on the same machine that can be seen, from another machine
a person must say so, by deleting it. No clock is looked at.
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
from driftline.runs.layout import (
    INDEX,
    MANIFEST,
    ORPHAN_EVENTS,
    PROCESS,
    TOPOLOGY,
    is_shard_name,
    parse_folder,
)
from driftline.runs.local_files import reason_of
from driftline.runs.stores.store import Store

CLAIM = "writer.json"
_LARGEST_CLAIM = 1 << 16


def claim(store: Store, identity: str, *, force: bool = False) -> None:
    """Become the writer of a folder.

    Args:
        store: The folder.
        identity: Of the run that is sent; whoever resumes it has the same.
        force: Replace a run that is there, unless somebody is writing it.

    Raises:
        AlreadyThere: Somebody else writes there, or something is there already.
        DriftlineError: It cannot be reached.
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
    # The claim goes first: until the new one is written, nobody owns the place.
    if stale:
        store.remove(CLAIM)
    if not store.put_new(CLAIM, _claim_content(identity)):
        raise AlreadyThere(
            f"{store.name}: another writer was there first", hint="choose another address"
        )
    # Only after the claim is ours is anything deleted.
    for name in names:
        if name != CLAIM:
            store.remove(name)


def is_ours(store: Store, identity: str) -> bool:
    """Whether the claim at an address is of this run."""
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
    """Whether a writer ran on this machine, since it was started, and runs no more."""
    pid = writer.get("pid")
    # A process of another machine, or of this one under another name, cannot be judged.
    if writer.get("host") != platform.node() or type(pid) is not int or pid <= 0:
        return False
    boot = _boot()
    if boot and writer.get("boot") and writer["boot"] != boot:
        return True  # the machine was started anew since
    try:
        # Signal 0 only asks whether the process exists.
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


# What of a run has been sent elsewhere and is no longer here: `.sending.json`, while it is
# sent.


NOTE = ".sending.json"
_LARGEST_SENT_LIST = 64 << 20


def read_note(root: Path) -> dict[str, Any] | None:
    """What the sender wrote down; None where nothing is being sent, or the note is garbled."""
    try:
        with (root / NOTE).open("rb") as file:
            note = json.loads(file.read(_LARGEST_SENT_LIST))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", note) if isinstance(note, dict) else None


def write_note(root: Path, note: dict[str, Any]) -> None:
    """Replace the note at once.

    Raises:
        OSError: It cannot be written.
    """
    draft = root / f"{NOTE}.new"
    draft.write_text(json.dumps(note, indent=1), encoding="utf-8")
    # Replaced in one step, because a kill between two writes must leave a readable note.
    draft.replace(root / NOTE)


def sent_to(root: Path, name: str) -> tuple[str, int] | None:
    """Where a file of a run was sent to, and how many bytes it had; None if it was not."""
    note = read_note(root) or {}
    sent: object = note.get("sent")
    size: object = cast("dict[str, object]", sent).get(name) if isinstance(sent, dict) else None
    return (str(note.get("url", "")), size) if type(size) is int else None


# A run's folder on its way to an address: sealed shards while it grows, the rest at its end.


# Seconds between looks at the folder, and without progress before sending is given up.
EVERY = 0.5
PATIENCE = 60.0
_TRIES = 3
_LONGEST_PAUSE = 30.0
_LARGEST_EARLY_INDEX = 64 << 20
# An index is sent again only when it has grown by a quarter: sending all of it is what costs.
_GROWN = 1.25
_SHARD = re.compile(rb'"shard":"([^"]+)"')


class Sent(NamedTuple):
    """What came of it.

    Attributes:
        url: Where to, as messages may show it.
        files: How many files arrived.
        size: Their bytes.
        left: Files that did not.
        reason: Why not; empty when all is there.
        folder: Where the rest waits; None when nothing does.
    """

    url: str
    files: int
    size: int
    left: int = 0
    reason: str = ""
    folder: Path | None = None


class Sending:
    """The sending of one folder."""

    def __init__(
        self, folder: Path, url: str, *, force: bool = False, staged: bool = False
    ) -> None:
        """Claims the address, so that a program is not started for a place it cannot be sent to.

        Args:
            folder: A run, or where one will be.
            url: Where to.
            force: Replace the run that is there.
            staged: The folder is only on its way: what has arrived is deleted here.

        Raises:
            DriftlineError: The address cannot be reached, written or had.
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
        """Send what is complete, in the background. The folder must be there by now."""
        self._note_down()
        self._thread = threading.Thread(target=self._work, name="driftline-send", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        pause = EVERY
        while not self._stop.wait(pause):
            try:
                self._send_complete()
                self.trouble, pause = None, EVERY
            except Exception as trouble:  # the program goes on, whatever it is
                self.trouble = trouble
                # Slower and slower while the store is away, so that the program is
                # not disturbed.
                pause = min(2 * max(pause, 1.0), _LONGEST_PAUSE)

    def _send_complete(self) -> None:
        """What no process will write to any more, and as much of the index as that covers."""
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
                # A line may only arrive after the bytes it names, or a reader would
                # see a hole.
                if shard is not None and part.encode() + b"/" + shard[1] not in sent:
                    break
                lines.append(line)
        content = b"".join(lines)
        if len(content) > before * _GROWN:
            self.store.put(f"{part}/{INDEX}", content)
            self._early[part] = len(content)

    # ---- afterwards

    def finish(self, patience: float = PATIENCE) -> Sent:
        """Send all the rest; the folder must not change any more.

        Args:
            patience: Seconds without anything moving after which it is given up for now.
        """
        try:
            self._halt()
            return self._finish(patience)
        except KeyboardInterrupt:
            return self._left("it was interrupted")

    def abandon(self) -> None:
        """The program never ran: leave nothing behind there."""
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
        """From here on the folder says what it is: whoever kills us can go on with it."""
        with contextlib.suppress(OSError):  # a full disk is said by whoever needs it
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
                # Patience counts from the last file that arrived, however slow the
                # connection is.
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
        """Everything, in an order in which a reader never sees a promise without its bytes."""
        self._send_once(MANIFEST)
        for part in self._parts():
            names = _plain_files(self.folder / part)
            for name in names:
                if is_shard_name(name):
                    self._send_shard(f"{part}/{name}")
            for name in names:
                if not is_shard_name(name) and name not in (INDEX, PROCESS):
                    self._send_once(f"{part}/{name}")
            # The index promises tensors, and the facts say that a part is complete:
            # both go last.
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
        """Files that are not there, as far as is known here."""
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
        """A large file that will not change: it goes once, and may be forgotten here."""
        path = self.folder / name
        if name not in self.note["sent"]:
            size = self.store.send(path, name)
            self._count(size)
            self.note["sent"][name] = size
            write_note(self.folder, self.note)
        # Space on this machine is why a run is staged at all.
        if self.note["staged"]:
            path.unlink(missing_ok=True)

    def _send_once(self, name: str) -> None:
        """A small file, whenever it is another than the one that was sent."""
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
    """Names of the files in a folder; hidden ones are not part of a run, and links are no files."""
    try:
        return sorted(
            child.name
            for child in folder.iterdir()
            if not child.name.startswith(".") and not child.is_symlink() and child.is_file()
        )
    except OSError:
        return []


def _is_sealed(path: Path) -> bool:
    """Whether a shard has its header: it is written last of all."""
    try:
        with path.open("rb") as file:
            return any(file.read(8))
    except OSError:
        return False


def _why(trouble: Exception) -> str:
    return str(trouble) if isinstance(trouble, DriftlineError) else reason_of(trouble)


def staging_for(name: str, folder_name: str) -> Path:
    """The folder in which a run waits to be sent; its note says where to.

    Raises:
        BadInput: Something is there already.
    """
    folder = Path(folder_name or f"{name}.sending").absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        waiting = read_note(folder) is not None if folder.is_dir() else False
        raise BadInput(
            f"'{folder}' exists" + (": a run waits there to be sent" if waiting else ""),
            hint=f"driftline push {folder} URL"
            if waiting
            else "choose another folder with --stage",
        )
    return folder
