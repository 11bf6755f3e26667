"""What a scheduled node of inductor left in memory, and by which kernel. Only reads its objects."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
from typing import Any


def is_called(scheduler: Any, node: Any) -> bool:
    """Whether the kernel of a scheduled node has been called by now."""
    if node is scheduler.current_node:
        return True
    names = node.get_buffer_names()
    return all(name in scheduler.available_buffer_names for name in names)


def kernel_name(lines: list[Any], done: list[Any]) -> str:
    """The kernel that was called last, for these nodes: a generated one, or one of a library."""
    for line in reversed(lines):
        if type(line).__name__ == "KernelCallLine":
            if not any(node.is_extern() for node in done):
                return str(line.kernel_name)
            break
    for node in done:
        inner = getattr(node, "node", None)
        for attribute in ("python_kernel_name", "op_overload"):
            name = getattr(inner, attribute, None)
            if name:
                return str(name)
    return type(getattr(done[0], "node", done[0])).__name__


def nodes_of(graph: Any, node: Any) -> list[str]:
    """The nodes that a scheduled node computes, also where it keeps nothing of them."""
    places = {one.name: index for index, one in enumerate(graph.module.graph.nodes)}
    found = {
        origin.name
        for output in node.get_outputs()
        for origin in output.node.get_origins()
        if origin.name in places
    }
    return sorted(found, key=places.__getitem__)


def results(graph: Any, wrapper: Any, node: Any) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Buffer, variable, exact origin and all origins of what a scheduled node left in memory."""
    ir: Any = importlib.import_module("torch._inductor.ir")
    places = {one.name: index for index, one in enumerate(graph.module.graph.nodes)}
    found: list[tuple[str, str, str, tuple[str, ...]]] = []
    for output in node.get_outputs():
        buffer = output.node
        name = buffer.get_name()
        gone = (graph.removed_buffers, graph.inplaced_to_remove, wrapper.freed)
        if any(name in names for names in gone):
            continue
        layout = buffer.layout
        if isinstance(layout, (ir.NoneLayout, ir.MultiOutputLayout)):
            continue
        variable = name
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            variable = layout.get_buffer().get_name()
        exact = buffer.get_origin_node()
        origins = sorted(
            {one.name for one in buffer.get_origins() if one.name in places}, key=places.__getitem__
        )
        named = exact.name if exact is not None and exact.name in places else ""
        if named or origins:
            found.append((name, variable, named, tuple(origins)))
    return found
