"""The exported graph of a run, as its topology describes it.

The topology may come from another program, so missing or damaged entries are empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from driftline.runs.facts import first_records
from driftline.runs.json_values import list_of, object_of
from driftline.runs.records import Record
from driftline.runs.run import Run

ROOT = "(root)"
RECURRENT = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})
"""Operators that compute a sequence and the last states of a layer."""
# A scale of 0 means that nothing is known.
_NO_INTEGERS = ("", 0, "", "", 0.0, 0.0)
_REPEATED = re.compile(r"_(\d+)$")


Place = tuple[str, int, str]
"""Site, visit and port."""
Tensor = tuple[str, int, str, str]
"""Site, visit, port and slot."""


class Fusion(NamedTuple):
    """A fused node that computes the work of several modules.

    Attributes:
        node: Site of the node.
        op: Type of the node.
        holds: Inputs and outputs of modules that are no longer computed.
        tensors: Where its result is read and written instead.
    """

    node: str
    op: str
    holds: tuple[Place, ...]
    tensors: tuple[Tensor, ...]


class MisreadNode(NamedTuple):
    """A node that reads integers for other numbers than they were made of.

    Attributes:
        site: Of the node.
        module: That it stands in.
        sentence: What it reads, and how.
        modules: Those that first take or give what is made of it.
    """

    site: str
    module: str
    sentence: str
    modules: tuple[str, ...]


class ExportedGraph(NamedTuple):
    """The description of an exported graph in a run's topology.

    Attributes:
        nodes: Site of each node → its description.
        inside: Site of a value that is no longer computed → the fused node that contains it.
        weighted_nodes: Nodes that use weights, in the order of the exported file.
        folded_norms: Convolution with a folded batch norm → the node that computes both.
        integers: Where integers were recorded → their scale and zero point.
        rounded: Site → relative error that rounding of weights to integers explains there.
        misread: Nodes that read integers for other numbers than they were made of.
        reads: Name of a node of the exported file → the values that it reads, and those it makes.
        fusions: Nodes that contain several modules.
        makers: Site of any output of a node → the node.
        rectified: Outputs of modules without their negative values, which the integers cut off.
    """

    nodes: Mapping[str, Mapping[str, Any]]
    inside: Mapping[str, str]
    weighted_nodes: Sequence[Mapping[str, Any]] = ()
    folded_norms: Mapping[str, str] = {}
    integers: Mapping[Tensor, tuple[float, float]] = {}
    rounded: Mapping[str, float] = {}
    misread: Sequence[MisreadNode] = ()
    reads: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    fusions: Sequence[Fusion] = ()
    makers: Mapping[str, Mapping[str, Any]] = {}
    rectified: frozenset[Tensor] = frozenset()

    def replaced_by(self, site: str) -> tuple[str, ...]:
        """The sites that a fused node replaced."""
        gone = self.nodes.get(site, {}).get("replaces")
        return tuple(map(str, cast("list[object]", gone))) if isinstance(gone, list) else ()

    def owner(self, site: str) -> Mapping[str, Any] | None:
        """The node whose output is at a site."""
        node = self.nodes.get(site)
        return node if node is not None else self.makers.get(site)

    def call(self, site: str) -> Mapping[str, Any]:
        """The call of torch's graph whose result is at a site; empty if there is none."""
        node = self.owner(site)
        if node is None:
            return {}
        calls = list_of(node.get("calls"))
        # A node with several outputs lists one call for each of them, in the order of its sites.
        index = [*map(str, list_of(node.get("outputs")) or [site])].index(site)
        return object_of(calls[index]) if index < len(calls) else {}

    def values(self) -> dict[str, str]:
        """Value → the site that makes it."""
        site_of: dict[str, str] = {}
        for site, node in self.nodes.items():
            sites = list_of(node.get("outputs")) or [site]
            for value, place in zip(list_of(node.get("values")), sites, strict=False):
                site_of[str(value)] = str(place)
        return site_of

    def why(self, site: str) -> str:
        """Why a site is not computed; empty if unknown."""
        holder = self.inside.get(site)
        return "" if holder is None else self.describe_inside(holder)

    def describe_inside(self, node: str) -> str:
        """Why a tensor inside a fused node is not computed."""
        ops = {fusion.node: fusion.op for fusion in self.fusions}
        kind = ops.get(node) or self.nodes.get(node, {}).get("class", "a node")
        return f"inside a fusion: {kind} '{node}' computes it on the way"


