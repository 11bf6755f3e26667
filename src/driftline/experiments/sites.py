"""The called modules of a run as a tree: which block consists of which parts, in what order."""

from __future__ import annotations

from dataclasses import dataclass, field

from driftline.errors import BadInput
from driftline.runs.run import Run

ROOT = "(root)"


@dataclass(slots=True)
class Node:
    """A called module and the called modules inside it, in the order in which they end."""

    site: str
    parts: list[Node] = field(default_factory=list["Node"])


def site_tree(run: Run) -> Node:
    """The first model of a run.

    Raises:
        BadInput: The run holds no outputs of modules.
    """
    sites = list(
        dict.fromkeys(
            record.key.site
            for record in run.records
            if record.key.port == "output"
            and record.key.phase == "forward"
            and "/" not in record.key.site
        )
    )
    if not sites:
        raise BadInput(
            f"run '{run.name}' holds no outputs of modules",
            hint='driftline dump -o REF --exec "..." keeps them',
        )
    nodes = {site: Node(site) for site in sites}
    root = nodes.get(ROOT) or Node(ROOT)
    for site, node in nodes.items():
        if node is not root:
            _holder(site, nodes, root).parts.append(node)
    if ROOT not in nodes and len(root.parts) == 1:
        return root.parts[0]
    return root


def _holder(site: str, nodes: dict[str, Node], root: Node) -> Node:
    above = site
    while "." in above:
        above = above.rpartition(".")[0]
        if above in nodes:
            return nodes[above]
    return root
