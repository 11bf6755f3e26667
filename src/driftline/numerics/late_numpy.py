"""numpy, loaded when something of it is first used.

A comparison of two runs of our own hands addresses to the C kernel and makes no array; to load
numpy for that would be a third of a small command's time. Modules on that way import `np` from
here and write the type aliases they need as strings.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` calls it
if TYPE_CHECKING:
    from typing import Any


class _Numpy:
    """Stands for the module; what was asked for once is found at once."""

    def __getattr__(self, name: str) -> Any:
        import numpy

        found = getattr(numpy, name)
        setattr(self, name, found)
        return found


np = _Numpy()
