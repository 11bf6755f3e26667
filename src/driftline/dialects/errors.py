"""Errors of the dialects: our messages, as exception types that callers of the originals expect."""

from __future__ import annotations

from driftline.errors import BadInput, NotInstalled


class BadConfig(BadInput, ValueError):
    """An argument of a wrong type or range; the originals promise a ValueError for it."""


class NoEngine(NotInstalled, RuntimeError):
    """A framework this version cannot hook."""
