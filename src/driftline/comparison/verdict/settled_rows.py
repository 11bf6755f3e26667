"""The rows of a table as the judgement of its sites settles them.

Sites are judged by the error that they add, by the strongest evidence available for each
(`status`). A long table is judged in groups, to bound memory. This file reads rows and evidence
only, no tensor and no run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from driftline.comparison.evidence.rules import ADDED_BY_OWN_WEIGHTS, ADDED_PROJECTION
from driftline.comparison.table.row import Row
from driftline.comparison.table.structure import NO_STRUCTURE, Structure
from driftline.comparison.table.table import is_spooled
from driftline.comparison.tolerance.defaults import METRIC
from driftline.comparison.tolerance.tolerance import (
    ADDED,
    ADDED_ALLOWED,
    GIVEN,
    HALF,
    INTEGER_STEP,
    MOVED_APART,
    REST,
    TURNED,
)
from driftline.comparison.verdict.certain_failures import CertainFailure
from driftline.comparison.verdict.dataflow import has_other_shape, transfers_of
from driftline.comparison.verdict.growth import growths
from driftline.comparison.verdict.patterns import (
    like_sites,
    scaled_before,
    with_pattern,
    with_source,
)
from driftline.comparison.verdict.site_judgement import (
    Moment,
    SiteJudgement,
    excused,
    is_by_format,
)
from driftline.comparison.verdict.sites import Call, Place, Site, comparable_steps, is_off, sites_of
from driftline.comparison.verdict.status import NO_EVIDENCE, Evidence, culprits_of, site_statuses
from driftline.comparison.verdict.verdict import execution

_AT_ONCE = 1 << 16
"""Number of rows up to which a table that is stored in a file is judged as a whole."""
_NEEDED = frozenset(
    {
        *(METRIC, "reference_l2", "candidate_l2", "one_sided", "different", "projection"),
        *("cosine", "max_rel_error", "reference_nan", "candidate_nan"),
        *(HALF, REST, GIVEN, TURNED, MOVED_APART, INTEGER_STEP),
        *(ADDED, ADDED_ALLOWED, ADDED_PROJECTION, ADDED_BY_OWN_WEIGHTS),
    }
)


class SettledRows:
    """The rows of a table with the status that follows from its sites, and that judgement.

    A long table is judged one step of one process at a time, to bound memory; siblings are then
    those of one step.

    Attributes:
        judgement: The judgement of the sites. For a long table it is complete when all rows have
            been read; it is that of the first step with a culprit, or else of the first step.
    """

    def __init__(self, rows: Sequence[Row], structure: Structure, evidence: Evidence) -> None:
        self._rows = rows
        self._structure = structure
        self._evidence = evidence
        self._in_groups = is_spooled(rows) and len(rows) > _AT_ONCE and rows.in_turn
        self.judgement: SiteJudgement | None = None
        if not self._in_groups:
            held = [_slim(row) for row in rows] if is_spooled(rows) else rows
            self.judgement = judge_sites(held, structure, evidence)

    @property
    def may_differ(self) -> bool:
        """Whether statuses may differ from those of the rows' own limits, though no row fails."""
        return self._in_groups or (self.judgement is not None and bool(self.judgement.culprits))

    def __iter__(self) -> Iterator[Row]:
        if self._in_groups:
            return self._by_step()
        # If a certain failure decides, its consequences stay marked as over their limits.
        if self.judgement is None or (self.judgement.certain and not self.judgement.culprits):
            return iter(self._rows)
        return self.judgement.rows(self._rows)

    def overruled(self, certain: CertainFailure | None) -> CertainFailure | None:
        """Let a certain failure decide, unless a site went wrong before it; return what decides."""
        if self.judgement is None or certain is None:
            return certain
        self.judgement = self.judgement.overruled(certain)
        return self.judgement.certain

    def _by_step(self) -> Iterator[Row]:
        begins: Moment | None = None
        hidden = drowning = judged = 0
        learnt: dict[tuple[int, int], int] = {}
        groups = itertools.groupby(
            self._rows, key=lambda row: (row.key.rank, row.key.process, row.key.step)
        )
        for (rank, process, step), group in groups:
            rows = list(group)
            if learnt.get((rank, process), step) < step:
                # Weights that were updated with different gradients compute different numbers.
                note = f"the gradients of step {learnt[rank, process]} differ"
                yield from (
                    excused(row, note) if _is_excusable(row, begins) else row for row in rows
                )
                continue
            judgement = judge_sites([_slim(row) for row in rows], self._structure, self._evidence)
            if any(row.key.port == "optimizer_grad" and is_off(row) for row in rows):
                learnt.setdefault((rank, process), step)
            if judgement is None:
                yield from rows
                continue
            hidden, judged = hidden + judgement.hiding[0], judged + judgement.hiding[1]
            drowning += judgement.drowning
            if self.judgement is None or (judgement.culprits and not self.judgement.culprits):
                self.judgement = judgement
            settled = list(judgement.rows(rows, begins))
            red = [execution(row) for row in settled if row.status == "fail" and is_by_format(row)]
            begins = min(filter(None, (begins, judgement.begins, *red)), default=None)
            yield from settled
        if self.judgement is not None:
            self.judgement = replace(self.judgement, hiding=(hidden, judged), drowning=drowning)


