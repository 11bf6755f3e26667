"""What a run says of the exported graph that it is of, and whether a model's names fit it.

Read from the run's topology, which comes from strangers: what is not there is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from driftline.alignment.plan import Plan
from driftline.runs.run import Run

ROOT = "(root)"
_REPEATED = re.compile(r"_(\d+)$")


class ExportedGraph(NamedTuple):
    """What a run's topology says of the graph that ran.

    Attributes:
        nodes: Site of each node → what is known of it.
        inside: Site of what is no longer computed → the fused node it went into.
        works: What it does with its weights, in the order of the exported file.
        reworked: Convolution with a batch norm worked in → the node that computes both.
        codes: Site of integers → the name of the value they stand for, scale, zero point, and
            their type in the file.
    """

    nodes: Mapping[str, Mapping[str, Any]]
    inside: Mapping[str, str]
    works: Sequence[Mapping[str, Any]] = ()
    reworked: Mapping[str, str] = {}
    codes: Mapping[str, Any] = {}

    def replaced_by(self, site: str) -> tuple[str, ...]:
        """The sites that a fused node stands for."""
        gone = self.nodes.get(site, {}).get("replaces")
        return tuple(map(str, cast("list[object]", gone))) if isinstance(gone, list) else ()

    def values(self) -> dict[str, str]:
        """Value → the site that makes it."""
        found: dict[str, str] = {}
        for site, node in self.nodes.items():
            sites = listed(node.get("outputs")) or [site]
            for value, place in zip(listed(node.get("values")), sites, strict=False):
                found[str(value)] = str(place)
        return found

    def quantised(self) -> set[str]:
        """Values that are rounded to integers. A quantiser leaves out the activation before that,
        so that what has such a name may lack it.
        """
        return {str(about[0]) for about in map(listed, self.codes.values()) if about}

    def why(self, site: str) -> str:
        """Why a site is not computed; empty if the graph does not say."""
        holder = self.inside.get(site)
        if holder is None:
            return ""
        kind = self.nodes.get(holder, {}).get("class", "node")
        return f"inside the fused {kind} '{holder}', which does not compute it by itself"


_NO_GRAPH = ExportedGraph({}, {})


def exported_graph(run: Run) -> ExportedGraph | None:
    """The graph of a run that was captured from an exported file; None for any other run."""
    key = run.records[0].key
    topology = run.topology(key.rank, key.process)
    about = topology.get("exported") if topology is not None else None
    if not isinstance(about, Mapping):
        return None
    told = cast("Mapping[str, Any]", about)
    nodes = {
        str(node["site"]): node
        for node in map(_object, listed(told.get("nodes")))
        if "site" in node
    }
    inside = _object(told.get("inside"))
    return ExportedGraph(
        nodes,
        {site: str(node) for site, node in inside.items()},
        [_object(work) for work in listed(told.get("works"))],
        _object(told.get("reworked")),
        _object(told.get("codes")),
    )


def _object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def names_fit(plan: Plan, ours: ExportedGraph | None, theirs: ExportedGraph | None) -> bool:
    """Whether the two sides call the same things by the same names, so that the rest is detail.

    That is: half of the modules that the graph names (of two graphs: half of the smaller one's
    sites) are sites of the other side.
    """
    sites = [
        {*(record.key.site for record in paired), *(record.key.site for record in left)}
        for paired, left in (
            ([pair.reference for pair in plan.pairs], plan.missing),
            ([pair.candidate for pair in plan.pairs], plan.extra),
        )
    ]
    linked = {pair.candidate.key.site: pair.reference.key.site for pair in plan.pairs}
    named = [{linked.get(site, site) for site in sites[1]}, sites[0]]
    shared = (named[0] & named[1]) - {ROOT}
    if ours is not None and theirs is not None:
        modules = [sites[0] - set(ours.nodes), sites[1] - set(theirs.nodes)]
        values = ours.values().keys() & theirs.values().keys()
        return (
            2 * len(shared) >= min(map(len, named)) - 1
            or len(modules[0] & modules[1] - {ROOT}) * 2 >= min(map(len, modules)) > 1
            or 2 * len(values) >= min(len(ours.nodes), len(theirs.nodes))
        )
    own, others = (sites[0], named[0]) if ours is not None else (sites[1], sites[0])
    nodes = (ours or theirs or _NO_GRAPH).nodes
    modules = {linked.get(site, site) for site in own if site not in nodes} - {ROOT}
    known = {
        site
        for site in modules
        if site in others or any(base in others for base, _ in without_number(site))
    }
    return bool(known) and 2 * len(known) >= len(modules)


def without_number(site: str) -> Iterable[tuple[str, int]]:
    """A site without the number of one of its parts: what it may be a repeated call of."""
    if "/" in site:
        return
    parts = site.split(".")
    for at, part in enumerate(parts):
        if match := _REPEATED.search(part):
            yield ".".join((*parts[:at], part[: match.start()], *parts[at + 1 :])), int(match[1])
