"""Patches to other people's code: applied when their module is imported, and taken back together.

The compiler of torch takes seconds to load, and most programs that are captured never compile
anything: patches to it are applied when the program itself imports it.
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
    # A module that is still being initialised lacks the functions to be patched.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
        return _nothing
    watch = _Watch(name, act)
    sys.meta_path.insert(0, watch)
    return watch.call_off


def _nothing() -> None:
    """Cancel nothing: the module was there already."""


class _Watch:
    """A finder that delegates to the other finders and wraps the loader of one module."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        # Another tool's finder may be the one that finds the module; asking all keeps its
        # work.
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
        # A loader of the old protocol cannot be followed; then the patch is simply not
        # applied.
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            # After the body ran, because the patch needs what the body defines.
            execute(module)
            self.call_off()
            self._act()

        loader.exec_module = exec_module


class PatchSet:
    """Attributes of other people's classes and modules that are replaced for a while.

    Somebody else may wrap an attribute after us. Then it is left alone when the rest is restored:
    our replacement stays below theirs, and has to do nothing once nobody watches.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Put what `make` makes of an attribute in its place; False where there is no such one."""
        if not hasattr(owner, name):
            return False
        original = getattr(owner, name)
        replacement = make(original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))
        return True

    def restore(self) -> None:
        """Put everything back that nobody else has replaced since, the last one first."""
        for owner, name, original, replacement in reversed(self._replaced):
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
        self._replaced.clear()
