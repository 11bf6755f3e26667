"""Edges between sites, so that a page can show the producers and consumers of a site.

Taken from the graph of the reference run: edges that a dump holds, otherwise equal bytes within the
run. Only sites are connected; tensors between them have no names here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from driftline.errors import DriftlineError
from driftline.graphs.model import GraphNode
from driftline.graphs.sources.run import run_graph
from driftline.runs.run import Run

_MOST_READERS = 24
"""A tensor with more readers, such as a mask of all layers, says nothing about the flow."""
_MOST_EDGES = 200_000
_MOST_READ = 128 << 20
"""Most elements of tensors without digest: they must all be read to find equal ones."""


def flow_of(run: Run, rank: int = 0, process: int = 0, step: int | None = None) -> Any:
    """Edges between sites of one step; None if they are not known."""
    try:
        # Without recorded edges the flow is found by equal bytes, which means reading
        # everything.
        if _unread(run) > _MOST_READ and not (run.topology(rank, process) or {}).get("edges"):
            return None
        graph = run_graph(run, rank, process, step)
        topology = run.topology(rank, process)
    except (DriftlineError, OSError, RecursionError):
        return None  # a page without arrows is better than none
    if graph is None:
        return None
    edges = _edges(graph.nodes)
    if not edges:
        return None
    sites = list(dict.fromkeys(site for edge in edges for site in edge))
    place = {site: index for index, site in enumerate(sites)}
    return {
        "source": "edges" if topology is not None and topology.get("edges") else "bytes",
        "sites": sites,
        "from": np.asarray([place[maker] for maker, _ in edges], np.uint32),
        "to": np.asarray([place[reader] for _, reader in edges], np.uint32),
    }


def _edges(nodes: tuple[GraphNode, ...]) -> list[tuple[str, str]]:
    """Pairs of sites (producer, consumer) that share a tensor, in order of execution."""
    makers: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = {}
    for node in _walk(nodes):
        for name in node.outputs:
            makers.setdefault(name, []).append(node.site)
        for name in node.inputs:
            readers.setdefault(name, []).append(node.site)
    # A dict keeps the order of execution and drops repeated edges.
    edges: dict[tuple[str, str], None] = {}
    for name, makes in makers.items():
        reads = readers.get(name, [])
        if len(reads) > _MOST_READERS:
            continue
        for maker in makes:
            for reader in reads:
                if not _nested(maker, reader):
                    edges[maker, reader] = None
        # More arrows than this cannot be read, and a page must stay small.
        if len(edges) > _MOST_EDGES:
            break
    return list(edges)


def _unread(run: Run) -> int:
    return sum(
        math.prod(record.shape)
        for record in run.records
        if not record.digest and record.kept == "full"
    )


def _walk(nodes: tuple[GraphNode, ...]) -> Iterator[GraphNode]:
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if node.site:
            yield node
        waiting += reversed(node.children)


def _nested(site: str, other_site: str) -> bool:
    """Whether one site contains the other or is the same: a module does not feed its own parts."""
    if site == other_site or "(root)" in (site, other_site):
        return True
    # `layers.1` is not in `layers.10`: the next character must be a separator.
    longer, shorter = (site, other_site) if len(site) > len(other_site) else (other_site, site)
    return longer.startswith(shorter) and longer[len(shorter)] in "./"