def _slim(row: Row) -> Row:
    """Return a row with only the figures that judging sites reads: a third of its memory."""
    metrics = row.metrics
    return row._replace(metrics={name: metrics[name] for name in _NEEDED if name in metrics})


def _is_excusable(row: Row, begins: Moment | None) -> bool:
    is_after = begins is not None and execution(row) >= begins
    return row.status == "fail" and is_by_format(row) and not is_after


def judge_sites(
    rows: Sequence[Row], structure: Structure = NO_STRUCTURE, evidence: Evidence = NO_EVIDENCE
) -> SiteJudgement | None:
    """Judge the sites of rows that are judged by their own limits; None without sites.

    Args:
        rows: The rows.
        structure: What the runs know about their model.
        evidence: What is known besides the two runs.
    """
    everything = sites_of(rows, structure)
    if not everything:
        return None
    sites, note, left_out = comparable_steps(everything, rows)
    sites = _with_other_borders(sites, rows, evidence)
    if not sites:
        return None
    transfers = transfers_of(sites, structure)
    growth = growths(sites, transfers, structure, evidence.known_steps)
    statuses = site_statuses(sites, transfers, growth, evidence, structure.quantised)
    sites, statuses = with_source(sites, statuses, rows)
    culprits = tuple(culprits_of(sites, statuses))
    pattern = scaled_before(sites, statuses, culprits)
    if pattern is not None:
        # Too small to convict a single member, but the same in all of them.
        statuses = with_pattern(statuses, pattern)
        culprits = tuple(culprits_of(sites, statuses))
    elif culprits:
        # Trusted runs separate the sites that add error from those that receive it. The ratios of
        # other evidence already measure only what a site adds.
        excesses = {
            place: entry.ratio
            for place, entry in statuses.items()
            if entry.by != "noise" or entry.status == "introduced"
        }
        pattern = like_sites(sites, excesses, culprits[0])
    # Only growth is limited by the error that arrives, so hidden faults are counted for it alone.
    seen_by_growth = [
        growth[place]
        for place, standing in statuses.items()
        if standing.by == "growth" and place.direction == "forward"
    ]
    forward = sum(place.direction == "forward" for place in statuses)
    return SiteJudgement(
        sites,
        transfers,
        growth,
        statuses,
        culprits,
        evidence,
        note,
        left_out,
        (sum(entry.hides for entry in seen_by_growth), forward),
        sum(entry.drowns for entry in (*seen_by_growth, *statuses.values())),
        pattern,
    )


def _with_other_borders(
    sites: dict[Place, Site], rows: Sequence[Row], evidence: Evidence
) -> dict[Place, Site]:
    """Add sites that an experiment convicts although their outputs have other shapes.

    A tensor of another shape was compared with nothing, so rows alone do not make it a site.
    """
    convicted = {
        name
        for name, own in evidence.replayed.items()
        if own.introduced and own.reason and Place("forward", name) not in sites
    }
    if not convicted:
        return sites
    more = dict(sites)
    for row in rows:
        key = row.key
        if key.site in convicted and key.port == "output" and has_other_shape(row):
            call = Call(key.step, key.rank, row.order, row.order, outs=[row], process=key.process)
            call.error = math.inf
            place = Place("forward", key.site)
            more.setdefault(place, Site(place, row.class_name, row.candidate_class, [call]))
    return dict(sorted(more.items(), key=lambda item: item[1].order))
