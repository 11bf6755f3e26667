"""Plug-in parts: found by their address, imported only when they are used.

Knows no part by itself. A package keeps a table of `Address`es for its own parts and asks
`plugins` for those that other packages announce as entry points; nothing is imported until
`Address.load`.
"""

from __future__ import annotations

import importlib
import shlex
from typing import Any, NamedTuple

from driftline.errors import BadInput, NotInstalled

METRICS = "driftline.metrics"
"""Entry-point group of metrics: `name = "package.module:function"`."""


class Address(NamedTuple):
    """Where a part lives: `package.module:attribute`, and what to install when it is not there.

    What to install are packages of PyPI, several with blanks: Driftline itself is there already.
    """

    target: str
    install: str = ""

    def load(self) -> Any:
        """The part itself.

        Raises:
            NotInstalled: Its module, or one it imports, is missing.
            BadInput: The module has no such attribute.
        """
        module_name, _, attribute = self.target.partition(":")
        module = require(module_name, install=self.install)
        if not attribute:
            return module
        try:
            return getattr(module, attribute)
        # The address of a plug-in comes from another package and may be out of date.
        except AttributeError:
            raise BadInput(
                f"{module_name} has no {attribute!r}",
                hint="is the package that announces it up to date? pip list shows its version",
            ) from None


def require(module: str, *, install: str = "") -> Any:
    """Import an optional module, or say what to install.

    >>> require("json").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as absent:
        # The distribution is usually called like its top package.
        wanted = install or module.partition(".")[0]
        raise NotInstalled(
            f"{module} cannot be imported: {absent}",
            hint=f"pip install {shlex.join(wanted.split())}",
        ) from absent


def plugins(group: str) -> dict[str, Address]:
    """Parts that installed packages announce under an entry-point group, by name."""
    from importlib.metadata import entry_points  # 20 ms: only when somebody asks for a plug-in

    return {entry.name: Address(entry.value) for entry in entry_points(group=group)}
