"""The cause of an error at a site where the two models differ: named, and proven if possible.

A proof computes the site again on the candidate's own inputs with the reference's value. Which
function a module computes is not known, so some are tried: a norm, a rotation, a sum of its parts,
a product. A function counts only if it reproduces the reference's output from the reference's own
inputs. Small weights come from the facts of the run, larger ones from captured parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from driftline.comparison.differences.difference import Difference
from driftline.comparison.differences.find import placed
from driftline.comparison.evidence.error_stats import read_whole
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.comparison.verdict.sites import ROOTS
from driftline.diagnosis.causes.case import F64
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.causes.named_cause import NamedCause
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.sidecars.model_facts import ModelFacts, read_model_facts, tensor_path

# How much smaller the error must become for a difference to be its cause.
_FALL = 4.0
# A function reproduces the reference if it is this near, in units of its number format.
_UNITS = 32.0
_MOST_PARTS = 8
_MOST_ELEMENTS = 1 << 24


def by_difference(
    naming: NamedCause, runs: Runs | None, table: Table, row: Row, site: str
) -> NamedCause:
    """The cause at a guilty site, with what differs between the models there.

    Args:
        naming: What the detectors concluded from the tensors alone.
        runs: The two runs.
        table: The comparison, with the differences of the models.
        row: The row that is off: of the site, or of a part that its code passes something to.
        site: The guilty site.
    """
    if runs is None or not table.differences:
        return naming
    near = [
        difference
        for difference in placed(table.differences, table, row, site)
        if difference.counts and difference.position == "at"
    ]
    if not near:
        return naming
    proof = _proof(near, runs, row)
    if proof is not None:
        difference, before, after = proof
        sentence = (
            f"{_sentence(difference)}; recomputed with the reference's value the error at this "
            f"site falls from {before:.2g} to {after:.2g}"
        )
        score = 1.0 - min(1.0, (after / before) ** 2)
        cause = naming.cause if naming.cause != "unknown" else _cause(difference, proven=True)
        return naming._replace(cause=cause, sentence=sentence, score=score, detail="difference")
    texts = "; ".join(_sentence(difference) for difference in near[:2])
    if naming.cause == "unknown":
        explains = near[0].explains
        reason = f"{texts}; {explains} (not recomputed)" if explains else texts
        return naming._replace(cause=_cause(near[0]), sentence=reason, detail="difference")
    return naming._replace(sentence=f"{naming.sentence}; and the models differ there: {texts}")


def _cause(difference: Difference, *, proven: bool = False) -> str:
    """The kind of bug that a difference is."""
    if difference.kind in ("parameter", "buffer"):
        if difference.relation.startswith(("rounded", "dtype")):
            return "low-precision"
        # A vector that was proven to be what is missing is added to every row.
        lone = difference.relation in ("missing", "extra")
        return "offset" if proven and lone else "weights"
    if difference.kind == "attribute" and proven:
        # What was recomputed with another number is a factor, or a norm's epsilon.
        return "scale"
    return "setting" if difference.kind in ("attribute", "function", "mode", "hook") else "code"


def _sentence(difference: Difference) -> str:
    """What differs, as a clause: `norm`: attribute `eps` is 1e-05 in the candidate, ..."""
    site = difference.site or "(root)"
    what = {"mode": "mode"}.get(difference.kind, difference.kind)
    # A module's class has no name of its own, only the ranks or steps that have another.
    own = difference.name
    name = f" `{own}`" if own and not own.startswith("(") else f" {own}".rstrip()
    relation = difference.relation
    if difference.kind == "code":
        return f"`{site}`: the code of {difference.name} changed at {difference.source}"
    if difference.reference == difference.candidate:
        far = f", {difference.distance:.2g} apart" if difference.distance is not None else ""
        words = f"values {relation}" if relation.startswith("rounded") else f"{relation} values"
        return f"`{site}`: {what}{name} has {words}{far}"
    values = f"{difference.candidate} in the candidate, {difference.reference} in the reference"
    if difference.kind == "hook":
        return f"`{site}`: its hooks are {values}"
    more = f", {relation}" if relation in ("unrelated", "different", "permuted") else ""
    return f"`{site}`: {what}{name} is {values}{more}"


# Proofs.


class _Call(NamedTuple):
    """One call of a site in one run.

    Attributes:
        inputs: Floating tensors that it was given, by slot.
        codes: Integers that it was given.
        parts: What its parts returned, by their names.
        output: What it returned.
        unit: Unit roundoff of its output's format.
    """

    inputs: Mapping[str, F64]
    codes: Mapping[str, F64]
    parts: Mapping[str, F64]
    output: F64
    unit: float


class _Values(NamedTuple):
    """Settings and small weights of a module."""

    attributes: Mapping[str, Any]
    tensors: Mapping[str, F64]
    training: bool

    def number(self, word: str) -> float | None:
        """The first number among the attributes whose name holds a word."""
        for name, value in self.attributes.items():
            if word in name.lower() and type(value) in (int, float):
                return float(value)
        return None


Function = Callable[[_Call, _Values], "F64 | None"]


def _proof(
    near: Sequence[Difference], runs: Runs, row: Row
) -> tuple[Difference, float, float] | None:
    """The first difference that explains the error, and the error before and after."""
    if row.port != "output":
        return None
    pair = next((pair for pair in runs.plan.pairs if pair.reference.key == row.key), None)
    if pair is None or pair.reference_recipe is not None or pair.candidate_recipe is not None:
        return None
    first = _call(runs.reference, pair.reference)
    second = _call(runs.candidate, pair.candidate)
    if first is None or second is None or first.output.shape != second.output.shape:
        return None
    facts = [
        read_model_facts(run, record.key.rank, record.key.process)
        for run, record in ((runs.reference, pair.reference), (runs.candidate, pair.candidate))
    ]
    right = _values(facts[0], runs.reference, pair.reference.key)
    wrong = _values(facts[1], runs.candidate, pair.candidate.key)
    before = _error(second.output, first.output)
    if not math.isfinite(before) or before == 0.0:
        return None
    for difference in near:
        after = _best(first, second, right, wrong, difference)
        if after is not None and after * _FALL <= before:
            return difference, before, after
    return None


def _best(
    first: _Call, second: _Call, right: _Values, wrong: _Values, difference: Difference
) -> float | None:
    """The error of the site with the reference's value of one difference; None if not known."""
    if difference.site and difference.kind in ("attribute", "mode", "parameter", "buffer"):
        mixed = _with_reference(wrong, right, difference)
        for function in _FUNCTIONS:
            with np.errstate(all="ignore"):
                check = function(first, right)
                if check is None or check.shape != first.output.shape:
                    continue
                # The function is the module's only if it gives what the module gave.
                if not _error(check, first.output) <= _UNITS * max(first.unit, 1e-9):
                    continue
                fixed = function(second, mixed)
            if fixed is not None and fixed.shape == first.output.shape:
                return _error(fixed, first.output)
    if difference.kind == "attribute":
        return _with_factor(first, second, right.attributes.get(difference.name))
    if difference.kind == "parameter" and difference.name in right.tensors:
        return _with_term(first, second, right.tensors[difference.name], wrong, difference)
    return None


