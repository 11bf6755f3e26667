"""Something is done once a module of torch is imported: the compiler takes seconds to load, and
most programs that are watched never compile anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Act when a module has been imported, at once if it is there; returns what calls it off."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
        return _nothing
    watch = _Watch(name, act)
    sys.meta_path.insert(0, watch)
    return watch.call_off


def _nothing() -> None:
    """There is nothing to call off."""


class _Watch:
    """A finder that finds nothing itself; it follows the one that does."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._follow(spec)
                    return spec
        return None

    def call_off(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.call_off()
            self._act()

        loader.exec_module = exec_module
