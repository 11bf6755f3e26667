"""Tensors that lie over several ranks: what the user declares of them, and a run seen as one rank.

    mlp.up=shard(1)          site (glob), every port of it (partial: its outputs)
    mlp.up/param=shard(0)    one port; `mlp.up/param/weight=shard(0)` one slot
    attn.qkv=shard(-1, 4:1:1)   each rank has its piece of three parts of these shares
    *.down/output=partial(sum)

What no rule covers is concluded by `gathering`. A replica that differs is found because each
replica is compared.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from driftline.alignment.normalise.view import Apart, Aside, Gathered, Origin, Replicas, SeenRun
from driftline.alignment.placements.join import is_called_fused, parts_by_values, positions
from driftline.alignment.recipe import Step, joined
from driftline.errors import BadInput, did_you_mean
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

Kind = Literal["shard", "replicate", "partial"]
_PLACEMENT = re.compile(r"(shard|replicate|partial)\s*(?:\(\s*([^()]*?)\s*\))?")


class Placement(NamedTuple):
    """One declared rule."""

    pattern: str
    kind: Kind
    axis: int = 0
    parts: tuple[int, ...] = ()

    def covers(self, key: TensorKey) -> bool:
        """Whether it speaks of this tensor: by site, by site/port, or by site/port/slot."""
        if fnmatch.fnmatchcase(key.site, self.pattern):
            # What a site leaves unreduced is its result, not what it was given.
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
    """A rule as it is written on the command line.

    >>> parse_placement("attn.*=shard(1)")
    Placement(pattern='attn.*', kind='shard', axis=1, parts=())

    Raises:
        BadInput: It is none.
    """
    pattern, equals, said = text.rpartition("=")
    found = _PLACEMENT.fullmatch(said.strip())
    hint = "write SITE=shard(AXIS), SITE=replicate or SITE=partial(sum)"
    if not equals or not pattern.strip() or found is None:
        raise BadInput(f"'{text}' is no placement", hint=hint)
    kind, inside = found.group(1), found.group(2)
    if kind == "shard":
        said_axis, comma, parts = (inside or "").partition(",")
        if not re.fullmatch(r"-?\d{1,2}\s*", said_axis):
            raise BadInput(f"'{text}' does not say along which axis", hint="such as shard(1)")
        if comma and not re.fullmatch(r"\s*[1-9]\d{0,5}(:[1-9]\d{0,5}){1,63}\s*", parts):
            raise BadInput(
                f"'{text}' does not say what the parts are",
                hint="their shares, such as shard(-1, 1:1:1), or 4:1:1 where keys are shared",
            )
        shares = tuple(int(share) for share in parts.split(":")) if comma else ()
        return Placement(pattern.strip(), "shard", int(said_axis), shares)
    if kind == "partial":
        if inside not in (None, "", "sum"):
            raise BadInput(f"'{text}': partial results can only be summed", hint="partial(sum)")
        return Placement(pattern.strip(), "partial")
    if inside:
        raise BadInput(f"'{text}': replicate takes nothing in brackets", hint=hint)
    return Placement(pattern.strip(), "replicate")


def ranks_of(run: Run) -> list[tuple[int, int]]:
    """The ranks of a run, each with its processes, in order."""
    return sorted({(record.key.rank, record.key.process) for record in run.records})


class AsOne(NamedTuple):
    """A run of several ranks, seen as if they were one.

    Attributes:
        run: It.
        notes: What to say about it.
        decided: Whether gradients of other data said how they add up, or there are none.
    """

    run: SeenRun
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
) -> AsOne:
    """The run as if its ranks were one.

    The last rule that covers a tensor counts; of what no rule covers, the tensors themselves and
    the shapes of the other side say how it lies.

    Args:
        run: A run of several ranks.
        rules: What the user declared.
        other: The other side: where it has a tensor only in the shape that each rank has, the ranks
            hold replicas, whatever a rule for their whole site says. None where it is in shards
            itself, and says nothing yet.
        onto: Rank and process to see everything as.
        targets: Shapes of wholes, where they are known from elsewhere.
        calls: Whether the calls of a step are to be made one, too.
        averaged: Whether gradients of other data are averaged, where no other side says it.

    Raises:
        BadInput: A rule covers nothing.
    """
    from driftline.alignment.placements.gather import Gathering
    from driftline.alignment.placements.groups import processes_of

    found = Gathering(run, other, onto, targets or {}, calls=calls, averaged=averaged)
    used: set[Placement] = set()
    records: list[Record] = []
    origins: dict[TensorKey, Origin] = {}
    counts: dict[str, int] = {}
    seen: Sequence[Record] = () if other is None else other.records
    shapes = {record.key: record.shape for record in seen}
    known = {(record.key.port, record.shape) for record in seen}
    groups = {group.key: list(group.records) for group in found.groups}
    guessed = None if other is None or not rules else _Fused(run, other, groups, rules)
    for group in found.groups:
        key, parts = group.key, groups[group.key]
        rule = next((rule for rule in reversed(rules) if rule.covers(parts[0].key)), None)
        if rule is None:
            origin, shape, word = found.decide(group)
        else:
            used.add(rule)
            rule = rule if guessed is None else guessed.better(key, parts, rule)
            origin, shape = _origin(parts, rule, len(ranks_of(run)))
            if isinstance(origin, Gathered) and origin.replicas:
                each, port = parts[0].shape, key.port
                if shapes.get(key) == each or (
                    key not in shapes and (port, shape) not in known and (port, each) in known
                ):
                    origin, shape = Replicas(tuple(parts)), each
            word = _word(origin, rule)
        origins[key] = origin
        counts[word] = counts.get(word, 0) + 1
        records.append(parts[0]._replace(key=key, shape=shape, placement="", digest=""))
    for rule in rules:
        if rule not in used:
            sites = {record.key.site for record in run.records}
            raise BadInput(
                f"--placement '{rule}' covers no tensor of '{run.name}'",
                hint=did_you_mean(rule.pattern.partition("/")[0], sites),
            )
    records.sort(key=lambda record: record.order)
    said = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    count = len(ranks_of(run))
    whose = "1 rank" if count == 1 else f"{count} ranks"
    notes = [f"{whose} of '{run.name}' as one ({found.mesh}): {said}"]
    notes += found.notes + ([] if guessed is None else guessed.notes)
    ranks = processes_of(run)
    aside: list[Aside] = []
    for record in run.records:
        if ranks.get(record.key.rank) != record.key.process:
            why = f"not of the job: process {ranks[record.key.rank]} is its rank {record.key.rank}"
            aside.append((record, record, why))
    return AsOne(SeenRun(run, records, origins, aside), notes, found.decided)


class _Fused:
    """Sites whose shards are pieces of several parts each, though no rule says so."""

    def __init__(
        self,
        run: Run,
        other: Run,
        groups: Mapping[TensorKey, list[Record]],
        rules: Sequence[Placement],
    ) -> None:
        self.notes: list[str] = []
        self._parts: dict[str, tuple[int, ...]] = {}
        whole = {(r.key.step, r.key.site, r.key.visit, r.key.port, r.key.slot): r
                 for r in other.records}  # fmt: skip
        for key, shards in groups.items():
            if key.port != "output" or key.site in self._parts or not is_called_fused(key.site):
                continue
            rule = next((rule for rule in reversed(rules) if rule.covers(shards[0].key)), None)
            record = whole.get((key.step, key.site, key.visit, key.port, key.slot))
            last = len(shards[0].shape) - 1
            if rule is None or rule.kind != "shard" or rule.parts or record is None:
                continue
            if last < 0 or rule.axis not in (-1, last):
                continue
            self._parts[key.site] = parts_by_values(run, shards, other, record)
        found = {site: parts for site, parts in self._parts.items() if parts}
        if found:
            site, parts = next(iter(found.items()))
            shown = ":".join(map(str, parts))
            others = f" (and of {len(found) - 1} more sites)" if len(found) > 1 else ""
            self.notes.append(
                f"each rank holds its piece of {len(parts)} parts of '{site}'{others}: so joined "
                "it agrees, rank after rank it does not; "
                f"--placement 'SITE=shard(-1, {shown})' says it"
            )

    def better(self, key: TensorKey, shards: Sequence[Record], rule: Placement) -> Placement:
        """The rule, with the parts of the site."""
        parts = self._parts.get(key.site)
        if not parts or rule.kind != "shard" or rule.parts:
            return rule
        axis = rule.axis % len(shards[0].shape) if shards[0].shape else 0
        is_input = key.port == "input" or (key.port == "param" and axis and "weight" in key.slot)
        return rule if is_input else rule._replace(parts=parts)


def _origin(
    parts: list[Record], rule: Placement | None, ranks: int
) -> tuple[Origin, tuple[int, ...]]:
    """What a tensor of several ranks is, and the shape to look for on the other side."""
    first = parts[0]
    if len(parts) == 1 and (rule is None or rule.kind == "replicate"):
        return first, first.shape  # layers that live on one rank only: pipelines
    kind = "replicate" if rule is None else rule.kind
    if len(parts) < ranks and kind != "replicate":
        have = ", ".join(str(part.key.rank) for part in parts)
        why = f"declared {rule}, but only rank {have} of {ranks} has it"
        return Apart(tuple(parts), why), first.shape
    shapes = {part.shape for part in parts}
    if kind == "shard" and rule is not None:
        axis = rule.axis + len(first.shape) if rule.axis < 0 else rule.axis
        if not 0 <= axis < len(first.shape):
            # A rule for a whole site meets its bias, too, or a scalar: each rank has all of it.
            return Replicas(tuple(parts)), first.shape
        if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1:
            why = f"declared {rule}, but the ranks' shapes do not fit: {_all(parts)}"
            return Apart(tuple(parts), why), first.shape
        whole = sum(part.shape[axis] for part in parts)
        shape = (*first.shape[:axis], whole, *first.shape[axis + 1 :])
        recipe = joined(parts, "concat", axis, shape)
        if rule.parts:
            places = positions([part.shape[axis] for part in parts], rule.parts)
            if places is None:
                why = f"declared {rule}, but the ranks' shapes have no such parts: {_all(parts)}"
                return Apart(tuple(parts), why), first.shape
            recipe = recipe.then(Step("select", axis, numbers=places), shape=shape)
        return Gathered(recipe, len(shapes) == 1), shape
    if len(shapes) != 1:
        said = f"declared {rule}" if rule else "no --placement says how it lies over the ranks"
        return Apart(tuple(parts), f"{said}, and the ranks' shapes differ: {_all(parts)}"), (
            first.shape
        )
    if kind == "partial":
        return Gathered(joined(parts, "sum", 0, first.shape)), first.shape
    return Replicas(tuple(parts)), first.shape


def _word(origin: Origin, rule: Placement | None) -> str:
    if isinstance(origin, Gathered):
        return "summed" if rule is not None and rule.kind == "partial" else "joined"
    if isinstance(origin, Replicas):
        return "replicas" if rule is not None else "taken for replicas"
    return "that do not fit together" if isinstance(origin, Apart) else "of one rank"


def _all(parts: Sequence[Record]) -> str:
    return " and ".join("x".join(map(str, part.shape)) or "scalar" for part in parts)
