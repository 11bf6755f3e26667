"""What torch computes in another way, with other last bits, as soon as any dispatch mode is on.

All operators of torch's own test database were tried with a mode that does nothing: forward,
backward, twice backward and forward-mode (which is `forward_mode.py`'s). A few choose a composite
formula, or compute vectors besides values. They are known here by name; leaving them alone is their
caller's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FUNCTIONS = ("cond", "eigvalsh", "matrix_norm", "matrix_rank", "norm", "svdvals")
"""Of `torch.linalg`: they take eigenvalues or singular values and, when watched, vectors too."""
_BY_SINGULAR_VALUES = ("nuc", 2, -2)
_NORMS = ("linalg_matrix_norm", "linalg_norm")

_NODES = frozenset({"ProdBackward0", "ProdBackward1", "CumprodBackward0", "LinalgDetBackward0"})
_MASKED_FILL = "MaskedFillBackward1"  # only where the value filled in has a gradient


def is_delicate(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of `FUNCTIONS` is: norms only where they need singular values."""
    if name not in _NORMS:
        return True
    order = kwargs.get("ord", args[1] if len(args) > 1 else None)
    return order in _BY_SINGULAR_VALUES


def delicate_node(outputs: Sequence[Any]) -> str:
    """The first node of a graph whose gradient would change in its last bits; empty if none."""
    # Tensors have a `grad_fn`, gradient edges a `node`.
    nodes = [getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in outputs]
    waiting = [node for node in nodes if node is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        name = type(node).__name__
        if name in _NODES or (name == _MASKED_FILL and following[1][0] is not None):
            return name
        for one, _ in following:
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return ""