def _with_reference(wrong: _Values, right: _Values, difference: Difference) -> _Values:
    """The candidate's values, but for the one that differs."""
    name = difference.name
    if difference.kind == "mode":
        return wrong._replace(training=right.training)
    if difference.kind == "attribute":
        attributes = {**wrong.attributes, name: right.attributes.get(name)}
        return wrong._replace(attributes=attributes)
    if name in right.tensors:
        return wrong._replace(tensors={**wrong.tensors, name: right.tensors[name]})
    return wrong


def _with_factor(first: _Call, second: _Call, factor: Any) -> float | None:
    """The error if a setting that multiplies a tensor had the reference's value.

    One tensor plus the setting times another, or the product alone: adapters, residual scales,
    scaled embeddings. Which tensors they are, the reference's own call tells.
    """
    if type(factor) not in (int, float):
        return None
    sources = [{**call.parts, **call.inputs} for call in (first, second)]
    names = [
        name
        for name, tensor in sources[0].items()
        if tensor.shape == first.output.shape and name in sources[1]
    ][:_MOST_PARTS]
    added: list[str | None] = [None, *names]
    for plain, scaled in itertools.product(added, names):
        made = [
            factor * source[scaled] + (source[plain] if plain is not None else 0.0)
            for source in sources
        ]
        if plain != scaled and _error(made[0], first.output) <= _UNITS * first.unit:
            return _error(made[1], first.output)
    return None


