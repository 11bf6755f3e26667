"""Finds the reader for a path: a run of our own first, then the first format that recognises it.

`Format` and `TreeFormat` are what a format module must offer; `driftline.testing` checks more.
Formats are listed by address and imported when they are first asked. Other packages add theirs
under the entry-point group `driftline.formats`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from driftline.errors import BadFile, BadRun
from driftline.formats.dump_run import Member
from driftline.registry import Address, plugins
from driftline.runs.index import uncollected
from driftline.runs.layout import INDEX, MANIFEST
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath


class Format(Protocol):
    """What a format of named tensors must offer."""

    NAME: str

    def sniff(self, path: Path, /) -> bool:
        """Whether this file looks like the format; reads a few bytes, never raises for content."""
        ...

    def members(self, path: Path, /) -> list[Member]:
        """The tensors inside, unread; raises a DriftlineError for whatever cannot be believed."""
        ...


class TreeFormat(Protocol):
    """What a format with keys of its own must offer."""

    NAME: str

    def sniff(self, path: Path, /) -> bool:
        """Whether this folder looks like the format; looks at few names and bytes, never raises."""
        ...

    def open(self, path: Path, /) -> Run:
        """The dump as a run, no value read; a file that cannot be believed is a lost tensor."""
        ...


GROUP = "driftline.formats"
PARTS = "shard-*-of-*.json"
"""What `driftline compare --shard` writes."""

BUILTIN: dict[str, Address] = {
    "npy": Address("driftline.formats.tensors.npy"),
    "npz": Address("driftline.formats.tensors.npz"),
    "safetensors": Address("driftline.formats.tensors.safetensors"),
    "torch": Address("driftline.formats.tensors.torch_file"),
    "atb-bin": Address("driftline.formats.ascend.atb.file"),
    "ge": Address("driftline.formats.ascend.ge.operator_file"),
}

TREES: dict[str, Address] = {
    "atb": Address("driftline.formats.ascend.atb.dump"),
    "ge-dump": Address("driftline.formats.ascend.ge.dump"),
    "fx-dump": Address("driftline.formats.ascend.ge.fx_dump"),
    "ait-torch": Address("driftline.formats.ait.dump"),
    "msprobe": Address("driftline.formats.tools.msprobe"),
    "paddle-hook": Address("driftline.formats.tools.paddle_hook"),
    "decoder-output": Address("driftline.formats.tools.decoder_output"),
    "transformers-debugger": Address("driftline.formats.tools.transformers_debugger"),
    "files": Address("driftline.formats.plain_folder"),
}
"""Formats that are folders of many files, in the order in which they are asked."""


READABLE = (
    "it reads folders of `driftline dump`; dumps of ATB (ait_dump*, msit_dump*, atb_dump_data), of "
    "ait's torch hooks, of torchair (GE and FX), of msprobe, of the Paddle saving hook, of "
    "transformers' debugger; decoder *.out folders; and .npy, .npz, .pt, .pth, .safetensors, ATB "
    ".bin and GE operator files, alone or in folders"
)
"""The hint shown when a path is none of these."""


def open_run(path: StrPath) -> Run:
    """Open a run, or a dump or tensor file of another program as a run.

    Args:
        path: A folder or file, or the address of a run elsewhere, such as `s3://bucket/run`.

    Raises:
        BadRun: Nothing is there, or it is no run.
        BadFile: It is a tensor file that cannot be believed.
    """
    run = _open(path)
    run.opened = str(path)
    return run


def _open(path: StrPath) -> Run:
    # Most paths are local: the store modules are imported only for an address.
    if ":/" in os.fspath(path):
        from driftline.runs.stores.addresses import url_of

        if (url := url_of(path)) is not None:
            from driftline.runs.stores.remote_run import open_remote

            return open_remote(url)
    place = Path(path)
    if place.is_file():
        return open_file(place)
    from driftline.runs import reader

    try:
        return reader.open_run(place)
    # Our own layout is tried first: it has a manifest, so it is recognised without doubt.
    except BadRun as no_run:
        if place.is_dir():
            import shlex

            if (place / "table.json").is_file():
                raise BadRun(
                    f"{place} is a comparison table, not a run",
                    hint=f"look at it with: driftline show {shlex.quote(str(place))}",
                ) from None
            # Named before formats are asked: a folder of parts also looks like plain
            # files.
            if next(place.glob(PARTS), None) is not None:
                raise BadRun(
                    f"{place} holds parts of a comparison, not a run",
                    hint=f"their table is made with: driftline merge {shlex.quote(str(place))}",
                ) from None
            # Plug-ins come last, so that none can take over a format of ours.
            for format_ in chain(_tree_formats(), _plugin_formats()):
                if format_.sniff(place):
                    return _opened(format_, place)
            if not any(place.iterdir()):
                raise BadRun(f"'{place}' is no run: it is an empty folder") from None
            if not (place / MANIFEST).exists():
                raise BadRun(
                    f"'{place}' is no run, and no dump of another program that is known",
                    hint=READABLE,
                ) from None
        raise no_run


def open_file(path: Path) -> Run:
    """Open a single tensor file.

    Raises:
        BadFile: No format recognises it, or the one that does refuses it.
    """
    # Magic numbers before suffixes: people rename files.
    if (certain := _by_first_bytes(path)) is not None:
        return _opened(BUILTIN[certain].load(), path)
    for format_ in chain(_file_formats(), _plugin_formats()):
        if format_.sniff(path):
            return _opened(format_, path)
    # A user who gave a part of something larger is told what to give instead.
    if path.name in (MANIFEST, INDEX):
        folder = path.parent if path.name == MANIFEST else path.parent.parent
        raise BadFile(f"{path} is a part of a run", hint=f"give the run's folder: {folder}")
    if path.match(PARTS):
        raise BadFile(
            f"{path} is a part of a comparison",
            hint="driftline merge makes the table of all its parts",
        )
    for format_ in _tree_formats():
        if format_.NAME != "files" and format_.sniff(path.parent):
            raise BadFile(
                f"{path} is a part of a dump ({format_.NAME})",
                hint=f"give the dump's folder: {path.parent}",
            )
    raise BadFile(
        f"{path} is no tensor file that driftline can read",
        hint=READABLE,
    )


def _by_first_bytes(path: Path) -> str | None:
    """The format of a file whose content leaves no doubt, whatever it is called."""
    with path.open("rb") as stream:
        start = stream.read(16)
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if start.startswith(b"$Version="):
        return "atb-bin"
    if not start.startswith(b"PK\x03\x04"):
        return None
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None
    # Both torch and numpy write zips; the names inside tell which.
    if any(name.endswith("/data.pkl") for name in names):
        return "torch"
    return "npz" if names and all(name.endswith(".npy") for name in names) else None


def _file_formats() -> Iterator[Format]:
    for address in BUILTIN.values():
        yield address.load()


def _tree_formats() -> Iterator[TreeFormat]:
    for address in TREES.values():
        yield address.load()


def _opened(format_: Format | TreeFormat, path: Path) -> Run:
    open_ = getattr(format_, "open", None)
    if open_ is not None:
        with uncollected():  # looking for cycles took two thirds of the time
            return open_(path)
    from driftline.formats.dump_run import FileRun

    members = cast("Format", format_).members(path)
    return FileRun(path, format_.NAME, members)


def _plugin_formats() -> Iterator[Format | TreeFormat]:
    for name, address in plugins(GROUP).items():
        if name not in BUILTIN and name not in TREES:
            yield address.load()
