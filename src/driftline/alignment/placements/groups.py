"""Groups: the records of one tensor on all ranks, each with its coordinate on the mesh.

If the other run has several micro-batches in one call, they form one more axis after those of the
mesh. Bytes are compared by digest, within one run only. This file does not know how a tensor is
distributed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.placements.mesh import Coordinate, Mesh
from driftline.alignment.placements.stages import Stages, is_border
from driftline.errors import DriftlineError
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run


class Group(NamedTuple):
    """One tensor of the complete model.

    Attributes:
        key: Its key in the complete model.
        parts: The record at each coordinate, in the order of coordinates.
        axes: Names of the axes of these coordinates.
    """

    key: TensorKey
    parts: Mapping[Coordinate, Record]
    axes: tuple[str, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(self.parts.values())

    @property
    def first(self) -> Record:
        return next(iter(self.parts.values()))


class Bytes:
    """Digests of a run's tensors, which show the ranks that hold the same bytes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._made: dict[TensorKey, str] = {}

    def of(self, record: Record) -> str:
        """Digest of a tensor's bytes, or of its summary; empty if neither was kept."""
        if record.digest:
            return record.digest
        if record.kept == "summary" and record.summary is not None:
            return repr(record.summary)
        name = self._made.get(record.key)
        if name is None:
            # Digests are computed only if the capture kept none, because reading every tensor is
            # slow.
            try:
                raw = self._run.raw(record) if record.kept == "full" else None
            except (DriftlineError, OSError):
                raw = None
            name = "" if raw is None else hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
            self._made[record.key] = name
        return name

    def differ_along(self, group: Group) -> set[int]:
        """Mesh axes along which neighbouring places hold different bytes."""
        axes: set[int] = set()
        for axis in range(len(group.axes)):
            seen: dict[Coordinate, tuple[str, tuple[int, ...]]] = {}
            for coordinate, record in group.parts.items():
                # Places are compared with the first place that differs from them only along this
                # axis.
                rest = (*coordinate[:axis], 0, *coordinate[axis + 1 :])
                content = (self.of(record), record.shape)
                if seen.setdefault(rest, content) != content:
                    axes.add(axis)
                    break
        return axes


MICRO = "micro-batches"


def processes_of(run: Run) -> dict[int, int]:
    """The process of each rank that belongs to the job.

    It is the process of the largest world; among equals, the one with most tensors. A script may
    run something else first, and a launcher may restart a rank.
    """
    worlds: dict[tuple[int, int], int] = {}
    for facts in run.facts.processes:
        worlds[facts.rank, facts.process] = facts.world
    tensors = Counter((record.key.rank, record.key.process) for record in run.records)
    process_of_rank: dict[int, int] = {}
    for (rank, process), count in sorted(tensors.items()):
        best = process_of_rank.setdefault(rank, process)
        world, best_world = (worlds.get((rank, p), 0) for p in (process, best))
        if (world, count) > (best_world, tensors[rank, best]):
            process_of_rank[rank] = process
    return process_of_rank


def groups_of(
    run: Run,
    other: Run | None,
    mesh: Mesh,
    stages: Stages | None,
    onto: tuple[int, int],
    *,
    calls: bool = False,
) -> list[Group]:
    """Every tensor of a distributed run, in the order of the first rank that has it."""
    ranks = processes_of(run)
    parts: dict[TensorKey, dict[int, Record]] = {}
    # A stage's own layers also store its inputs and outputs; equal bytes show that.
    inside = (
        set[tuple[int, str]]()
        if stages is None
        else {(r.key.rank, r.digest) for r in run.records if not is_border(stages.key(r.key))}
    )
    for record in run.records:
        key = record.key if stages is None else stages.key(record.key)
        if is_border(key) and (record.key.rank, record.digest) in inside:
            continue  # the first or last layer of the stage has stored the same tensor
        # Another process of the rank is not a part of the job; see `processes_of`.
        if ranks.get(record.key.rank) != record.key.process:
            continue
        key = key._replace(rank=onto[0], process=onto[1])
        parts.setdefault(key, {})[record.key.rank] = record
    if stages is not None:
        parts = _without_repeats(parts)
    micro = _micro_batches(parts, other, pipeline=stages is not None, calls=calls)
    axes_of: dict[TensorKey, tuple[str, ...]] = {}
    placed: dict[TensorKey, dict[Coordinate, Record]] = {}
    for key, members in parts.items():
        # Several calls that correspond to one call of the other run become places along one more
        # axis.
        many = micro.get(key._replace(visit=0), 1)
        group_key = key._replace(visit=key.visit // many)
        more = (key.visit % many,) if many > 1 else ()
        axes_of.setdefault(group_key, (*mesh.names, MICRO) if many > 1 else mesh.names)
        placed.setdefault(group_key, {}).update(
            {(*mesh.coordinates[rank], *more): record for rank, record in members.items()}
        )
    return [
        Group(group_key, dict(sorted(at_places.items())), axes_of[group_key])
        for group_key, at_places in placed.items()
    ]


def _without_repeats(
    parts: Mapping[TensorKey, dict[int, Record]],
) -> dict[TensorKey, dict[int, Record]]:
    """Tensors of a pipeline without repeated gradients.

    Schedules that compute the gradients of weights later process a call's graph twice, so a site
    has more gradients than calls. The second time repeats gradients of the first, which are
    dropped.
    """
    calls = Counter(
        (key.step, key.site) for key in parts if (key.port, key.slot) == ("output", "0")
    )
    visits: dict[TensorKey, list[TensorKey]] = {}
    for key in parts:
        if key.port in ("grad_input", "grad_output"):
            visits.setdefault(key._replace(visit=0), []).append(key)
    renamed: dict[TensorKey, TensorKey | None] = {}
    for first_visit, keys in visits.items():
        keys.sort(key=lambda key: key.visit)
        # Of equal gradients, the first is kept: `reversed` lets it overwrite the later ones.
        if len(keys) > calls[first_visit.step, first_visit.site] > 0:
            new = {frozenset(r.digest for r in parts[key].values()): key for key in reversed(keys)}
            keys = [key for key in keys if key in new.values()]
            renamed.update(dict.fromkeys(visits[first_visit]))
        renamed.update({key: first_visit._replace(visit=n) for n, key in enumerate(keys)})
    named = ((renamed.get(key, key), members) for key, members in parts.items())
    return {key: members for key, members in named if key is not None}


def _micro_batches(
    keys: Iterable[TensorKey], other: Run | None, *, pipeline: bool, calls: bool
) -> dict[TensorKey, int]:
    """Tensors for which the other run has one call instead of several, with the number of calls.

    Pipeline schedules process micro-batches backwards in their own order. Without another run to
    compare with, the contributions of all micro-batches to a parameter's gradient are joined.
    """
    calls_of_key = Counter(key._replace(visit=0) for key in keys)
    if other is not None:
        other_calls = Counter(record.key._replace(visit=0) for record in other.records)
        # Several batches of a step, each in micro-batches, follow one another on both sides.
        return {
            key: count // batches
            for key, count in calls_of_key.items()
            if (batches := other_calls.get(key, 0)) and count > batches and not count % batches
        }
    terms = calls_of_key.items() if pipeline else ()
    return {k: count for k, count in terms if count > 1 and (calls or k.port == "param_grad")}


def in_execution(groups: Sequence[Group]) -> list[Group]:
    """Groups in the execution order of their first parts."""
    return sorted(groups, key=lambda group: group.first.order)
