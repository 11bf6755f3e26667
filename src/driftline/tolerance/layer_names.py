"""One layer under its several spellings: `model.base_model.layers7.ln`, `base_model.layers.7.ln`.

The rules of plain names are alignment's; here they look up what a file has thresholds for.
"""

from __future__ import annotations

from collections.abc import Iterable

from driftline.alignment.normal import plain

ROOT = "model"
"""What layer files call the model itself, and put before the path of every module."""


class LayerNames:
    """Layers to be found by any of their spellings; an exact one is preferred.

    >>> LayerNames(["model.base_model.layers7.ln"]).find("base_model.layers.7.ln")
    'model.base_model.layers7.ln'
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._exact = frozenset(names)
        self._plain: dict[str, set[str]] = {}
        for name in self._exact:
            for spelling in _spellings(name):
                self._plain.setdefault(spelling, set()).add(name)

    def find(self, name: str) -> str | None:
        """The known spelling of a layer; None when there is none, or more than one could be."""
        if name in self._exact:
            return name
        for spelling in _spellings(name):
            known = self._plain.get(spelling, ())
            if len(known) == 1:
                return next(iter(known))
        return None


def _spellings(name: str) -> tuple[str, ...]:
    """From the most telling to the least: as it is, then without the root in front of it."""
    whole = plain(name)
    if not whole or whole == ROOT:
        return ("",)
    bare = whole.removeprefix(f"{ROOT}.")
    return (whole, bare) if bare != whole else (whole,)
