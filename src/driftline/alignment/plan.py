"""The plan: which tensors of two runs are compared, by which rule and with what confidence.

A plan is immutable data that can be printed, saved and edited before any tensor is read. It does
not know how it was made or how it is executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from driftline.alignment.recipe import Recipe
from driftline.runs.records import Record, TensorKey

Rule = Literal["map", "plan", "name", "alias", "normalised", "graph", "structure", "moment"]
"""The rule that paired two tensors; after the user's own rules, the strongest come first."""

_BY: dict[Rule, str] = {
    "plan": "by the plan",
    "map": "by the map",
    "name": "by name",
    "alias": "by the alias of their slot",
    "normalised": "by normalised name",
    "graph": "by the graph",
    "structure": "by structure",
    "moment": "of inputs taken at another moment",
}
# Shared empty defaults: a NamedTuple evaluates a default once, and nothing is written to these.
_NO_REASONS: Mapping[tuple[str, TensorKey], str] = {}
_NONE_INSIDE: Mapping[tuple[str, TensorKey], TensorKey] = {}


NOT_PLANNED = "the plan has no pair for it"
"""Reason of a tensor that a saved plan leaves out on purpose."""
NO_NODE = "no node of the compiled graphs stems from it"
NO_TENSOR = "the other run has no tensor for this node"
LONE_NODE = "a node; "
"""Start of the reason of a graph node outside of modules, if the other run has no nodes."""
SAME_VALUE = f"{LONE_NODE}the same value is compared at "
"""Start of the reason of a node whose bytes are compared under the name of a module."""
NOT_KEPT = "what an operator takes; a run of graphs keeps what nodes give"


class LeftOut(NamedTuple):
    """Rows or tokens of one side's compared tensors that the other side does not have.

    Attributes:
        side: reference or candidate.
        words: Which rows or tokens, in which steps.
        elements: Number of elements of compared tensors in them.
    """

    side: str
    words: str
    elements: int = 0


class Pair(NamedTuple):
    """Two tensors that should agree.

    Attributes:
        reference: The record in the reference.
        candidate: The record in the candidate.
        by: The rule that made the pair. `alias` means that one side numbers a slot and the other
            names it.
        confidence: 1 for declared pairs and equal names; less for conclusions.
        reference_recipe: Steps that are applied to the reference first; None if there are none.
        candidate_recipe: The same for the candidate.
        trouble: Why the two belong together but cannot be compared; empty if they can, as far as
            the plan knows.
        line: The program's line that computes them, if a compiled graph names it.
        fused: Other operations of the fused kernel that computes it, in words; empty if there are
            none.
        culprit: The first node of a compiled graph before it whose output is wrong for its own
            inputs: in words, with its line.
    """

    reference: Record
    candidate: Record
    by: Rule = "name"
    confidence: float = 1.0
    reference_recipe: Recipe | None = None
    candidate_recipe: Recipe | None = None
    trouble: str = ""
    line: str = ""
    fused: str = ""
    culprit: str = ""

    @property
    def records(self) -> tuple[Record, ...]:
        """Every stored tensor that the pair uses, including the sources of its recipes."""
        sources = [
            recipe.records
            for recipe in (self.reference_recipe, self.candidate_recipe)
            if recipe is not None
        ]
        return (
            self.reference,
            self.candidate,
            *(record for records in sources for record in records),
        )

    def __str__(self) -> str:
        text = str(self.reference.key)
        if self.by == "alias":
            text += f" = {self.candidate.key.slot}"
        elif self.reference.key != self.candidate.key:
            text += f" = {self.candidate.key}"
        return text


