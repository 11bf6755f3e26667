"""Patches to other libraries: applied when their module is imported, and restored together.

torch's compiler takes seconds to load, and most captured programs never compile anything. So
patches to it are applied when the program itself imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Call a function when a module has been imported, or at once if it is imported already.

    Returns:
        A function that cancels the call.
    """
    module = sys.modules.get(name)
    # A module that is still being initialised may lack the functions to be patched.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
        return _nothing
    watch = _Watch(name, act)
    sys.meta_path.insert(0, watch)
    return watch.call_off


def _nothing() -> None:
    """Cancel nothing, because the function was called already."""


class _Watch:
    """A finder that asks the other finders for one module and wraps the module's loader."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        # All other finders are asked, because another tool's finder may be the one that finds it.
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
        # A loader of the old protocol has no `exec_module`; then the patch is not applied.
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            # Called after the module's body has run, which defines what is to be patched.
            execute(module)
            self.call_off()
            self._act()

        loader.exec_module = exec_module


class PatchSet:
    """Temporarily replaced attributes of other libraries' classes and modules.

    Another library may wrap an attribute after us. Such an attribute is not restored: our
    replacement stays below the other wrapper, and must do nothing when no session is watching.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace an attribute by `make(original)`; return False if there is no such attribute."""
        if not hasattr(owner, name):
            return False
        original = getattr(owner, name)
        replacement = make(original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))
        return True

    def restore(self) -> None:
        """Restore the attributes that nobody else has replaced since, the last one first."""
        for owner, name, original, replacement in reversed(self._replaced):
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
        self._replaced.clear()