def _with_term(
    first: _Call, second: _Call, term: F64, wrong: _Values, difference: Difference
) -> float | None:
    """The error if a vector that is added to every row had the reference's value."""
    missing = term - wrong.tensors.get(difference.name, np.zeros_like(term))
    shape = first.output.shape
    if term.ndim != 1 or not shape:
        return None
    errors: list[float] = []
    if shape[-1] == term.size:
        errors.append(_error(second.output + missing, first.output))
    if len(shape) > 2 and shape[1] == term.size:
        channels = missing.reshape(-1, *([1] * (len(shape) - 2)))
        errors.append(_error(second.output + channels, first.output))
    return min(errors, default=None)


def _call(run: Run, record: Record) -> _Call | None:
    output = read_whole(run, record, _MOST_ELEMENTS)
    if output is None or not output.ndim:
        return None
    inputs: dict[str, F64] = {}
    codes: dict[str, F64] = {}
    parts: dict[str, F64] = {}
    key = record.key
    for other in run.records:
        of = other.key
        if (of.step, of.rank, of.process) != (key.step, key.rank, key.process):
            continue
        own = of.site == key.site and of.visit == key.visit and of.port == "input"
        outer = of.site.rpartition(".")[0]
        is_inside = outer == key.site or (not outer and key.site in ROOTS and of.site not in ROOTS)
        below = of.port == "output" and is_inside
        if (own and of.moment == "before") or (below and other.order < record.order):
            values = read_whole(run, other, _MOST_ELEMENTS)
            if values is None:
                continue
            if below:
                # Without the name of the site, which may be another one on the other side.
                parts[f".{of.site.rpartition('.')[2]}"] = values
            elif DTYPES[other.dtype].is_floating:
                inputs[of.slot] = values
            else:
                codes[of.slot] = values
    return _Call(inputs, codes, parts, output, DTYPES[record.dtype].unit_roundoff)


def _values(facts: ModelFacts, run: Run, key: TensorKey) -> _Values:
    module = facts.modules.get(key.site)
    tensors: dict[str, F64] = {}
    for tensor in facts.tensors.values():
        if tensor.site == key.site:
            kept = facts.weights.get(tensor.tied or tensor_path(tensor.site, tensor.name))
            values = None if kept is None else kept.whole()
            if values is None:
                values = _captured(run, key, tensor.name)
            if values is not None:
                tensors[tensor.name] = values
    attributes: Mapping[str, Any] = {} if module is None else module.attributes
    return _Values(attributes, tensors, bool(module is not None and module.training))


def _captured(run: Run, key: TensorKey, name: str) -> F64 | None:
    for record in run.records:
        of = record.key
        if of.port == "param" and of.site == key.site and of.slot == name and of.rank == key.rank:
            return read_whole(run, record, _MOST_ELEMENTS)
    return None


def _error(values: F64, reference: F64) -> float:
    size = float(np.sqrt(np.sum(reference * reference)))
    apart = float(np.sqrt(np.sum((values - reference) ** 2)))
    return apart / size if size > 0.0 else math.inf


