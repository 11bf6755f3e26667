"""Declared placements (`--placement`), and a run of several ranks shown as one rank.

    mlp.up=shard(1)          site (glob), every port of it (partial: its outputs)
    mlp.up/param=shard(0)    one port; `mlp.up/param/weight=shard(0)` one slot
    attn.qkv=shard(-1, 4:1:1)   each rank has its piece of three parts with these shares
    *.down/output=partial(sum)

The placement of a tensor without a declaration is concluded by `gather.Gathering`. All replicas are
kept: the comparison reports one that differs from the others.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from driftline.alignment.normalise.view import (
    AlignedView,
    Excluded,
    Gathered,
    Origin,
    Replicas,
    Unjoinable,
)
from driftline.alignment.placements.join import is_called_fused, parts_by_values, positions
from driftline.alignment.recipe import Step, joined
from driftline.errors import BadInput, did_you_mean
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

Kind = Literal["shard", "replicate", "partial"]
_PLACEMENT = re.compile(r"(shard|replicate|partial)\s*(?:\(\s*([^()]*?)\s*\))?")


class Placement(NamedTuple):
    """One declared placement: a pattern of sites, and the distribution of their tensors."""

    pattern: str
    kind: Kind
    axis: int = 0
    parts: tuple[int, ...] = ()

    def covers(self, key: TensorKey) -> bool:
        """Whether the pattern matches a tensor: by site, by site/port, or by site/port/slot."""
        # A pattern that matches the site alone covers all its ports.
        if fnmatch.fnmatchcase(key.site, self.pattern):
            # A site leaves its output unreduced, never its input.
            return self.kind != "partial" or key.port == "output"
        if "/" not in self.pattern:
            return False
        names = (f"{key.site}/{key.port}", f"{key.site}/{key.port}/{key.slot}")
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in names)

    def __str__(self) -> str:
        parts = f", {':'.join(map(str, self.parts))}" if self.parts else ""
        inside = {"shard": f"({self.axis}{parts})", "partial": "(sum)"}.get(self.kind, "")
        return f"{self.pattern}={self.kind}{inside}"


def parse_placement(text: str) -> Placement:
    """Parse a placement of the command line.

    >>> parse_placement("attn.*=shard(1)")
    Placement(pattern='attn.*', kind='shard', axis=1, parts=())

    Raises:
        BadInput: The text is not a placement.
    """
    # Split at the last `=`, because a site's name may contain one.
    pattern, equals, declaration = text.rpartition("=")
    match = _PLACEMENT.fullmatch(declaration.strip())
    hint = "write SITE=shard(AXIS), SITE=replicate or SITE=partial(sum)"
    if not equals or not pattern.strip() or match is None:
        raise BadInput(f"'{text}' is no placement", hint=hint)
    kind, inside = match.group(1), match.group(2)
    if kind == "shard":
        axis_text, comma, parts = (inside or "").partition(",")
        if not re.fullmatch(r"-?\d{1,2}\s*", axis_text):
            raise BadInput(f"'{text}' does not say along which axis", hint="such as shard(1)")
        # Limited, because positions are computed from these shares.
        if comma and not re.fullmatch(r"\s*[1-9]\d{0,5}(:[1-9]\d{0,5}){1,63}\s*", parts):
            raise BadInput(
                f"'{text}' does not say what the parts are",
                hint="their shares, such as shard(-1, 1:1:1), or 4:1:1 where keys are shared",
            )
        shares = tuple(int(share) for share in parts.split(":")) if comma else ()
        return Placement(pattern.strip(), "shard", int(axis_text), shares)
    if kind == "partial":
        if inside not in (None, "", "sum"):
            raise BadInput(f"'{text}': partial results can only be summed", hint="partial(sum)")
        return Placement(pattern.strip(), "partial")
    if inside:
        raise BadInput(f"'{text}': replicate takes nothing in brackets", hint=hint)
    return Placement(pattern.strip(), "replicate")


def ranks_of(run: Run) -> list[tuple[int, int]]:
    """The ranks of a run, each with its process, in order."""
    return sorted({(record.key.rank, record.key.process) for record in run.records})


class GatheredRun(NamedTuple):
    """A run of several ranks, shown as one rank.

    Attributes:
        run: The view.
        notes: Conclusions, one sentence each.
        decided: Whether gradients of different data showed how they add up, or there are none.
    """

    run: AlignedView
    notes: list[str]
    decided: bool


def gather_ranks(
    run: Run,
    rules: Sequence[Placement],
    other: Run | None,
    *,
    onto: tuple[int, int],
    targets: Mapping[TensorKey, tuple[int, ...]] | None = None,
    calls: bool = False,
    averaged: bool = True,
) -> GatheredRun:
    """Show a run of several ranks as one rank.

    The last rule that covers a tensor applies. Without a rule, the tensors themselves and the
    shapes of the other side show the placement.

    Args:
        run: A run of several ranks.
        rules: The user's placements.
        other: The other side. If it has a tensor only in the shape that each rank has, the ranks
            hold replicas, even if a rule for their whole site says otherwise. None if it is sharded
            itself, so that its shapes are no evidence yet.
        onto: Rank and process of the gathered tensors.
        targets: Shapes of complete tensors, if they are known from elsewhere.
        calls: Whether the calls of a step are joined, too.
        averaged: Whether gradients of different data are averaged, if the other side does not show
            it.

    Raises:
        BadInput: A rule covers no tensor.
    """
    from driftline.alignment.placements.gather import Gathering

    gathering = Gathering(run, other, onto, targets or {}, calls=calls, averaged=averaged)
    groups = {group.key: list(group.records) for group in gathering.groups}
    declared = _Declared(run, other, groups, rules)
    records: list[Record] = []
    origins: dict[TensorKey, Origin] = {}
    counts: dict[str, int] = {}
    for group in gathering.groups:
        key, parts = group.key, groups[group.key]
        origin, shape, word = declared.decide(key, parts) or gathering.decide(group)
        origins[key] = origin
        counts[word] = counts.get(word, 0) + 1
        records.append(parts[0]._replace(key=key, shape=shape, placement="", digest=""))
    declared.check_all_used()
    # The parts of one tensor may have any order; the first part represents all.
    records.sort(key=lambda record: record.order)
    count = len(ranks_of(run))
    whose = "1 rank" if count == 1 else f"{count} ranks"
    counted = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    notes = [f"{whose} of '{run.name}' as one ({gathering.mesh}): {counted}"]
    notes += gathering.notes + declared.notes
    view = AlignedView(run, records, origins, _of_other_processes(run))
    return GatheredRun(view, notes, gathering.decided)


def _of_other_processes(run: Run) -> list[Excluded]:
    """Tensors of processes that are not a part of the job, such as a restarted rank."""
    from driftline.alignment.placements.groups import processes_of

    process_of = processes_of(run)
    excluded: list[Excluded] = []
    for record in run.records:
        rank, process = record.key.rank, record.key.process
        if process_of.get(rank) != process:
            why = f"not of the job: process {process_of[rank]} is its rank {rank}"
            excluded.append((record, record, why))
    return excluded


class _Declared:
    """Applies the user's placements to the tensors of a run.

    Args:
        run: A run of several ranks.
        other: The other side; None if it gives no evidence about shapes.
        groups: The parts of every tensor, by its key in the gathered run.
        rules: The user's placements.
    """

    def __init__(
        self,
        run: Run,
        other: Run | None,
        groups: Mapping[TensorKey, list[Record]],
        rules: Sequence[Placement],
    ) -> None:
        self._run = run
        self._rules = rules
        self._used: set[Placement] = set()
        self._ranks = len(ranks_of(run))
        other_records: Sequence[Record] = () if other is None else other.records
        self._shapes = {record.key: record.shape for record in other_records}
        self._port_shapes = {(record.key.port, record.shape) for record in other_records}
        # Fused projections are recognised by values, which is slow and needs a declared shard.
        self._fused = None if other is None or not rules else _Fused(run, other, groups, rules)

    @property
    def notes(self) -> list[str]:
        """Conclusions beyond the declarations."""
        return [] if self._fused is None else self._fused.notes

    def decide(
        self, key: TensorKey, parts: list[Record]
    ) -> tuple[Origin, tuple[int, ...], str] | None:
        """Origin, shape and label of a tensor by the last rule that covers it, or None."""
        rule = next((rule for rule in reversed(self._rules) if rule.covers(parts[0].key)), None)
        if rule is None:
            return None
        self._used.add(rule)
        if self._fused is not None:
            rule = self._fused.better(key, parts, rule)
        origin, shape = _origin(parts, rule, self._ranks)
        if (
            isinstance(origin, Gathered)
            and origin.replicas
            and self._are_replicas(key, parts[0].shape, shape)
        ):
            origin, shape = Replicas(tuple(parts)), parts[0].shape
        return origin, shape, _word(origin, rule)

    def _are_replicas(
        self, key: TensorKey, part: tuple[int, ...], joined_shape: tuple[int, ...]
    ) -> bool:
        """Whether the other side has a tensor only in the shape that every rank has.

        A rule for a whole site also covers its small tensors, which every rank holds completely.
        """
        if key in self._shapes:
            return self._shapes[key] == part
        port = key.port
        return (port, joined_shape) not in self._port_shapes and (port, part) in self._port_shapes

    def check_all_used(self) -> None:
        """Refuse a rule that covers no tensor, because it is misspelt.

        Raises:
            BadInput: There is such a rule.
        """
        for rule in self._rules:
            if rule not in self._used:
                sites = {record.key.site for record in self._run.records}
                raise BadInput(
                    f"--placement '{rule}' covers no tensor of '{self._run.name}'",
                    hint=did_you_mean(rule.pattern.partition("/")[0], sites),
                )


class _Fused:
    """Fused projections whose shards are pieces of several parts, although no rule declares it."""

    def __init__(
        self,
        run: Run,
        other: Run,
        groups: Mapping[TensorKey, list[Record]],
        rules: Sequence[Placement],
    ) -> None:
        self.notes: list[str] = []
        self._parts: dict[str, tuple[int, ...]] = {}
        # Without rank and process, because the other run has its own.
        other_records = {(r.key.step, r.key.site, r.key.visit, r.key.port, r.key.slot): r
                 for r in other.records}  # fmt: skip
        for key, shards in groups.items():
            if key.port != "output" or key.site in self._parts or not is_called_fused(key.site):
                continue
            rule = next((rule for rule in reversed(rules) if rule.covers(shards[0].key)), None)
            record = other_records.get((key.step, key.site, key.visit, key.port, key.slot))
            # Values are read only for outputs that are cut along their last axis, where parts can
            # be fused.
            last = len(shards[0].shape) - 1
            if rule is None or rule.kind != "shard" or rule.parts or record is None:
                continue
            if last < 0 or rule.axis not in (-1, last):
                continue
            self._parts[key.site] = parts_by_values(run, shards, other, record)
        fused_sites = {site: parts for site, parts in self._parts.items() if parts}
        if fused_sites:
            site, parts = next(iter(fused_sites.items()))
            shown = ":".join(map(str, parts))
            others = f" (and of {len(fused_sites) - 1} more sites)" if len(fused_sites) > 1 else ""
            self.notes.append(
                f"each rank holds its piece of {len(parts)} parts of '{site}'{others}: so joined "
                "it agrees, rank after rank it does not; "
                f"--placement 'SITE=shard(-1, {shown})' says it"
            )

    def better(self, key: TensorKey, shards: Sequence[Record], rule: Placement) -> Placement:
        """The rule with the fused parts of the site, if they apply to a tensor."""
        parts = self._parts.get(key.site)
        if not parts or rule.kind != "shard" or rule.parts:
            return rule
        axis = rule.axis % len(shards[0].shape) if shards[0].shape else 0
        # The input of a projection is not fused. Along the other axis, its weight is cut like its
        # input.
        is_input = key.port == "input" or (key.port == "param" and axis and "weight" in key.slot)
        return rule if is_input else rule._replace(parts=parts)


def _origin(parts: list[Record], rule: Placement, ranks: int) -> tuple[Origin, tuple[int, ...]]:
    """Origin of a tensor of several ranks, and the shape to look for on the other side."""
    first = parts[0]
    if len(parts) == 1 and rule.kind == "replicate":
        return first, first.shape  # layers that exist on one rank only: pipelines
    # A replica needs no other rank, but shards and terms are complete only with all of them.
    if len(parts) < ranks and rule.kind != "replicate":
        have = ", ".join(str(part.key.rank) for part in parts)
        why = f"declared {rule}, but only rank {have} of {ranks} has it"
        return Unjoinable(tuple(parts), why), first.shape
    if rule.kind == "shard":
        return _joined_shards(parts, rule)
    if len({part.shape for part in parts}) != 1:
        why = f"declared {rule}, and the ranks' shapes differ: {_all(parts)}"
        return Unjoinable(tuple(parts), why), first.shape
    if rule.kind == "partial":
        return Gathered(joined(parts, "sum", 0, first.shape)), first.shape
    return Replicas(tuple(parts)), first.shape


def _joined_shards(parts: list[Record], rule: Placement) -> tuple[Origin, tuple[int, ...]]:
    """Shards joined along the declared axis, with fused parts put in order."""
    first = parts[0]
    shapes = {part.shape for part in parts}
    axis = rule.axis + len(first.shape) if rule.axis < 0 else rule.axis
    if not 0 <= axis < len(first.shape):
        # A rule for a whole site also covers its bias or a scalar, which each rank has completely.
        return Replicas(tuple(parts)), first.shape
    # Numbers of axes are compared too: without its one axis, a vector has the shape of a scalar.
    if len({(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1:
        why = f"declared {rule}, but the ranks' shapes do not fit: {_all(parts)}"
        return Unjoinable(tuple(parts), why), first.shape
    length = sum(part.shape[axis] for part in parts)
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    recipe = joined(parts, "concat", axis, shape)
    if rule.parts:
        places = positions([part.shape[axis] for part in parts], rule.parts)
        if places is None:
            why = f"declared {rule}, but the ranks' shapes have no such parts: {_all(parts)}"
            return Unjoinable(tuple(parts), why), first.shape
        recipe = recipe.then(Step("select", axis, numbers=places), shape=shape)
    # Equal shapes may also mean replicas; the other side's shape decides that later.
    return Gathered(recipe, len(shapes) == 1), shape


def _word(origin: Origin, rule: Placement) -> str:
    """Label of a tensor in the count that the plan prints."""
    if isinstance(origin, Gathered):
        return "summed" if rule.kind == "partial" else "joined"
    if isinstance(origin, Replicas):
        return "replicas"
    return "that do not fit together" if isinstance(origin, Unjoinable) else "of one rank"


def _all(parts: Sequence[Record]) -> str:
    return " and ".join("x".join(map(str, part.shape)) or "scalar" for part in parts)
