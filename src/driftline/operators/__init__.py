"""Single operators: the definition of each, and whether a dumped output agrees with it.

`golden(op_type, param, inputs)` is the definition of an operator in float64, rounded to the type of
its output; `check(path)`, and `driftline opcheck`, compare the operators of a dump with it. The
submodules are imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from driftline.operators.api import check as check
    from driftline.operators.definitions.registry import golden as golden
    from driftline.operators.definitions.registry import known_operators as known_operators

__all__ = ["check", "golden", "known_operators"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'driftline.operators' has no attribute {name!r}")
    if name == "check":
        from driftline.operators.api import check

        return check
    from driftline.operators.definitions import registry

    return getattr(registry, name)
