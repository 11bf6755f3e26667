"""Equal numbers of operators that are used for something else: the second is q here and k there.

Names that only count operators agree wherever two programs have the same ones; if a program calls
them in another order, the edges of its topology tell, or who reads what whom gave.
"""

from __future__ import annotations

from driftline.alignment.calls import Call, Frame, calls_of, frames_of
from driftline.alignment.dataflow import Dataflows
from driftline.alignment.dataroles import tell_by_dataflow
from driftline.runs.run import Run


def rewired(reference: Run, candidate: Run) -> str:
    """A site of both runs that has another role in each, by the dataflow; empty if none has."""
    ours = frames_of(reference.records)
    theirs = frames_of(candidate.records)
    seen: set[tuple[int, int]] = set()
    for frame in ours:
        place = (frame.rank, frame.process)
        if place in seen or frame not in theirs:
            continue
        seen.add(place)
        here = _told(reference, frame, calls_of(ours[frame]))
        there = _told(candidate, frame, calls_of(theirs[frame])) if here else {}
        for site, told in here.items():
            if site in there and there[site] != told:
                return site
        places = _places(here), _places(there)
        for what, site in places[0].items():
            if site and (other := places[1].get(what)) and other != site:
                return site  # one that the other run tells nothing of
    return ""


def _places(told: dict[str, object]) -> dict[tuple[str, object], str]:
    """The one site of each layer that has a role; empty where several have it."""
    found: dict[tuple[str, object], str] = {}
    for site, role in told.items():
        what = (site.rpartition(".")[0], role)
        found[what] = "" if what in found else site
    return found


def _told(run: Run, frame: Frame, calls: list[Call]) -> dict[str, object]:
    """What the edges alone say of each projection."""
    flow = Dataflows(run).of(frame, calls, None)
    if not flow.makers:
        return {}
    for call in calls:
        call.role = ""
    tell_by_dataflow(calls, flow)
    return {c.site: (c.role, c.layout) for c in calls if c.role or c.layout}
