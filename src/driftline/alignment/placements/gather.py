"""A run of many ranks, made one: shards joined, terms added, replicas kept as copies.

How a tensor lies `rank_lying` says, what values add to that `rank_evidence`; here it becomes what
the plan needs. A replica that differs stays a replica: that is a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.normalise.view import Apart, Copies, Gathered, Origin
from driftline.alignment.placements.evidence import ACTIVATION_GRADIENTS, Evidence
from driftline.alignment.placements.groups import Group
from driftline.alignment.placements.join import (
    DoesNotFit,
    Shape,
    is_called_fused,
    join,
    parts_by_values,
    positions,
    shapes_said,
)
from driftline.alignment.placements.layouts import WEIGHTS, Layouts
from driftline.alignment.placements.mesh import Coordinate, Placed
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_DONE = {"shard": "joined along axis {}", "sum": "summed", "mean": "averaged"}
_NO_TARGETS: Mapping[TensorKey, Shape] = {}


class Decision(NamedTuple):
    """What a group is taken for.

    Attributes:
        origin: As the plan needs it.
        shape: Of the whole.
        word: For the count that the plan prints.
    """

    origin: Origin
    shape: Shape
    word: str


class Gathering:
    """A run of many ranks, and what is concluded about it.

    Args:
        run: It.
        other: What it is compared with; None where that says nothing about shapes.
        onto: Rank and process to see everything as.
        targets: Shapes of wholes, where they are known from elsewhere.
        calls: Whether the calls of a step are to be made one, too.
        averaged: Whether gradients of other data are averaged, where the other run says nothing.

    Attributes:
        decided: Whether the other run said that, or nothing was to be said.
    """

    def __init__(
        self,
        run: Run,
        other: Run | None,
        onto: tuple[int, int],
        targets: Mapping[TensorKey, Shape] = _NO_TARGETS,
        *,
        calls: bool = False,
        averaged: bool = True,
    ) -> None:
        self._layouts = Layouts(run, other, onto, targets, calls=calls)
        self._evidence = Evidence(self._layouts, averaged=averaged)
        self.decided = self._evidence.decided
        self.mesh, self.groups = self._layouts.mesh, self._layouts.groups
        here = {record.key.rank for record in run.records}
        self._lost = [rank for rank in self.mesh.ranks if rank not in here]
        self._lost_beside: dict[frozenset[int], dict[Coordinate, int]] = {}
        self._fused: dict[str, tuple[int, ...]] = {}
        self._said: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What was concluded about the run as a whole, one sentence each."""
        return [*self._layouts.notes, *self._evidence.notes, *self._said]

    def decide(self, group: Group) -> Decision:
        """What a group is: one whole, several copies of it, or parts that do not fit together."""
        if (flat := self._layouts.flat(group)) is not None:
            return Decision(_origin([flat]), flat.shape, "joined from flat pieces (by shape)")
        placed, how = self._layouts.lie(group)
        if placed is None:
            return self._apart(group)
        placed = self._with_terms(group, placed)
        if why := self._gone(group, placed):
            return self._apart(group, why)
        try:
            sources = join(group.parts, placed)
        except DoesNotFit as trouble:
            return self._apart(group, str(trouble))
        sources = [self._finished(group, source, placed) for source in sources]
        word = self._word(group, placed, how, len(sources))
        return Decision(_origin(sources), sources[0].shape, word)

    def _gone(self, group: Group, placed: Sequence[Placed]) -> str:
        """Why a tensor is not whole because of a rank that left nothing; empty if it is."""
        if not self._lost:
            return ""
        whole = self._layouts.whole(group)
        cut = frozenset(n for n, how in enumerate(placed) if how.kind != "replicate")
        if cut not in self._lost_beside:
            places = ((self.mesh.at[rank], rank) for rank in self._lost)
            self._lost_beside[cut] = {_without(at, cut): rank for at, rank in places}
        beside, axes = self._lost_beside[cut], len(self.mesh.names)
        for at in group.parts if cut else ():
            if (rank := beside.get(_without(at[:axes], cut))) is not None:
                axis = min(cut)
                if len(cut) > 1 or axis >= axes:
                    return "a part is missing"
                part = self.mesh.at[rank][axis] + 1
                return f"part {part} of {self.mesh.sizes[axis]} is missing"
        if not cut and whole is not None and whole.shape != group.first.shape:
            return "the parts that are here do not make the whole"
        return ""

    def _apart(self, group: Group, why: str = "") -> Decision:
        records = group.records
        why = why or f"the ranks' shapes differ, {shapes_said(records)}, and make no whole"
        here = {record.key.rank for record in records}
        if gone := [rank for rank in self.mesh.ranks if rank not in here]:
            shown = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
            who = f"rank{'s' if len(gone) > 1 else ''} {shown}"
            lost = not {record.key.rank for record in self._layouts.run.records} & set(gone)
            why += f"; the values are lost with {who}" if lost else f"; {who} left nothing of it"
        return Decision(Apart(records, why), records[0].shape, "that do not fit together")

    def _word(self, group: Group, placed: Sequence[Placed], how: str, copies: int) -> str:
        axes = [
            f"{_DONE[each.kind].format(each.axis)} over {group.axes[n]}"
            for n, each in enumerate(placed)
            if each.kind in _DONE and len({at[n] for at in group.parts}) > 1
        ]
        if not axes:
            return "replicas" if copies > 1 else "of one rank"
        return f"{' and '.join(axes)} ({how})"

    def _with_terms(self, group: Group, placed: tuple[Placed, ...]) -> tuple[Placed, ...]:
        data = self._evidence.data_terms(group, placed)
        terms = self._evidence.terms.get(group.key, set[int]())
        kind = Placed("mean" if self._evidence.averaged else "sum")
        return tuple(
            kind if n in data else Placed("sum") if n in terms else how
            for n, how in enumerate(placed)
        )

    def _finished(self, group: Group, source: Source, placed: Sequence[Placed]) -> Source:
        """A joined source with its rows in order, its fused parts apart, its gradients scaled."""
        source = self._parted(group, self._evidence.in_order(group, source, placed), placed)
        if not self._evidence.averaged or group.key.port not in ACTIVATION_GRADIENTS:
            return source
        if (many := self._evidence.rows_apart(group, placed)) < 2:
            return source
        recipe = source if isinstance(source, Recipe) else start(source)
        return recipe.then(Step("times", factor=1 / many), shape=recipe.shape)

    def _parted(self, group: Group, source: Source, placed: Sequence[Placed]) -> Source:
        """Shards of a fused projection: each rank has its piece of q, of k and of v."""
        key = group.key
        cut = [how for how in placed if how.kind == "shard"]
        if len(cut) != 1 or not isinstance(source, Recipe) or not is_called_fused(key.site):
            return source
        axis, shards = cut[0].axis, source.sources
        records = [each for each in shards if isinstance(each, Record)]
        if len(records) != len(shards) or [step.kind for step in source.steps] != ["concat"]:
            return source
        if key.port == "input" or (key.port == "param" and axis and "weight" in key.slot):
            return source
        if key.site not in self._fused:
            self._fused[key.site] = self._fused_parts(key)
        parts = self._fused[key.site]
        places = positions([each.shape[axis] for each in records], parts) if parts else None
        if places is None:
            return source
        if not self._said:
            self._said.append(
                f"each rank holds its piece of {len(parts)} parts of '{key.site}' and its like: "
                "so joined they agree, rank after rank they do not; "
                f"--placement 'SITE=shard(-1, {':'.join(map(str, parts))})' says it"
            )
        return source.then(Step("select", axis, numbers=places), shape=source.shape)

    def _fused_parts(self, key: TensorKey) -> tuple[int, ...]:
        other = self._layouts.other
        for group in self.groups if other is not None else ():
            at, whole = group.key, self._layouts.whole(group)
            placed, _ = self._layouts.lie(group)
            if at.site != key.site or at.port != "output" or whole is None or placed is None:
                continue
            cut = [n for n, how in enumerate(placed) if how.kind == "shard"]
            if len(cut) == 1 and placed[cut[0]].axis == len(whole.shape) - 1 and other is not None:
                return parts_by_values(self._layouts.run, group.records, other, whole)
        return ()


