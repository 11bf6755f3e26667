"""The same tensor on every rank: groups of records, each part at its place on the mesh.

Micro-batches that the other run has in one call are one more axis, behind the mesh's own. Compares
bytes by digest, within one run only.
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
    """One tensor of the whole model.

    Attributes:
        key: Its address there.
        parts: What each place holds, in the order of places.
        axes: Names of the axes of these places.
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
    """Who holds the same bytes, asked of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._made: dict[TensorKey, str] = {}

    def of(self, record: Record) -> str:
        """A name for a tensor's bytes, or for what was kept of them; empty where nothing was."""
        if record.digest:
            return record.digest
        if record.kept == "summary" and record.summary is not None:
            return repr(record.summary)
        found = self._made.get(record.key)
        if found is None:
            try:
                raw = self._run.raw(record) if record.kept == "full" else None
            except (DriftlineError, OSError):
                raw = None
            found = (
                "" if raw is None else hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
            )
            self._made[record.key] = found
        return found

    def differ_along(self, group: Group) -> set[int]:
        """Axes along which two places that differ in nothing else hold different bytes."""
        found: set[int] = set()
        for axis in range(len(group.axes)):
            seen: dict[Coordinate, tuple[str, tuple[int, ...]]] = {}
            for at, record in group.parts.items():
                rest = (*at[:axis], 0, *at[axis + 1 :])
                mine = (self.of(record), record.shape)
                if seen.setdefault(rest, mine) != mine:
                    found.add(axis)
                    break
        return found


MICRO = "micro-batches"


def processes_of(run: Run) -> dict[int, int]:
    """Which process of each rank is its part of the job: of the widest world, then the longest.

    A script may run something else first, and a launcher may start a rank anew.
    """
    worlds: dict[tuple[int, int], int] = {}
    for facts in run.facts.processes:
        worlds[facts.rank, facts.process] = facts.world
    tensors = Counter((record.key.rank, record.key.process) for record in run.records)
    found: dict[int, int] = {}
    for (rank, process), count in sorted(tensors.items()):
        best = found.setdefault(rank, process)
        here, there = (worlds.get((rank, p), 0) for p in (process, best))
        if (here, count) > (there, tensors[rank, best]):
            found[rank] = process
    return found


def groups_of(
    run: Run,
    other: Run | None,
    mesh: Mesh,
    stages: Stages | None,
    onto: tuple[int, int],
    *,
    calls: bool = False,
) -> list[Group]:
    """Every tensor of a run of many ranks, in the order of the first rank that has it."""
    ranks = processes_of(run)
    parts: dict[TensorKey, dict[int, Record]] = {}
    inside = (
        set[tuple[int, str]]()
        if stages is None
        else {(r.key.rank, r.digest) for r in run.records if not is_border(stages.key(r.key))}
    )
    for record in run.records:
        key = record.key if stages is None else stages.key(record.key)
        if is_border(key) and (record.key.rank, record.digest) in inside:
            continue  # what a stage takes and gives is what its first and last layers do
        if ranks.get(record.key.rank) != record.key.process:
            continue
        key = key._replace(rank=onto[0], process=onto[1])
        parts.setdefault(key, {})[record.key.rank] = record
    if stages is not None:
        parts = _once(parts)
    micro = _micro(parts, other, pipeline=stages is not None, calls=calls)
    found: dict[TensorKey, Group] = {}
    for key, members in parts.items():
        many = micro.get(key._replace(visit=0), 1)
        one = key._replace(visit=0) if many > 1 else key
        more = (key.visit,) if many > 1 else ()
        group = found.get(one)
        if group is None:
            axes = (*mesh.names, MICRO) if many > 1 else mesh.names
            group = found[one] = Group(one, {}, axes)
        group.parts.update({(*mesh.at[rank], *more): record for rank, record in members.items()})  # type: ignore[attr-defined]
    return [group._replace(parts=dict(sorted(group.parts.items()))) for group in found.values()]


def _once(parts: Mapping[TensorKey, dict[int, Record]]) -> dict[TensorKey, dict[int, Record]]:
    """Tensors of a pipeline without the gradients that pass a second time.

    Schedules that compute the gradients of weights later walk a call's graph twice: a site then has
    more gradients than calls. What passes again has passed before, and is not counted.
    """
    calls = Counter(
        (key.step, key.site) for key in parts if (key.port, key.slot) == ("output", "0")
    )
    visits: dict[TensorKey, list[TensorKey]] = {}
    for key in parts:
        if key.port in ("grad_input", "grad_output"):
            visits.setdefault(key._replace(visit=0), []).append(key)
    renamed: dict[TensorKey, TensorKey | None] = {}
    for one, keys in visits.items():
        keys.sort(key=lambda key: key.visit)
        if len(keys) > calls[one.step, one.site] > 0:
            new = {frozenset(r.digest for r in parts[key].values()): key for key in reversed(keys)}
            keys = [key for key in keys if key in new.values()]
            renamed.update(dict.fromkeys(visits[one]))
        renamed.update({key: one._replace(visit=n) for n, key in enumerate(keys)})
    named = ((renamed.get(key, key), members) for key, members in parts.items())
    return {key: members for key, members in named if key is not None}


def _micro(
    keys: Iterable[TensorKey], other: Run | None, *, pipeline: bool, calls: bool
) -> dict[TensorKey, int]:
    """Tensors that one call of the other run stands against several of, and how many.

    Schedules of pipelines walk back through micro-batches in their own order: where the other run
    is none that says better, what all of them give to a parameter is one.
    """
    mine = Counter(key._replace(visit=0) for key in keys)
    if other is not None:
        theirs = Counter(record.key._replace(visit=0) for record in other.records)
        return {key: count for key, count in mine.items() if count > 1 and theirs.get(key) == 1}
    terms = mine.items() if pipeline else ()
    return {k: count for k, count in terms if count > 1 and (calls or k.port == "param_grad")}


def in_execution(groups: Sequence[Group]) -> list[Group]:
    """By the order of the first part of each."""
    return sorted(groups, key=lambda group: group.first.order)
