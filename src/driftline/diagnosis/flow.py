"""Who feeds whom: for sites whose inputs were not captured, the sites that made them.

Edges of a dump's topology (graphs, ATB) or of its list of calls. A maker that has no tensor in the
table hands on what was made before it, so edges go through code that was not captured. Which call
of a maker is meant is decided by the order of execution, and not here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from driftline.alignment.dataflow import edges_of
from driftline.alignment.plan import Plan
from driftline.errors import DriftlineError
from driftline.runs.calls import CALLS, GRAPHS, Call, read_calls
from driftline.runs.graphs import read_graphs
from driftline.runs.run import Run

Makers: TypeAlias = Mapping[str, frozenset[str]]
"""Site → the sites whose outputs it takes; a site that takes nothing of the kind is there, too."""
Flow: TypeAlias = Mapping[tuple[int, int], Makers]
"""Rank and process → who feeds whom."""

_NOBODY: frozenset[str] = frozenset()
_MOST = 64
"""Makers of one tensor; a tensor with more has no single past."""


def flow_of(reference: Run, candidate: Run, plan: Plan) -> Flow:
    """The edges of the reference or, where it says nothing, of the candidate under its names."""
    known = {pair.reference.key.site for pair in plan.pairs if _is_made(pair.reference.key.port)}
    found = _of_run(reference, known)
    if any(found.values()):
        return found
    names = {
        pair.candidate.key.site: pair.reference.key.site
        for pair in plan.pairs
        if _is_made(pair.candidate.key.port)
    }
    return {
        place: {
            names[taker]: frozenset(names[maker] for maker in makers)
            for taker, makers in edges.items()
        }
        for place, edges in _of_run(candidate, names).items()
    }


def _is_made(port: str) -> bool:
    return port == "output"


def _of_run(run: Run, known: Collection[str]) -> Flow:
    places = sorted({(record.key.rank, record.key.process) for record in run.records})
    return {place: _of_process(run, *place, known) for place in places}


def _of_process(run: Run, rank: int, process: int, known: Collection[str]) -> Makers:
    try:
        if CALLS in run.sheets(rank, process):
            return by_calls(read_calls(run.sheet(CALLS, rank, process)), known)
        if GRAPHS in run.sheets(rank, process):
            return by_edges(_of_graphs(run.sheet(GRAPHS, rank, process)), known)
        edges = edges_of(run, rank, process).makers
    except (DriftlineError, OSError):
        return {}  # what cannot be read says nothing; comparing says why
    return by_edges(((maker, taker) for (taker, _), (maker, _) in edges.items()), known)


def _of_graphs(text: str) -> Iterator[tuple[str, str]]:
    """Makers and takers among the nodes of compiled graphs; a part is what gave the whole."""
    for graph in read_graphs(text):
        nodes = {node.name: node for node in graph.nodes}
        for node in graph.nodes if graph.kind != "backward" else ():
            for name in node.inputs:
                maker = nodes.get(name)
                whole = nodes.get(maker.of[0]) if maker is not None and maker.of else maker
                if whole is not None and node.of is None:
                    yield whole.site, node.site


def by_edges(edges: Iterable[tuple[str, str]], known: Collection[str]) -> Makers:
    """Makers of each known site, by pairs (maker, taker).

    >>> by_edges([("a", "cast"), ("cast", "b")], {"a", "b"})["b"]
    frozenset({'a'})
    """
    before: dict[str, list[str]] = {}
    for maker, taker in edges:
        before.setdefault(taker, []).append(maker)
    found: dict[str, frozenset[str]] = {}
    for taker in before:
        if taker not in known:
            continue
        makers: set[str] = set()
        seen, waiting = {taker}, list(before[taker])
        while waiting and len(makers) < _MOST:
            maker = waiting.pop()
            if maker in seen:
                continue
            seen.add(maker)
            if maker in known:
                makers.add(maker)
            else:
                waiting += before.get(maker, [])
        found[taker] = frozenset(makers)
    return found


def by_calls(calls: Iterable[Call], known: Collection[str]) -> Makers:
    """Makers of each known site, by the calls of the first step's forward pass."""
    forward = sorted(
        (call for call in calls if call.phase == "forward"), key=lambda call: call.number
    )
    step = min((call.step for call in forward), default=0)
    mine = [call for call in forward if call.step == step]
    gave: dict[tuple[int, str], str] = {}
    for call in mine:
        if call.site not in known:
            continue
        for one in call.outputs:
            of = one.source if call.kind == "module" else (call.number, one.slot)
            # The innermost one: a container returns what one inside it made.
            if isinstance(of, tuple) and len(call.site) > len(gave.get(of, "")):
                gave[of] = call.site
    past: dict[tuple[int, str], frozenset[str]] = {}

    def makers_of(call: Call) -> frozenset[str]:
        found: set[str] = set()
        for one in call.inputs:
            of = one.source
            if isinstance(of, tuple):
                found |= {gave[of]} if of in gave else past.get(of, _NOBODY)
        return frozenset(sorted(found)[:_MOST])

    for call in mine:
        if call.kind != "module":
            before = makers_of(call)
            past |= {(call.number, one.slot): before for one in call.outputs}
    taken: dict[str, frozenset[str]] = {}
    for call in mine:
        if call.site in known:
            before = makers_of(call) - {call.site}
            taken[call.site] = taken.get(call.site, _NOBODY) | before
    return taken
