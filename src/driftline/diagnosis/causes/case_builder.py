"""Cases are built from the tensors of a guilty site, and the detectors are asked for the cause.

If a container errs although none of its parts does, the bug is in its own code: then the first
tensor that it passes to a part and that is already wrong shows more than its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe
from driftline.alignment.recipe_steps import Step
from driftline.comparison.evidence.error_stats import index, read_whole
from driftline.comparison.measure.recipes import open_recipes
from driftline.comparison.verdict.dataflow import transfers_of
from driftline.comparison.verdict.own_error import ReplayResult
from driftline.comparison.verdict.sites import FINE, Call, Place, Site, contains
from driftline.comparison.verdict.status import SiteStatus
from driftline.diagnosis.causes.case import F64, Case, Codes, Flags
from driftline.diagnosis.causes.linear_solve import implied_input
from driftline.diagnosis.causes.registry import RULES_FOR_INPUTS, Clue, best_clue
from driftline.diagnosis.evidence.files import Replay
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

# Limits on tensors that are only read to be compared: the nearest twelve modules, the last two
# calls.
_OTHERS = 12
_EARLIER = 2


class Runs(NamedTuple):
    """All runs whose values may be read.

    Attributes:
        reference: The reference.
        candidate: The candidate.
        replay: Replay of the candidate's inputs, if any.
        repeats: Other executions of the candidate.
        plan: Which tensors of reference and candidate belong together.
    """

    reference: Run
    candidate: Run
    replay: Replay | None
    repeats: Sequence[Run]
    plan: Plan


class NamedCause(NamedTuple):
    """The kind of bug at a site.

    Attributes:
        cause: Name of the cause, or `unknown`.
        sentence: The evidence for it, or why none was named.
        score: Share of the error that it explains.
        detail: The exact variant.
        others: Other causes that were considered, with scores.
        picture: The tensor that was examined.
    """

    cause: str
    sentence: str = ""
    score: float = 0.0
    detail: str = ""
    others: tuple[tuple[str, float], ...] = ()
    picture: str = ""


def name_cause(
    runs: Runs,
    sites: Mapping[Place, Site],
    place: Place,
    standing: SiteStatus,
    judged: ReplayResult | None,
) -> NamedCause:
    """Ask every detector about a guilty site."""
    builder = _CaseBuilder(runs, sites)
    tried: list[NamedCause] = []
    for case, picture in builder.cases(place, standing, judged):
        clue, clues = best_clue(case)
        naming = _named(clue, clues, picture)
        if naming.cause != "unknown":
            return naming
        tried.append(naming)
        # A linear map can be inverted: sometimes the error is simple in terms of the input it
        # implies.
        seen = implied_input(case)
        if seen is not None:
            clue, clues = best_clue(seen, RULES_FOR_INPUTS)
            naming = _named(clue, clues, picture)
            if clue is not None:
                return naming._replace(
                    sentence=f"its result is that of another input, of which {naming.sentence}"
                )
    if tried:
        return max(tried, key=lambda naming: naming.others[0][1] if naming.others else 0.0)
    return NamedCause("unknown", "the values at this site were not kept")


def _named(clue: Clue | None, clues: Sequence[Clue], picture: str) -> NamedCause:
    others = tuple((other.cause, round(other.score, 3)) for other in clues if other is not clue)[:4]
    if clue is None:
        if clues:
            why = f"nothing known fits clearly; nearest is '{clues[0].cause}'"
            why += f" with {clues[0].score:.0%} of the error"
        else:
            why = "nothing known fits"
        return NamedCause("unknown", why, 0.0, "", others, picture)
    return NamedCause(clue.cause, clue.sentence, clue.score, clue.detail, others, picture)


class _CaseBuilder:
    """Finds the tensors that belong to a case."""

    def __init__(self, runs: Runs, sites: Mapping[Place, Site]) -> None:
        self.runs = runs
        self.sites = sites
        self.pairs = {pair.reference.key: pair for pair in runs.plan.pairs}
        none: Mapping[TensorKey, Record] = {}
        self.exact = index(runs.replay.exact) if runs.replay is not None else none
        self.candidate_records = index(runs.candidate)

    def cases(
        self, place: Place, standing: SiteStatus, judged: ReplayResult | None
    ) -> list[tuple[Case, str]]:
        site = self.sites[place]
        cases: list[tuple[Case, str]] = []
        # The tensor passed to a part is tried first: it is the sharper picture.
        handed = self._handed(place, standing)
        # If replay saw that the error appears after the parts, what was passed to them cannot show
        # it.
        made_after = judged is not None and judged.after_parts and "/input/" not in judged.slot
        if handed is not None and not made_after:
            cases.append(handed)
        rows = sorted(standing.call.outs, key=lambda row: -_error(row.metrics))
        # The slot in which replay saw the error comes before larger errors elsewhere.
        if judged is not None and judged.slot:
            rows.sort(key=lambda row: row.slot != judged.slot)
        for row in rows[:2]:
            case = self._case(row.key, site, standing, judged)
            if case is not None:
                cases.append((case, str(row.key)))
        return cases

    def _handed(self, place: Place, standing: SiteStatus) -> tuple[Case, str] | None:
        """The tensor passed to a part whose error exceeds that of its sources most."""
        if place.direction != "forward":
            return None
        near = {
            other: site
            for other, site in self.sites.items()
            if other == place or contains(place.site, other.site)
        }
        call = standing.call
        best: tuple[float, Call] | None = None
        for transfer in transfers_of(near)[place]:
            handed = transfer.call
            if handed.outs[0].key.port != "input":
                continue
            if (handed.step, handed.rank) != (call.step, call.rank):
                continue
            ratio = handed.error / max(math.hypot(handed.error_in, handed.unit / 2.0), 1e-300)
            # Below this ratio the error may be that of its sources, a little enlarged.
            if ratio > 1.3 and (best is None or ratio > best[0]):
                best = ratio, handed
        if best is None:
            return None
        handed = best[1]
        row, owner = handed.outs[0], self.sites[place]
        noise = max(handed.error_in if math.isfinite(handed.error_in) else 0.0, handed.unit)
        case = self._plain(row.key, owner, noise)
        return None if case is None else (case, str(row.key))

    def _plain(self, key: TensorKey, site: Site, noise: float) -> Case | None:
        """A case from reference and candidate alone, for a tensor that a site's own code made."""
        pair = self.pairs.get(key)
        # Recipes rearrange elements; detectors of permutations would see what alignment did.
        if pair is None or not _is_assembled(pair):
            return None
        values = self._values(pair)
        if values is None or values[0].shape != values[1].shape or values[0].ndim == 0:
            return None
        r, c = values
        dtype = DTYPES[pair.candidate.dtype]
        parent = site.name
        if _is_changed(pair):
            return Case(r, c, noise, dtype.unit_roundoff, dtype.name, parent, site.class_name)
        inputs = self._made_before(pair.candidate, parent)
        return Case(
            r,
            c,
            noise,
            dtype.unit_roundoff,
            dtype.name,
            parent,
            site.class_name,
            inputs,
            pads=self._pads(pair.candidate, c.shape),
            parts=self._parts(pair.candidate, parent),
        )

    def _parts(self, record: Record, parent: str) -> dict[str, F64]:
        """Inputs of a container, and what its parts had made before a tensor was passed on."""
        tensors: dict[str, F64] = {}
        for other in self.runs.candidate.records:
            of = other.key
            if of.step != record.key.step or of.rank != record.key.rank:
                continue
            if other.order >= record.order:
                continue
            made = of.port == "output" and of.site.rpartition(".")[0] == parent
            if made or (of.port == "input" and of.site == parent):
                values = read_whole(self.runs.candidate, other)
                if values is not None:
                    tensors[of.site if made else of.slot] = values
        return tensors

    def _case(
        self, key: TensorKey, site: Site, standing: SiteStatus, judged: ReplayResult | None
    ) -> Case | None:
        pair = self.pairs.get(key)
        if pair is None:
            return None
        record = pair.candidate
        changed = _is_changed(pair)
        if key.port != "param" and not _is_assembled(pair):
            return None
        # A weight that another framework stores turned is compared as it is used; what ranks and
        # micro-batches have in parts, as the whole that it is.
        used = self._as_used(pair) if changed else None
        c = read_whole(self.runs.candidate, record) if used is None else used[1]
        exact = self.exact.get(record.key)
        right = None
        # The exact replay is a better reference: it has the candidate's own input.
        if self.runs.replay is not None and exact is not None and judged is not None:
            right = read_whole(self.runs.replay.exact, exact)
        replayed = right is not None
        if right is None:
            right = read_whole(self.runs.reference, pair.reference) if used is None else used[0]
        if c is None or right is None or c.shape != right.shape or c.ndim == 0:
            return None
        dtype = DTYPES[record.dtype]
        unit = max(dtype.unit_roundoff, standing.call.unit)
        if replayed and judged is not None:
            # Exact and candidate may add in other orders; fine formats need some units of
            # allowance.
            noise = max(judged.noise, unit / 4.0 if unit > FINE else 4.0 * unit)
        else:
            noise = max(standing.noise if math.isfinite(standing.noise) else 0.0, unit)
        leaning = (
            judged is not None and judged.statistic == "projection" and _sub_noise(judged)
        ) or standing.leaning
        if changed and key.port != "param":
            # What lies beside it lies in parts as well; a part explains nothing of the whole.
            return Case(
                right,
                c,
                noise,
                unit,
                dtype.name,
                site.name,
                site.class_name,
                self._whole_inputs(pair),
                self._params(pair),
                self._others(pair.reference),
                leaning=leaning,
            )
        return Case(
            right,
            c,
            noise,
            unit,
            dtype.name,
            site.name,
            site.class_name,
            # Nodes of a graph have outputs only: what they are given is what others gave.
            self._inputs(record) or self._whole_inputs(pair),
            self._params(pair),
            self._others(pair.reference),
            self._before(record),
            self._ranks(record),
            self._repeats(record),
            self._pads(record, c.shape),
            leaning,
            self._parts(record, record.key.site),
            self._codes(record),
        )

    def _as_used(self, pair: Pair) -> tuple[F64, F64] | None:
        """Both sides of a parameter after their recipes; None where they cannot be had."""
        try:
            values = open_recipes(self.runs.reference, self.runs.candidate, pair)
            reference, candidate = values.decoded()
        except (DriftlineError, OSError, ValueError):
            return None
        recipe = pair.reference_recipe or pair.candidate_recipe
        shape = values.shape or (recipe.shape if recipe is not None else ())
        return reference.reshape(shape), candidate.reshape(shape)

    def _values(self, pair: Pair) -> tuple[F64, F64] | None:
        """Both sides of a pair as they are compared; None where they cannot be had."""
        if _is_changed(pair):
            return self._as_used(pair)
        r = read_whole(self.runs.reference, pair.reference)
        c = read_whole(self.runs.candidate, pair.candidate)
        return None if r is None or c is None else (r, c)

    def _whole_inputs(self, output: Pair) -> dict[str, F64]:
        """What the candidate's site was given in this call, put together from its parts."""
        key = output.reference.key
        wanted = "input" if key.port == "output" else "grad_output"
        tensors: dict[str, F64] = {}
        for of, pair in self.pairs.items():
            if of.port == wanted and of[0] == key[0] and of[3:7] == key[3:7]:
                values = self._values(pair) if _is_assembled(pair) else None
                if values is not None:
                    tensors[of.slot] = values[1]
        return tensors

    def _inputs(self, record: Record) -> dict[str, F64]:
        """Floating-point inputs of the candidate's site in this call."""
        tensors: dict[str, F64] = {}
        key = record.key
        # For gradients the input of a backward pass is the gradient of the output.
        wanted = "input" if key.port == "output" else "grad_output"
        for other in self.runs.candidate.records:
            of = other.key
            if of.port == wanted and of[0] == key[0] and of[3:7] == key[3:7]:
                values = read_whole(self.runs.candidate, other)
                if values is not None:
                    tensors[of.slot] = values
        return tensors

    def _codes(self, record: Record) -> dict[str, Codes]:
        """Integer inputs of the candidate's site in this call: routes, positions."""
        codes: dict[str, Codes] = {}
        key = record.key
        for other in self.runs.candidate.records:
            of = other.key
            dtype = DTYPES.get(other.dtype)
            if of.port != "input" or of[0] != key[0] or of[3:7] != key[3:7] or dtype is None:
                continue
            # Booleans and narrow codes are masks and packed weights, not routes.
            if dtype.kind in ("int", "uint") and dtype.bits >= 8 and other.kept == "full":
                values = self.runs.candidate.raw(other)
                codes[of.slot] = np.asarray(values, dtype=np.int64).reshape(other.shape)
        return codes

    def _made_before(self, record: Record, parent: str) -> dict[str, F64]:
        """Outputs of the same size made earlier in the same container: possible arguments."""
        tensors: dict[str, F64] = {}
        size = math.prod(record.shape)
        for other in self.runs.candidate.records:
            of = other.key
            earlier = of.step == record.key.step and other.order < record.order
            same_size = math.prod(other.shape) == size
            if of.port == "output" and earlier and same_size and contains(parent, of.site):
                values = read_whole(self.runs.candidate, other)
                if values is not None:
                    tensors[of.site] = values
        # The last four are nearest; an argument lies close to its function.
        names = list(tensors)[-4:]
        return {name: tensors[name] for name in names}

    def _params(self, pair: Pair) -> dict[str, F64]:
        params: dict[str, F64] = {}
        # The reference's weights come first: the candidate's may be what is wrong.
        for run, site in (
            (self.runs.reference, pair.reference.key.site),
            (self.runs.candidate, pair.candidate.key.site),
        ):
            for other in run.records:
                if other.key.port == "param" and other.key.site == site:
                    values = read_whole(run, other)
                    if values is not None:
                        params.setdefault(other.key.slot, values)
        return params

    def _others(self, record: Record) -> dict[str, F64]:
        """Outputs of the reference with the same shape, from the nearest modules of this class."""
        near: list[Record] = []
        for other in self.runs.reference.records:
            key = other.key
            if (
                key.port == record.key.port
                and key.slot == record.key.slot
                and (key.step, key.rank) == (record.key.step, record.key.rank)
                and key.site != record.key.site
                and other.shape == record.shape
                and other.class_name == record.class_name
                and other.digest != record.digest
                # An equal tensor elsewhere would explain nothing.
            ):
                near.append(other)
        near.sort(key=lambda other: abs(other.order - record.order))
        tensors: dict[str, F64] = {}
        for other in near[:_OTHERS]:
            values = read_whole(self.runs.reference, other)
            if values is not None:
                tensors[other.key.site] = values
        return tensors

    def _before(self, record: Record) -> tuple[F64, ...]:
        key = record.key
        earlier = [
            other
            for other in self.runs.candidate.records
            if other.key[:3] == key[:3]
            and other.key.rank == key.rank
            and other.order < record.order
            and other.shape == record.shape
        ]
        # The latest calls first, since stale values usually come from the call just before.
        read = [read_whole(self.runs.candidate, other) for other in earlier[: -_EARLIER - 1 : -1]]
        return tuple(values for values in read if values is not None)

    def _ranks(self, record: Record) -> tuple[F64, ...]:
        key = record.key
        others = [
            read_whole(self.runs.candidate, other)
            for other in self.runs.candidate.records
            if other.key[:5] == key[:5]
            and other.key.rank != key.rank
            and other.shape == record.shape
        ]
        # A bound for jobs with very many ranks: each rank's tensor is held in memory.
        return tuple(values for values in others[:63] if values is not None)

    def _repeats(self, record: Record) -> tuple[F64, ...]:
        repeats: list[F64] = []
        for run in self.runs.repeats:
            values = read_whole(run, index(run).get(record.key))
            if values is not None:
                repeats.append(values)
        return tuple(repeats)

    def _pads(self, record: Record, shape: tuple[int, ...]) -> Flags | None:
        """Which tokens are padding, from the attention mask that the model was given."""
        if len(shape) < 2:
            return None
        for other in self.runs.candidate.records:
            if (
                other.key.port == "input"
                and "attention_mask" in other.key.slot
                and len(other.shape) == 2
                and other.key.step == record.key.step
                and DTYPES[other.dtype].kind in ("int", "uint", "bool")
                and other.kept == "full"
            ):
                pads = np.asarray(self.runs.candidate.raw(other)).reshape(other.shape) == 0
                if pads.shape[:2] == shape[:2]:
                    return pads
        return None


def _is_changed(pair: Pair) -> bool:
    return pair.reference_recipe is not None or pair.candidate_recipe is not None


# Steps that put a tensor together from its parts, or give it another shape, and leave every
# element where it belongs.
_ASSEMBLY = frozenset({"concat", "sum", "mean", "times", "reshape"})


def _is_assembled(pair: Pair) -> bool:
    """Whether both sides are whole tensors, as stored or put together from ranks and calls."""
    return all(
        recipe is None
        or (
            all(step.kind in _ASSEMBLY for step in _steps(recipe))
            and len({r.key._replace(rank=0, process=0, visit=0) for r in recipe.records}) == 1
        )
        for recipe in (pair.reference_recipe, pair.candidate_recipe)
    )


def _steps(recipe: Recipe) -> Iterator[Step]:
    yield from recipe.steps
    for source in recipe.sources:
        if isinstance(source, Recipe):
            yield from _steps(source)


def _sub_noise(judged: ReplayResult) -> bool:
    """Whether the error in total is of the size of noise."""
    return judged.effect is not None and judged.effect.error <= 3.0 * judged.noise


def _error(metrics: Mapping[str, float]) -> float:
    value = float(metrics.get("relative_l2", math.nan))
    return math.inf if math.isnan(value) else value