class Plan(NamedTuple):
    """The pairs of two runs, and the tensors without a partner.

    Attributes:
        pairs: The pairs to compare, in the reference's execution order: a tuple, or for long runs a
            sequence that makes its pairs on demand.
        missing: Tensors that only the reference has, in its order.
        extra: Tensors that only the candidate has, in its order.
        notes: Conclusions about the whole runs, one sentence each: which steps match, which ranks
            were gathered, what a mask leaves out.
        reasons: Why a tensor has no partner, by its side (`reference` or `candidate`) and key, if a
            reason is known.
        lone_lines: The program's line of a tensor without a partner, by the same keys.
        inside: A tensor without a partner because the other side computes it inside a fused node →
            the tensor of the other side that was computed from it and is compared.
        left_out: Rows and tokens of compared tensors that have no partner.
        selected: The selection, if only a part of both runs was compared, in words: sites, ports,
            ranks.
    """

    pairs: Sequence[Pair]
    missing: tuple[Record, ...] = ()
    extra: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()
    reasons: Mapping[tuple[str, TensorKey], str] = _NO_REASONS
    lone_lines: Mapping[tuple[str, TensorKey], str] = _NO_REASONS
    inside: Mapping[tuple[str, TensorKey], TensorKey] = _NONE_INSIDE
    left_out: tuple[LeftOut, ...] = ()
    selected: tuple[str, ...] = ()

    @property
    def ways(self) -> Counter[Rule]:
        """Number of pairs that each rule has made."""
        # Streaming plans count their rules without making a million pairs.
        counted: Counter[Rule] | None = getattr(self.pairs, "ways", None)
        return Counter(pair.by for pair in self.pairs) if counted is None else counted

    def with_pairs(self, pairs: Sequence[Pair]) -> Plan:
        """A plan with more pairs, and the tensors that are then still unpaired."""
        # By identity, not by key: the sources of a recipe are used up by the pair that they make.
        used = {id(record) for pair in pairs for record in pair.records}
        all_pairs = sorted([*self.pairs, *pairs], key=lambda pair: execution(pair.reference))
        return self._replace(
            pairs=tuple(all_pairs),
            missing=tuple(record for record in self.missing if id(record) not in used),
            extra=tuple(record for record in self.extra if id(record) not in used),
        )

    def unpaired(self) -> tuple[tuple[str, Sequence[Record]], ...]:
        """The tensors without a partner, by side."""
        return ("reference", self.missing), ("candidate", self.extra)

    def with_reasons_of_unpaired(self) -> Plan:
        """The plan with reasons only for tensors that are still unpaired."""
        alone = {(side, record.key) for side, left in self.unpaired() for record in left}
        return self._replace(
            reasons={tensor: why for tensor, why in self.reasons.items() if tensor in alone}
        )

    def lines(self) -> Iterator[str]:
        """The lines that `--dry-run` prints."""
        yield str(self)
        for note in self.notes:
            yield f"  note     {note}"
        for pair in self.pairs:
            reference, candidate = pair.reference, pair.candidate
            dtypes = (
                reference.dtype
                if reference.dtype == candidate.dtype
                else f"{reference.dtype} | {candidate.dtype}"
            )
            shapes = (
                _dims(reference)
                if reference.shape == candidate.shape
                else f"{_dims(reference)} | {_dims(candidate)}"
            )
            kept = (
                reference.kept
                if reference.kept == candidate.kept
                else f"{reference.kept} | {candidate.kept}"
            )
            # Nearly all pairs are made by name; only another rule is worth the space.
            how = "" if pair.by == "name" else f"  by {pair.by}, {pair.confidence:.2f}"
            yield f"  pair     {pair}  {dtypes} {shapes} {kept}{how}"
            if pair.reference_recipe is not None:
                yield f"           reference first: {pair.reference_recipe}"
            if pair.candidate_recipe is not None:
                yield f"           candidate first: {pair.candidate_recipe}"
            if pair.trouble:
                yield f"           cannot be compared: {pair.trouble}"
            if pair.fused:
                yield f"           inside the fusion of {pair.fused}"
            if pair.culprit:
                yield f"           wrong for its own inputs: {pair.culprit}"
        for record in self.missing:
            yield f"  missing  {record.key}  {record.dtype} {_dims(record)}" + self._why(
                "reference", record
            )
        for record in self.extra:
            yield f"  extra    {record.key}  {record.dtype} {_dims(record)}" + self._why(
                "candidate", record
            )

    def _repr_html_(self) -> str:
        """HTML for a notebook."""
        from driftline.reporting.notebook import plan_html

        return plan_html(self)

    def _why(self, side: str, record: Record) -> str:
        reason = self.reasons.get((side, record.key))
        return f"  ({reason})" if reason else ""

    def __str__(self) -> str:
        ways = self.ways
        shown = [f"{ways[rule]} {_BY[rule]}" for rule in _BY if ways[rule]]
        # Rules are counted only if a rule other than the name made pairs.
        how = f" ({', '.join(shown)})" if set(ways) - {"name"} else ""
        alone = (("reference", self.missing), ("candidate", self.extra))
        count = sum((s, r.key) in self.inside for s, rs in alone for r in rs) if self.inside else 0
        inside = f", {count} of these inside a fusion" if count else ""
        return (
            f"{len(self.pairs)} pairs{how}, {len(self.missing)} only in the reference, "
            f"{len(self.extra)} only in the candidate{inside}"
        )


def execution(record: Record) -> tuple[int, int, int]:
    """Sort key of a record: by rank, then in execution order."""
    return (record.key.rank, record.key.process, record.order)


def _dims(record: Record) -> str:
    return "x".join(str(size) for size in record.shape) or "scalar"