def exported_graph(run: Run) -> ExportedGraph | None:
    """The graph of a run that was captured from an exported file; None for any other run."""
    # Any process may hold the graph; the first one that does is used.
    trees = (run.topology(r.key.rank, r.key.process) for r in first_records(run))
    graphs = (tree.get("exported") for tree in trees if tree is not None)
    about = next((graph for graph in graphs if isinstance(graph, Mapping)), None)
    if about is None:
        return None
    data = cast("Mapping[str, Any]", about)
    nodes = {
        str(node["site"]): node
        for node in map(object_of, list_of(data.get("nodes")))
        if "site" in node
    }
    inside = object_of(data.get("inside"))
    return ExportedGraph(
        nodes,
        {site: str(node) for site, node in inside.items()},
        [object_of(work) for work in list_of(data.get("works"))],
        object_of(data.get("reworked")),
        dict(map(_integers, list_of(data.get("integers")))),
        {
            str(entry[0]): float(entry[1])
            for entry in map(list_of, list_of(data.get("rounded")))
            if len(entry) == 2 and isinstance(entry[1], int | float)
        },
        [_misread(entry) for entry in map(list_of, list_of(data.get("misread"))) if len(entry) > 2],
        dict(_read(entry) for entry in list_of(data.get("reads"))),
        [_fusion(object_of(fusion)) for fusion in list_of(data.get("fusions"))],
        {str(output): node for node in nodes.values() for output in list_of(node.get("outputs"))},
        frozenset(_tensors(data.get("rectified"))),
    )


def _fusion(data: Mapping[str, Any]) -> Fusion:
    holds = [entry for entry in map(list_of, list_of(data.get("holds"))) if len(entry) == 3]
    return Fusion(
        str(data.get("node", "")),
        str(data.get("op", "")),
        tuple((str(site), int(visit), str(port)) for site, visit, port in holds if _whole(visit)),
        tuple(_tensors(data.get("at"))),
    )


def _misread(entry: Sequence[Any]) -> MisreadNode:
    # Runs of older versions have no modules here.
    site, module, sentence, *modules = entry
    after = list_of(modules[0]) if modules else []
    return MisreadNode(str(site), str(module), str(sentence), tuple(map(str, after)))


def place_of(record: Record) -> Tensor:
    """The place of a tensor, for any rank and step."""
    key = record.key
    return key.site, key.visit, key.port, key.slot


def _tensors(data: object) -> Iterator[Tensor]:
    for entry in map(list_of, list_of(data)):
        if len(entry) == 4 and _whole(entry[1]):
            yield str(entry[0]), int(cast("int", entry[1])), str(entry[2]), str(entry[3])


def _integers(entry: object) -> tuple[Tensor, tuple[float, float]]:
    fields: list[Any] = [*list_of(entry), *_NO_INTEGERS[len(list_of(entry)) :]]
    site, visit, port, slot, scale, zero = fields[:6]
    numbers = [float(n) if isinstance(n, int | float) else 0.0 for n in (scale, zero)]
    place: Tensor = (str(site), int(visit) if _whole(visit) else 0, str(port), str(slot))
    return place, (numbers[0], numbers[1])


def _read(entry: object) -> tuple[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    fields: list[Any] = [*list_of(entry), "", "", ""]
    inputs, outputs = (tuple(map(str, list_of(values))) for values in fields[1:3])
    return str(fields[0]), (inputs, outputs)


def _whole(value: object) -> bool:
    return isinstance(value, int)


def without_number(site: str) -> Iterable[tuple[str, int]]:
    """Sites, with call numbers, of which a numbered site may be a repeated call."""
    if "/" in site:
        return
    parts = site.split(".")
    for index, part in enumerate(parts):
        if match := _REPEATED.search(part):
            yield (
                ".".join((*parts[:index], part[: match.start()], *parts[index + 1 :])),
                int(match[1]),
            )
