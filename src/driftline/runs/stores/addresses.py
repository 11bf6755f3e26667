"""Addresses of runs and tables in a store: `s3://bucket/run`, `memory://x`.

Only text: nothing is imported or fetched here. A person always types an address; an address that
occurs in a file is never used.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from driftline.errors import BadInput
from driftline.runs.redaction import redact_text

if TYPE_CHECKING:
    from _typeshed import StrPath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+(?:::[A-Za-z][A-Za-z0-9+.\-]+)*)://(.*)", re.DOTALL)
# An address after pathlib, which replaces two slashes by one.
_FLATTENED = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/([^/].*)", re.DOTALL)
_LOCAL = ("file", "local")


class UrlPath(type(pathlib.Path())):
    """An address where a path is expected; it prints as it was typed, with both slashes."""

    def __str__(self) -> str:
        text = super().__str__()
        match = _FLATTENED.fullmatch(text)
        return f"{match[1]}://{match[2]}" if match else text

    def __fspath__(self) -> str:
        return str(self)


def place_of(word: str) -> pathlib.Path:
    """A word of a command line, as a local path or an address."""
    url = _URL.fullmatch(word)
    if url is None:
        return pathlib.Path(word)
    if url[1].lower() in _LOCAL:
        return pathlib.Path(unquote(url[2]))
    return UrlPath(word)


def memory_warning(path: StrPath) -> str:
    """Warning for output to `memory://`; empty for other addresses."""
    if str(path).lower().startswith("memory:"):
        return "memory:// is the memory of this command, and gone when it ends"
    return ""


def url_of(path: StrPath) -> str | None:
    """A path as an address; None if it is a local path.

    >>> url_of("s3://bucket/run"), url_of("runs/a"), url_of("C:/runs")
    ('s3://bucket/run', None, None)
    """
    text = os.fspath(path)
    if ":/" not in text:
        return None
    if isinstance(path, pathlib.PurePath):
        flat = _FLATTENED.fullmatch(text)
        text = f"{flat[1]}://{flat[2]}" if flat else text
    match = _URL.fullmatch(text)
    if match is None:
        return None
    scheme, rest = match[1], match[2]
    if scheme.lower() in _LOCAL:
        raise BadInput(f"'{text}' is on this machine", hint=f"give its path: {unquote(rest)}")
    parts = rest.split("/")
    if not rest.strip("/") or ".." in parts:
        raise BadInput(f"'{shown(text)}' names no folder", hint=f"such as {scheme}://BUCKET/FOLDER")
    # A password in an address would end up in reports, histories and tables.
    if re.match(r"[^/@]*:[^/@]*@", rest):
        raise BadInput(
            f"'{shown(text)}' holds a password",
            hint="addresses are shown and kept: give credentials in the environment instead",
        )
    return f"{scheme}://{rest.rstrip('/')}"


def shown(url: str) -> str:
    """An address for messages and files, without anything that looks like a credential."""
    return redact_text(url)


def last_part(url: str) -> str:
    """The name at the end of an address.

    >>> last_part("s3://bucket/runs/monday")
    'monday'
    """
    name = url.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.+-]", "_", name) or "run"
