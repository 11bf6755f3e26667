"""Cases are built from the tensors of a guilty site, and the detectors are asked for the cause.

If a container errs although none of its parts does, the bug is in its own code: then the first
tensor that it passes to a part and that is already wrong shows more than its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe
from driftline.alignment.recipe_steps import Step
from driftline.comparison.evidence.error_stats import index, read_whole
from driftline.comparison.measure.recipes import open_recipes
from driftline.comparison.verdict.dataflow import transfers_of
from driftline.comparison.verdict.own_error import ReplayResult
from driftline.comparison.verdict.sites import FINE, Call, Place, Site, ancestors, contains
from driftline.comparison.verdict.status import SiteStatus
from driftline.diagnosis.causes.case import F64, Case, Codes, Flags
from driftline.diagnosis.evidence.files import Replay
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.sidecars.model_facts import ModelFacts, read_model_facts

# Limits on tensors that are only read to be compared: the nearest twelve modules, the last two
# calls, the last parts of a container.
_OTHERS = 12
_EARLIER = 2
_MOST_PARTS = 32
_NEARLY = 0.1
"""Relative error up to which an earlier tensor counts as right."""
_MOST_FLAGS, _MOST_IN_FLAGS = 8, 1 << 16
_MOST_IN_CALLS = 1 << 22
_MOST_STEPS = 64
"""Earlier steps of which parts are joined: a longer past is no small case any more."""


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


class CaseBuilder:
    """Finds the tensors that belong to a case."""

    def __init__(self, runs: Runs, sites: Mapping[Place, Site]) -> None:
        self.runs = runs
        self.sites = sites
        self.pairs = {pair.reference.key: pair for pair in runs.plan.pairs}
        self.by_candidate = {pair.candidate.key: pair for pair in runs.plan.pairs}
        none: Mapping[TensorKey, Record] = {}
        self.exact = index(runs.replay.exact) if runs.replay is not None else none
        self.candidate_records = index(runs.candidate)
        self._facts: dict[tuple[int, int], ModelFacts] = {}

    def cases(
        self, place: Place, standing: SiteStatus, judged: ReplayResult | None
    ) -> list[tuple[Case, str]]:
        site = self.sites[place]
        standing = self._with_values(site, standing)
        cases: list[tuple[Case, str]] = []
        # The tensor passed to a part is tried first: it is the sharper picture.
        handed = self._handed(place, standing)
        # If replay saw that the error appears in an output, what was passed to parts comes last: an
        # attention that returns its weights shows it in both.
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
        if handed is not None and made_after:
            cases.append(handed)
        return cases

    def _with_values(self, site: Site, standing: SiteStatus) -> SiteStatus:
        """How it stands at a call whose values were kept; later steps may be summaries."""
        if self._has_values(standing.call):
            return standing
        valued = [call for call in site.calls if self._has_values(call)]
        if not valued:
            return standing
        return standing._replace(call=max(valued, key=lambda call: call.error))

    def _has_values(self, call: Call) -> bool:
        pairs = (self.pairs.get(row.key) for row in call.outs)
        return any(p is not None and p.reference.kept == p.candidate.kept == "full" for p in pairs)

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
        case = self.plain(row.key, owner.name, owner.class_name, noise)
        return None if case is None else (case, str(row.key))

    def plain(self, key: TensorKey, parent: str, class_name: str, noise: float) -> Case | None:
        """A case from reference and candidate alone, for a tensor that a site's own code made."""
        pair = self.pairs.get(key)
        values = None if pair is None else self._both(pair)
        if pair is None or values is None:
            return None
        r, c = values
        dtype = DTYPES[pair.candidate.dtype]
        case = Case(r, c, noise, dtype.unit_roundoff, dtype.name, parent, class_name)
        if _is_changed(pair):
            return case
        return replace(
            case,
            inputs=self._made_before(pair.candidate, parent),
            pads=self._pads(pair.candidate, c.shape),
            parts=self._parts(pair.candidate, parent),
            past=self._past(pair.candidate, parent),
            right_parts=self._parts(pair.candidate, parent, of_reference=True),
            spread=self._spread(pair.candidate, parent),
            codes=self._codes(pair.candidate, parent),
            flags=self._flags(pair.candidate),
            calls=self._visits(pair.candidate, parent),
            earlier=self._earlier(pair.candidate),
            port=pair.candidate.key.port,
        )

    def _past(self, record: Record, parent: str) -> dict[str, F64]:
        """What a container's parts gave in earlier steps: keys and values that a cache holds."""
        earlier: dict[str, list[F64]] = {}
        key = record.key
        for other in self.runs.candidate.records:
            of = other.key
            if of.step >= key.step or (of.rank, of.process) != (key.rank, key.process):
                continue
            made = of.port == "output" and self._is_part(of.site, parent)
            if len(other.shape) < 2 or not (made or (of.port == "input" and of.site == parent)):
                continue
            tensors = earlier.setdefault(_part_name(of) if made else of.slot, [])
            values = read_whole(self.runs.candidate, other)
            if values is not None and len(tensors) < _MOST_STEPS:
                tensors.append(values)
        joined: dict[str, F64] = {}
        for name, tensors in earlier.items():
            axis = 1 if tensors and tensors[0].ndim == 3 else -2
            shapes = {(*x.shape[:axis], *x.shape[axis:][1:]) for x in tensors}
            if len(shapes) == 1:
                joined[name] = np.concatenate(tensors, axis=axis)
        return joined

    @cached_property
    def _called(self) -> frozenset[str]:
        """Modules of the candidate that gave anything; a list or dictionary of modules does not."""
        records = self.runs.candidate.records
        return frozenset(record.key.site for record in records if record.key.port == "output")

    def _is_part(self, site: str, parent: str) -> bool:
        """Whether a module is called by another one's own code, and not by a part of it."""
        callers = (outer for outer in ancestors(site) if outer == parent or outer in self._called)
        return site != parent and next(callers, "") == parent

    def _parts(self, record: Record, parent: str, *, of_reference: bool = False) -> dict[str, F64]:
        """Inputs of a container, and what its parts had made before a tensor was passed on.

        Args:
            record: The candidate's tensor.
            parent: The container.
            of_reference: The reference's, under the candidate's names.
        """
        tensors: dict[str, F64] = {}
        entering, _, made = self._around(record, parent)
        for other in entering:
            values = self._value(other, of_reference=of_reference)
            if values is not None:
                tensors[other.key.slot] = values
        for other in made:
            values = self._value(other, of_reference=of_reference)
            if values is not None:
                tensors[_part_name(other.key)] = values
        return tensors

    def _spread(self, record: Record, parent: str) -> dict[str, F64]:
        """What parts gave that were handed some rows of a container's input, at these rows."""
        rows, width = math.prod(record.shape[:-1]), record.shape[-1] if record.shape else 0
        entering, handed, made = self._around(record, parent)
        places: dict[bytes, int] = {}
        for other in entering:
            values = read_whole(self.runs.candidate, other)
            if values is not None and values.ndim and values.size == rows * values.shape[-1]:
                flat = values.reshape(rows, -1)
                places = {row.tobytes(): number for number, row in enumerate(flat)}
                break
        spread: dict[str, F64] = {}
        for other in made:
            entered = handed.get(other.key.site)
            if entered is None or len(other.shape) != 2 or other.shape[1] != width:
                continue
            values, x = (read_whole(self.runs.candidate, kept) for kept in (other, entered))
            if values is None or x is None or x.ndim != 2 or len(values) != len(x):
                continue
            rows_of = [places.get(row.tobytes(), -1) for row in x]
            if min(rows_of) >= 0:
                tensor = np.zeros((rows, width))
                np.add.at(tensor, rows_of, values)
                spread[other.key.site] = tensor.reshape(record.shape)
        return spread

    def _around(
        self, record: Record, parent: str
    ) -> tuple[list[Record], dict[str, Record], list[Record]]:
        """A container's inputs, what its parts were given first, and what they gave."""
        entering: list[Record] = []
        handed: dict[str, Record] = {}
        made: list[Record] = []
        for other in self.runs.candidate.records:
            of = other.key
            if (of.step, of.rank) != (record.key.step, record.key.rank):
                continue
            if other.order >= record.order:
                continue
            if of.port == "input" and of.site == parent:
                entering.append(other)
            elif of.port in ("input", "output") and self._is_part(of.site, parent):
                if of.port == "output":
                    made.append(other)
                else:
                    handed.setdefault(of.site, other)
        # A model may have a hundred layers; what is passed on was made by the last of them.
        return entering, handed, made[-_MOST_PARTS:]

    def _case(
        self, key: TensorKey, site: Site, standing: SiteStatus, judged: ReplayResult | None
    ) -> Case | None:
        pair = self.pairs.get(key)
        if pair is None:
            return None
        record = pair.candidate
        values = self._both(pair)
        if values is None:
            return None
        right, c = values
        exact = self.exact.get(record.key)
        replayed = False
        # The exact replay is a better reference: it has the candidate's own input.
        if self.runs.replay is not None and exact is not None and judged is not None:
            again = read_whole(self.runs.replay.exact, exact)
            if again is not None and again.shape == c.shape:
                right, replayed = again, True
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
        case = Case(
            right,
            c,
            noise,
            unit,
            dtype.name,
            site.name,
            site.class_name,
            self._inputs(pair),
            self._params(pair),
            self._others(pair.reference),
            leaning=leaning,
        )
        if _is_changed(pair) and key.port != "param":
            # Its surroundings are stored in parts as well; a part explains nothing of the whole.
            return case
        return replace(
            case,
            before=self._before(record),
            ranks=self._ranks(record),
            repeats=self._repeats(record),
            pads=self._pads(record, c.shape),
            parts=self._parts(record, record.key.site),
            past=self._past(record, record.key.site),
            right_parts=self._parts(record, record.key.site, of_reference=True),
            spread=self._spread(record, record.key.site),
            codes=self._codes(record, record.key.site),
            flags=self._flags(record),
            calls=self._visits(record, record.key.site),
            earlier=self._earlier(record),
            port=record.key.port,
        )

    def _both(self, pair: Pair) -> tuple[F64, F64] | None:
        """Both sides of a pair as they were compared; None where they cannot be had.

        Shards and micro-batches are joined; a weight that another framework stores turned is turned
        back.
        Other recipes rearrange elements: detectors of permutations would see what alignment did.
        """
        if pair.candidate.key.port != "param" and not _is_assembled(pair):
            return None
        if not _is_changed(pair):
            r = read_whole(self.runs.reference, pair.reference)
            c = read_whole(self.runs.candidate, pair.candidate)
        else:
            try:
                values = open_recipes(self.runs.reference, self.runs.candidate, pair)
                r, c = values.decoded()
            except (DriftlineError, OSError, ValueError):
                return None
            recipe = pair.reference_recipe or pair.candidate_recipe
            shape = values.shape or (recipe.shape if recipe is not None else ())
            if math.prod(shape) == r.size == c.size:
                r, c = r.reshape(shape), c.reshape(shape)
        if r is None or c is None or r.shape != c.shape or r.ndim == 0:
            return None
        return r, c

    def _value(self, record: Record, *, of_reference: bool = False) -> F64 | None:
        """A tensor of the candidate, or its partner; one that lies in shards is gathered."""
        pair = self.by_candidate.get(record.key)
        if pair is not None and (of_reference or pair.candidate_recipe is not None):
            values = self._both(pair)
            if values is not None:
                return values[0 if of_reference else 1]
        return None if of_reference else read_whole(self.runs.candidate, record)

    def _inputs(self, output: Pair) -> dict[str, F64]:
        """What the candidate's site was given in this call: of a backward pass, its gradients.

        Inputs with a partner come as they were compared: shards are joined, and a node of a graph,
        which has outputs only, was given what other nodes made. Inputs without one are read as they
        are stored, unless the output itself was put together: a part explains nothing of the whole.
        """
        wanted = "input" if output.reference.key.port == "output" else "grad_output"
        tensors: dict[str, F64] = {}
        joined: set[TensorKey] = set()
        for key, pair in self.pairs.items():
            if key.port == wanted and key.same_call(output.reference.key):
                values = self._both(pair)
                if values is not None:
                    tensors[key.slot] = values[1]
                    joined.add(pair.candidate.key)
        if _is_changed(output):
            return tensors
        for other in self.runs.candidate.records:
            key = other.key
            if key.port == wanted and key.same_call(output.candidate.key) and key not in joined:
                values = read_whole(self.runs.candidate, other)
                if values is not None:
                    tensors.setdefault(key.slot, values)
        return tensors

    def _codes(self, record: Record, site: str) -> dict[str, Codes]:
        """Integer inputs of a candidate's site in this call: routes, positions, ends of edges."""
        codes: dict[str, Codes] = {}
        key = record.key._replace(site=site)
        for other in self.runs.candidate.records:
            of = other.key
            dtype = DTYPES.get(other.dtype)
            if of.port != "input" or not of.same_call(key) or dtype is None:
                continue
            # Booleans and narrow codes are masks and packed weights, not routes.
            if dtype.kind in ("int", "uint") and dtype.bits >= 8 and other.kept == "full":
                values = self.runs.candidate.raw(other)
                codes[of.slot] = np.asarray(values, dtype=np.int64).reshape(other.shape)
        return codes

    def _flags(self, record: Record) -> dict[str, Codes]:
        """Booleans and lengths that any module was given in the same step, by slot."""
        flags: dict[str, Codes] = {}
        for other in self.runs.candidate.records:
            of, dtype = other.key, DTYPES.get(other.dtype)
            here = (of.step, of.rank, of.port) == (record.key.step, record.key.rank, "input")
            if not here or dtype is None or other.kept != "full" or len(flags) == _MOST_FLAGS:
                continue
            if dtype.kind not in ("int", "uint", "bool") or len(other.shape) not in (1, 2):
                continue
            if of.slot in flags or not 0 < math.prod(other.shape) <= _MOST_IN_FLAGS:
                continue
            values = np.asarray(self.runs.candidate.raw(other)).reshape(other.shape)
            # Two axes of many numbers are words, and not what marks them.
            if values.ndim == 1 or len(np.unique(values)) == 2:
                flags[of.slot] = values.astype(np.int64)
        return flags

    def _earlier(self, record: Record) -> tuple[F64, F64] | None:
        """Both sides of the same tensor in the last call before this one."""
        key = record.key._replace(step=0, visit=0)
        calls = [
            other
            for other in self._calls_before(record)
            if other.key._replace(step=0, visit=0) == key
        ]
        pair = self.by_candidate.get(calls[-1].key) if calls else None
        return None if pair is None or pair.candidate.kept != "full" else self._both(pair)

    def _visits(self, record: Record, parent: str) -> dict[str, tuple[F64, F64]]:
        """Both sides of what was made in several calls of this step, by name, calls first.

        Of what an optimizer is given these are the gradients of its backward passes, and what it
        was given in the step before, which may not have been cleared.
        """
        key, made = record.key, dict[str, list[Pair]]()
        for other in self.runs.candidate.records:
            if other.key.rank != key.rank or other.order >= record.order:
                continue
            name = self._visit_name(key, other.key, parent)
            pair = self.by_candidate.get(other.key) if name else None
            if pair is not None and pair.candidate.kept == pair.reference.kept == "full":
                made.setdefault(name, []).append(pair)
        calls: dict[str, tuple[F64, F64]] = {}
        for name, pairs in made.items():
            if len({pair.candidate.shape for pair in pairs}) != 1 or len(pairs) > _MOST_STEPS:
                continue
            if len(pairs) * math.prod(pairs[0].candidate.shape) > _MOST_IN_CALLS:
                continue
            if len(pairs) == 1 and key.port != "optimizer_grad":
                continue
            sides = [values for pair in pairs if (values := self._both(pair)) is not None]
            if len(sides) == len(pairs):
                calls[name] = (np.stack([r for r, _ in sides]), np.stack([c for _, c in sides]))
        return calls

    def _visit_name(self, key: TensorKey, other: TensorKey, parent: str) -> str:
        """The name of the calls to which an earlier tensor belongs; empty if it is of no use."""
        if key.port != "optimizer_grad":
            is_part = other.port == "output" and other.step == key.step
            return _part_name(other) if is_part and self._is_part(other.site, parent) else ""
        if (other.site, other.slot) != (key.site, key.slot):
            return ""
        if other.port == "param_grad" and other.step == key.step:
            return "the backward pass"
        is_old = other.port == key.port and other.step == key.step - 1
        return "the step before, call" if is_old else ""

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
        return params or self._kernels(pair.reference.key)

    def _kernels(self, key: TensorKey) -> dict[str, F64]:
        """Small kernels of the reference from the facts of its run: few places do not give them."""
        process = key.rank, key.process
        if process not in self._facts:
            self._facts[process] = read_model_facts(self.runs.reference, *process)
        facts = self._facts[process]
        kernels: dict[str, F64] = {}
        for path, kept in facts.weights.items():
            if kept.site == key.site and len(kept.shape) > 2 and (x := kept.whole()) is not None:
                kernels[facts.tensors[path].name if path in facts.tensors else kept.name] = x
        return kernels

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
                # A container's own part is no other module that was taken for it.
                and not contains(record.key.site, key.site)
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
        earlier = [other for other in self._calls_before(record) if other.shape == record.shape]
        # The latest calls first, since stale values usually come from the call just before. What
        # was wrong at the time is no old value that stayed: it has the same fault.
        read = [self._if_right(other) for other in earlier[: -_EARLIER - 1 : -1]]
        return tuple(values for values in read if values is not None)

    def _calls_before(self, record: Record) -> list[Record]:
        """The same tensor in earlier calls of its site, in order of execution."""
        key = record.key
        return [
            other
            for other in self.runs.candidate.records
            if other.order < record.order
            and (other.key.site, other.key.port, other.key.slot) == (key.site, key.port, key.slot)
            and other.key.rank == key.rank
        ]

    def _if_right(self, record: Record) -> F64 | None:
        """A tensor of the candidate, if it is nearly what the reference has there."""
        pair = self.by_candidate.get(record.key)
        c = read_whole(self.runs.candidate, record)
        r = None if pair is None else read_whole(self.runs.reference, pair.reference)
        if c is None or r is None or r.shape != c.shape:
            return c
        with np.errstate(invalid="ignore"):
            apart, size = float(np.sum((c - r) ** 2)), float(np.sum(r * r))
        return c if apart <= _NEARLY**2 * size else None

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
                and "mask" in other.key.slot
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


def _part_name(key: TensorKey) -> str:
    """Of what a part gave: its site, and which of several results."""
    return key.site if key.slot == "0" else f"{key.site}:{key.slot}"


def _sub_noise(judged: ReplayResult) -> bool:
    """Whether the error in total is of the size of noise."""
    return judged.effect is not None and judged.effect.error <= 3.0 * judged.noise


def _error(metrics: Mapping[str, float]) -> float:
    value = float(metrics.get("relative_l2", math.nan))
    return math.inf if math.isnan(value) else value