# Functions that modules compute. Each gives None where it does not apply.


def _one_input(call: _Call) -> F64 | None:
    same = [values for values in call.inputs.values() if values.shape == call.output.shape]
    return same[0] if len(same) >= 1 else None


def _affine(values: F64, tensors: Mapping[str, F64], axis: int) -> F64:
    shape = [1] * values.ndim
    shape[axis] = values.shape[axis]
    size = values.shape[axis]
    for name, act in (("weight", np.multiply), ("bias", np.add)):
        tensor = tensors.get(name)
        if tensor is not None and tensor.size == size:
            values = act(values, tensor.reshape(shape))
    return values


def _layer_norm(call: _Call, values: _Values) -> F64 | None:
    x, eps = _one_input(call), values.number("eps")
    if x is None or eps is None:
        return None
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return _affine((x - mean) / np.sqrt(variance + eps), values.tensors, -1)


def _rms_norm(call: _Call, values: _Values) -> F64 | None:
    x, eps = _one_input(call), values.number("eps")
    if x is None or eps is None:
        return None
    return _affine(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps), values.tensors, -1)


def _batch_norm(call: _Call, values: _Values) -> F64 | None:
    x, eps = _one_input(call), values.number("eps")
    if x is None or eps is None or x.ndim < 2:
        return None
    axes = (0, *range(2, x.ndim))
    shape = [1, -1, *([1] * (x.ndim - 2))]
    mean, variance = values.tensors.get("running_mean"), values.tensors.get("running_var")
    if values.training or mean is None or variance is None:
        mean, variance = x.mean(axes), x.var(axes)
    if mean.size != x.shape[1]:
        return None
    normal = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + eps)
    return _affine(normal, values.tensors, 1)


def _rotation(turn: Callable[[F64], F64]) -> Function:
    def rotation(call: _Call, values: _Values) -> F64 | None:
        """Cosine or sine of positions times frequencies, in one half or in two equal halves."""
        for frequencies in values.tensors.values():
            if frequencies.ndim != 1 or not call.output.shape[-1]:
                continue
            copies, rest = divmod(call.output.shape[-1], max(frequencies.size, 1))
            if rest or copies not in (1, 2):
                continue
            for positions in _positions(call, copies * frequencies.size):
                angles = positions.reshape(-1, 1) * frequencies
                turned = turn(np.concatenate([angles] * copies, -1))
                count = math.prod(call.output.shape) // turned.size
                if count * turned.size == math.prod(call.output.shape):
                    return np.broadcast_to(
                        turned.reshape(call.output.shape)
                        if count == 1
                        else turned.reshape(1, *turned.shape),
                        call.output.shape,
                    ).copy()
        return None

    return rotation


def _positions(call: _Call, width: int) -> Iterator[F64]:
    rows = math.prod(call.output.shape) // max(width, 1)
    for codes in call.codes.values():
        if codes.size == rows or (codes.size and rows % codes.size == 0):
            yield codes
    if call.output.ndim >= 2:
        yield np.arange(call.output.shape[-2], dtype=np.float64)


def _identity(call: _Call, values: _Values) -> F64 | None:
    # A module in training mode may drop elements, so the identity is that of the other mode.
    return None if values.training else _one_input(call)


def _product(call: _Call, values: _Values) -> F64 | None:
    """A linear map whose weights are at hand."""
    weight = values.tensors.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    for x in call.inputs.values():
        if x.ndim and x.shape[-1] == weight.shape[1]:
            return _affine(x @ weight.T, {"bias": values.tensors.get("bias", np.zeros(0))}, -1)
    return None


_FUNCTIONS: tuple[Function, ...] = (
    _layer_norm,
    _rms_norm,
    _batch_norm,
    _rotation(np.cos),
    _rotation(np.sin),
    _product,
    _identity,
)
"""Tried in this order; each is checked against the reference's own call first."""