_LIKE = {
    "param_grad": "param",
    "optimizer_grad": "param",
    "grad_output": "output",
    "grad_input": "input",
}


def common_shapes(
    first: Run, second: Run, onto: tuple[int, int], *, calls: bool = False
) -> dict[TensorKey, Shape]:
    """Shapes of wholes that the parts of two runs can both make; of several, the least strange.

    A gradient has the shape of what it is a gradient of, where its parts can make that.
    """
    ours, theirs = (Layouts(run, None, onto, calls=calls).possible() for run in (first, second))
    found: dict[TensorKey, Shape] = {}
    made: dict[tuple[object, ...], Shape] = {}
    for key in sorted(ours.keys() & theirs.keys(), key=lambda key: key.port in _LIKE):
        both = ours[key].keys() & theirs[key].keys()
        call = (0, 0) if key.port in WEIGHTS else (key.step, key.visit)
        like = made.get((key.site, _LIKE.get(key.port, ""), key.slot, *call))
        if like is None or like not in both:
            cost = {shape: ours[key][shape] + theirs[key][shape] for shape in both}
            like = min(both, key=lambda shape: (cost[shape], shape), default=None)
        if like is not None:
            found[key] = made[key.site, key.port, key.slot, *call] = like
    return found


def _without(at: Coordinate, axes: frozenset[int]) -> Coordinate:
    return tuple(place for n, place in enumerate(at) if n not in axes)


def _origin(sources: Sequence[Source]) -> Origin:
    if len(sources) == 1 and isinstance(sources[0], Recipe):
        return Gathered(sources[0])
    return Copies(tuple(sources))
