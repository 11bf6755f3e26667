"""A pair whose sides are kept apart by layout, size or scale: each rule is asked in turn.

Scales first (they need the values as they are stored), then weights that lie transposed, tokens
and batches, plain reshapes, and tile padding. What no rule explains stays apart, with a reason.
"""

from __future__ import annotations

from driftline.alignment.axes import Layouts, cropped, is_weight, reshaped, transposed
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.quantised import Scales, dequantised
from driftline.alignment.sides import shapes_of
from driftline.runs.run import Run

Place = tuple[int, int, int]


class Reconciler:
    """The rules, with what they know of both runs as wholes.

    Attributes:
        notes: What was concluded about steps as wholes, one sentence each.
    """

    def __init__(self, reference: Run, candidate: Run, plan: Plan) -> None:
        from driftline.alignment.token_book import TokenBook

        self._runs = (reference, candidate)
        self._layouts = Layouts((_framework(reference), _framework(candidate)), plan.pairs)
        self._scales: tuple[Scales, Scales] | None = None
        self._tokens = TokenBook(reference, candidate)
        self.notes = self._tokens.notes

    def settled(self, pair: Pair) -> Pair:
        """The pair with recipes that bring its sides together, or with the reason there is none."""
        if pair.reference.dtype != pair.candidate.dtype:
            if self._scales is None:
                self._scales = (Scales(self._runs[0]), Scales(self._runs[1]))
            pair = dequantised(pair, *self._scales)
            if pair.trouble:
                return pair
        turned = transposed(pair, self._layouts)
        if turned is not None:
            return turned
        here, there = shapes_of(pair)
        if here == there:
            return pair
        trouble = ""
        if not is_weight(pair.reference):
            found, trouble = self._tokens.cut(pair)
            if found is not None:
                return found
        found = reshaped(pair) or cropped(pair)
        if found is not None:
            return found
        if trouble:
            apart = f"the shapes differ: {_dims(here)} against {_dims(there)}"
            return pair._replace(trouble=f"{apart}; {trouble}")
        return pair


def _framework(run: Run) -> str:
    """`torch`, `paddle`, or nothing where the run does not say."""
    said = str(run.manifest.get("framework", "")).lower()
    if said:
        return "paddle" if said.startswith("paddle") else said
    for process in run.processes():
        if said := str(process.get("framework", "")).lower():
            return said
    return "paddle" if "paddle" in str(run.manifest.get("format", "")).lower() else ""


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
