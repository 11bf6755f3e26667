"""Who may write at an address: one writer, who says so in `writer.json` until all has arrived.

A folder here has a lock that ends with its process; a store elsewhere has none. So the first writer
leaves a file, which the store itself refuses to a second one where it can, and takes it away at the
end. If the writer died, the file stays: on the same machine that can be seen, from another machine
a person must say so, by deleting it. No clock is looked at.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, cast

from driftline.errors import AlreadyThere
from driftline.remote.store import Store
from driftline.runs.layout import MANIFEST, ORPHAN_EVENTS, parse_folder

CLAIM = "writer.json"
_LARGEST = 1 << 16


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
    if stale:
        store.remove(CLAIM)
    if not store.put_new(CLAIM, _said(identity)):
        raise AlreadyThere(
            f"{store.name}: another writer was there first", hint="choose another address"
        )
    for name in names:
        if name != CLAIM:
            store.remove(name)


def is_ours(store: Store, identity: str) -> bool:
    """Whether the claim at an address is of this run."""
    return store.size(CLAIM) is not None and _read(store).get("id") == identity


def _only_a_run(names: dict[str, int | None]) -> bool:
    known = (MANIFEST, ORPHAN_EVENTS, CLAIM)
    is_run = MANIFEST in names or CLAIM in names
    return is_run and all(name in known or parse_folder(name) is not None for name in names)


def _said(identity: str) -> bytes:
    about = {"id": identity, "host": platform.node(), "boot": _boot(), "pid": os.getpid()}
    return (json.dumps(about, indent=1) + "\n").encode("ascii")


def _read(store: Store) -> dict[str, Any]:
    try:
        about = json.loads(store.read_all(CLAIM, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", about) if isinstance(about, dict) else {}


def _is_dead(writer: dict[str, Any]) -> bool:
    """Whether a writer ran on this machine, since it was started, and runs no more."""
    pid = writer.get("pid")
    if writer.get("host") != platform.node() or type(pid) is not int or pid <= 0:
        return False
    boot = _boot()
    if boot and writer.get("boot") and writer["boot"] != boot:
        return True  # the machine was started anew since
    try:
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
