"""Find the reader for a path: our own run format first, then the first format that recognises it.

`Format` and `TreeFormat` describe what a format module must provide; `driftline.testing` checks
more. Formats are listed by address and imported on first use. Other packages add formats under the
entry-point group `driftline.formats`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from driftline.errors import BadFile, BadRun
from driftline.formats.dump_run import Member
from driftline.registry import Address, plugins
from driftline.runs.index import uncollected
from driftline.runs.layout import INDEX, MANIFEST
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath


class Format(Protocol):
    """What a format of named tensors must provide."""

    NAME: str

    def sniff(self, path: Path, /) -> bool:
        """Whether the content looks like the format; reads a few bytes, does not raise for it."""
        ...

    def members(self, path: Path, /) -> list[Member]:
        """The tensors of the file, unread; raises a DriftlineError if the file is not valid."""
        ...


class TreeFormat(Protocol):
    """What a format with keys of its own must provide."""

    NAME: str

    def sniff(self, path: Path, /) -> bool:
        """Whether this folder looks like the format; checks few names and bytes, never raises."""
        ...

    def open(self, path: Path, /) -> Run:
        """Open the dump as a run, without reading values; an invalid file is a lost tensor."""
        ...


class FormatSpec(NamedTuple):
    """A format that Driftline reads: the address of its reader, and facts that need no import.

    Attributes:
        reader: Module with `NAME`, `sniff`, and `members` (for a file) or `open` (a folder or a
            file).
        holds: Noun for the list of readable formats.
        suffixes: Suffixes of its files; plain folders are searched for files with these.
        exclusive: No other program uses these suffixes. A file with such a suffix goes to this
            reader even if its content is not recognised, so that the reader reports what is wrong
            with it.
        fallback: Accepts any folder that contains tensor files, so it is tried last and not listed.
    """

    reader: Address
    holds: str
    suffixes: tuple[str, ...] = ()
    exclusive: bool = True
    fallback: bool = False


def _spec(module: str, holds: str, *suffixes: str, **more: bool) -> FormatSpec:
    return FormatSpec(Address(f"driftline.formats.{module}"), holds, suffixes, **more)


GROUP = "driftline.formats"
PARTS = "shard-*-of-*.json"
"""Files that `driftline compare --shard` writes."""

# In the order in which they are tried; the first format whose `sniff` is true is used.
FILES: dict[str, FormatSpec] = {
    "npy": _spec("tensors.npy", ".npy", ".npy"),
    "npz": _spec("tensors.npz", ".npz", ".npz"),
    "safetensors": _spec("tensors.safetensors", ".safetensors", ".safetensors"),
    "torch": _spec("tensors.torch_file", ".pt, .pth, .ckpt", ".pt", ".pth", ".ckpt"),
    "atb-bin": _spec("ascend.atb.file", "ATB .bin", ".bin", exclusive=False),
    "ge": _spec("ascend.ge.operator_file", "GE operator"),
}
"""Formats of single files."""

FOLDERS: dict[str, FormatSpec] = {
    "atb": _spec("ascend.atb.dump", "ATB (ait_dump*, msit_dump*, atb_dump_data)"),
    "ge-dump": _spec("ascend.ge.dump", "torchair (GE)"),
    "fx-dump": _spec("ascend.ge.fx_dump", "torchair (FX)"),
    "ait-torch": _spec("ait.dump", "ait's torch hooks"),
    "msprobe": _spec("tools.msprobe", "msprobe"),
    "paddle-hook": _spec("tools.paddle_hook", "the Paddle saving hook"),
    "decoder-output": _spec("tools.decoder_output", "decoders (*.out)"),
    "transformers-debugger": _spec("tools.transformers_debugger", "transformers' debugger"),
    "files": _spec("plain_folder", "", fallback=True),
}
"""Formats that are folders of many files."""

SUFFIXES = tuple(suffix for spec in FILES.values() for suffix in spec.suffixes)
"""Suffixes of the tensor files that are looked for in a folder without a layout."""


def readable() -> str:
    """The hint for a path that has none of these formats."""
    folders = ", ".join(spec.holds for spec in FOLDERS.values() if spec.holds)
    files = [spec.holds for spec in FILES.values()]
    return (
        f"it reads folders of `driftline dump`; dumps of {folders}; and {', '.join(files[:-1])} "
        f"and {files[-1]} files, alone or in folders"
    )


def open_run(path: StrPath) -> Run:
    """Open a run, or a dump or tensor file of another program as a run.

    Args:
        path: A folder or file, or the address of a run elsewhere, such as `s3://bucket/run`.

    Raises:
        BadRun: Nothing is there, or it is not a run.
        BadFile: It is an invalid tensor file.
    """
    run = _open(path)
    run.opened = str(path)
    return run


def _open(path: StrPath) -> Run:
    # Most paths are local, so the store modules are imported only for an address.
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
    # Our own layout is tried first, because its manifest identifies it without doubt.
    except BadRun as no_run:
        if place.is_dir():
            import shlex

            if (place / "table.json").is_file():
                raise BadRun(
                    f"{place} is a comparison table, not a run",
                    hint=f"look at it with: driftline show {shlex.quote(str(place))}",
                ) from None
            # Checked before formats are tried, because a folder of parts also looks like plain
            # files.
            if next(place.glob(PARTS), None) is not None:
                raise BadRun(
                    f"{place} holds parts of a comparison, not a run",
                    hint=f"their table is made with: driftline merge {shlex.quote(str(place))}",
                ) from None
            # Plug-ins come last, so that none can take over a format of ours.
            for format_ in chain(_folder_formats(), _plugin_formats()):
                if format_.sniff(place):
                    return _opened(format_, place)
            if not any(place.iterdir()):
                raise BadRun(
                    f"'{place}' is no run: it is an empty folder",
                    hint="driftline dump -o FOLDER writes a run",
                ) from None
            if not (place / MANIFEST).exists():
                raise BadRun(
                    f"'{place}' is no run, and no dump of another program that is known",
                    hint=readable(),
                ) from None
        raise no_run


def open_file(path: Path) -> Run:
    """Open a single tensor file.

    Raises:
        BadFile: No format recognises the file, or the one that does refuses it.
    """
    if (own := file_format(path)) is not None:
        return _opened(own, path)
    for format_ in _plugin_formats():
        if format_.sniff(path):
            return _opened(format_, path)
    # If the path is a part of something larger, the error names what to give instead.
    if path.name in (MANIFEST, INDEX):
        folder = path.parent if path.name == MANIFEST else path.parent.parent
        raise BadFile(f"{path} is a part of a run", hint=f"give the run's folder: {folder}")
    if path.match(PARTS):
        raise BadFile(
            f"{path} is a part of a comparison",
            hint="driftline merge makes the table of all its parts",
        )
    if (dump := dump_format(path.parent)) is not None:
        raise BadFile(
            f"{path} is a part of a dump ({dump.NAME})",
            hint=f"give the dump's folder: {path.parent}",
        )
    raise BadFile(
        f"{path} is no tensor file that driftline can read",
        hint=readable(),
    )


def file_format(path: Path) -> Format | TreeFormat | None:
    """The reader of a tensor file; None if no format of ours recognises it."""
    # Content before names, because people rename files.
    for spec in FILES.values():
        if (reader := spec.reader.load()).sniff(path):
            return reader
    suffix = path.suffix.lower()
    for spec in FILES.values():
        if spec.exclusive and suffix in spec.suffixes:
            return spec.reader.load()
    return None


def dump_format(folder: Path) -> TreeFormat | None:
    """The reader of a folder that is a dump with a layout; None for a plain folder."""
    for spec in FOLDERS.values():
        if not spec.fallback and (reader := spec.reader.load()).sniff(folder):
            return reader
    return None


def _folder_formats() -> Iterator[TreeFormat]:
    for spec in FOLDERS.values():
        yield spec.reader.load()


def _opened(format_: Format | TreeFormat, path: Path) -> Run:
    open_ = getattr(format_, "open", None)
    if open_ is not None:
        with uncollected():  # the collector took two thirds of the time
            return open_(path)
    from driftline.formats.dump_run import FileRun

    members = cast("Format", format_).members(path)
    return FileRun(path, format_.NAME, members)


def _plugin_formats() -> Iterator[Format | TreeFormat]:
    for name, address in plugins(GROUP).items():
        if name not in FILES and name not in FOLDERS:
            yield address.load()
