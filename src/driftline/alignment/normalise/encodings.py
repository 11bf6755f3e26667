"""Show integers as the numbers they represent: values of quantised graphs, and packed weights.

A quantised graph gives the scale and zero point of each tensor of integers (`decode_integers`).

The other functions handle weights that are packed into words of 32 bits (GPTQ, AWQ). Such a module
has no `weight`. It has `qweight`, with several codes in a word; `qzeros`, packed as well; `scales`
for groups of inputs; and with GPTQ `g_idx`, the group of every input. The view replaces them by one
`weight` of shape [out, in], with the recipe that computes it. The matching rules decide with which
tensor it is paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from driftline.alignment.normalise.view import (
    AlignedView,
    Gathered,
    Origin,
    excluded_of,
    origins_of,
)
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.errors import DriftlineError
from driftline.graphs.sources.exported import exported_graph
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

CODES, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
_WORDS = ("int32", "uint32")
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in its word of each of the eight codes, as AWQ's kernels interleave them."""

_Parts = dict[str, Record]


def unpack_weights(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs with packed weights as matrices, unless both sides are packed in the same way."""
    reference_modules, candidate_modules = _modules(reference), _modules(candidate)
    alike = reference_modules.keys() == candidate_modules.keys() and all(
        # Codes of the same shape were packed by the same tool; they are compared as stored.
        parts[CODES].shape == candidate_modules[place][CODES].shape
        for place, parts in reference_modules.items()
    )
    if alike:
        return reference, candidate  # codes are equal or not
    return _seen(reference, reference_modules), _seen(candidate, candidate_modules)


def decode_integers(run: Run) -> Run:
    """A run of a quantised graph, with its integers as the numbers they represent."""
    graph = exported_graph(run)
    if graph is None or not graph.integers:
        return run
    origins: dict[TensorKey, Origin] = dict(origins_of(run))
    records: list[Record] = []
    for record in run.records:
        key = record.key
        meaning = graph.integers.get((key.site, key.visit, key.port, key.slot))
        stored = origins.get(key, record)
        # A scale of 0 is a damaged entry.
        if meaning is None or not meaning[0] or not isinstance(stored, Record):
            records.append(record)
            continue
        scale, zero = meaning
        step = Step("dequantise", factor=scale, zero=zero)
        origins[key] = Gathered(Recipe((stored,), (step,), record.shape))
        # Equal integers with the same scale are equal numbers, so rules can still compare bytes.
        digest = record.digest and f"{record.digest} times {scale} minus {zero}"
        records.append(record._replace(dtype="float32", digest=digest, blob=None, summary=None))
    base = run.base if isinstance(run, AlignedView) else run
    return AlignedView(base, records, origins, excluded_of(run))


WRAPPED = ".qdata"
"""Suffix of the slot that holds the integers of a weight quantised by torchao."""


def decode_wrapped(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs with weights of a tensor subclass (torchao) as the matrices that they represent.

    If both sides hold the same weights in that form, integers are compared as stored.
    """
    wrapped = [
        {r.key: r.shape for r in run.records if r.key.slot.endswith(WRAPPED)}
        for run in (reference, candidate)
    ]
    if wrapped[0] == wrapped[1]:
        return reference, candidate
    return _unwrapped(reference), _unwrapped(candidate)


def _unwrapped(run: Run) -> Run:
    origins: dict[TensorKey, Origin] = dict(origins_of(run))
    by_key = {record.key: record for record in run.records}
    replacements: dict[int, Record | None] = {}
    for codes in run.records:
        name = codes.key.slot.removesuffix(WRAPPED)
        scale = by_key.get(codes.key.with_slot(f"{name}.scale"))
        if name == codes.key.slot or scale is None or not _broadcasts(scale.shape, codes.shape):
            continue
        zero = by_key.get(codes.key.with_slot(f"{name}.zero_point"))
        parts = [codes, scale, *([zero] if zero is not None else [])]
        stored = [origins.get(part.key, part) for part in parts]
        if not all(isinstance(part, Record) for part in stored):
            continue
        sources = tuple(part for part in stored if isinstance(part, Record))
        key = codes.key.with_slot(name)
        origins[key] = Gathered(Recipe(sources, (Step("dequantise", 0),), codes.shape))
        replacements |= {id(part): None for part in parts}
        replacements[id(codes)] = codes._replace(
            key=key, dtype="float32", digest="", blob=None, summary=None
        )
    records = [new for r in run.records if (new := replacements.get(id(r), r)) is not None]
    base = run.base if isinstance(run, AlignedView) else run
    return AlignedView(base, records, origins, excluded_of(run)) if replacements else run


def _broadcasts(scale: tuple[int, ...], codes: tuple[int, ...]) -> bool:
    """Whether every scale belongs to a block of the codes."""
    return len(scale) == len(codes) and all(
        size and length % size == 0 for size, length in zip(scale, codes, strict=True)
    )


def _modules(run: Run) -> dict[TensorKey, _Parts]:
    """The parts of each packed weight, by the key of the matrix that they represent."""
    modules: dict[TensorKey, _Parts] = {}
    for record in run.records:
        if (name := _name(record.key)) in (CODES, ZEROS, SCALES, GROUPS):
            modules.setdefault(_renamed(record.key, name), {}).setdefault(name, record)
    return {key: parts for key, parts in modules.items() if {CODES, SCALES} <= parts.keys()}


def _name(key: TensorKey) -> str:
    """Name of a tensor: the slot of a parameter, or the last word of a name in a file."""
    return key.slot if key.port == "param" else key.site.rpartition(".")[2]


def _renamed(key: TensorKey, name: str) -> TensorKey:
    if key.port == "param":
        return key.with_slot("weight")
    return key._replace(site=key.site.removesuffix(name) + "weight")


def _seen(run: Run, modules: Mapping[TensorKey, _Parts]) -> Run:
    origins: dict[TensorKey, Origin] = dict(origins_of(run))
    base = run.base if isinstance(run, AlignedView) else run
    replacements: dict[int, Record | None] = {}
    for key, parts in modules.items():
        # Parts that are themselves gathered from ranks have no stored record to unpack.
        real = {name: origins.get(part.key, part) for name, part in parts.items()}
        stored = {name: part for name, part in real.items() if isinstance(part, Record)}
        recipe = _recipe(base, stored) if len(stored) == len(real) else None
        if recipe is None:
            continue
        codes = parts[CODES]
        unpacked = codes._replace(
            # Both tools compute with float16; digest and summary of the codes do not apply to it.
            key=key,
            dtype="float16",
            shape=recipe.shape,
            digest="",
            blob=None,
            summary=None,
        )
        origins[key] = Gathered(recipe)
        # The record of the codes is replaced in place, which keeps the execution order; the others
        # are removed.
        replacements |= {id(part): None for part in parts.values()}
        replacements[id(codes)] = unpacked
    if not replacements:
        return run
    records = [new for r in run.records if (new := replacements.get(id(r), r)) is not None]
    return AlignedView(base, records, origins, excluded_of(run))


def _recipe(run: Run, parts: _Parts) -> Recipe | None:
    """The recipe that computes [out, in] from the parts; None if their shapes fit no layout."""
    codes, scales = parts[CODES], parts[SCALES]
    shapes = [part.shape for part in parts.values() if part is not parts.get(GROUPS)]
    if codes.dtype not in _WORDS or any(len(shape) != 2 or 0 in shape for shape in shapes):
        return None
    groups, outputs = scales.shape
    zeros = parts.get(ZEROS)
    # Without zero points, nothing gives the width of a code; both tools write four bits.
    per_word = outputs // zeros.shape[1] if zeros is not None else 8
    if per_word not in (4, 8) or (
        zeros is not None and zeros.shape != (groups, outputs // per_word)
    ):
        return None
    order = tuple(range(per_word))
    minus = 0.0
    # GPTQ and AWQ pack different axes, which the shapes show.
    if codes.shape[1] == outputs:  # GPTQ: several inputs in a word
        inputs = codes.shape[0] * per_word
        values = Recipe((codes,), (Step("unpack", 0, numbers=order),), (inputs, outputs))
        minus = _off_by(run, zeros, per_word)
    elif codes.shape[1] * 8 == outputs and per_word == 8:  # AWQ: several outputs in a word
        order, inputs = _AWQ, codes.shape[0]
        values = Recipe((codes,), (Step("unpack", 1, numbers=order),), (inputs, outputs))
    else:
        return None
    spread = _spread(run, parts.get(GROUPS), inputs, groups)
    if spread is None:
        return None
    # Scales are spread over the inputs only if groups are not contiguous.
    rows = (inputs if spread else groups, outputs)
    scale: Source = Recipe((scales,), spread, rows) if spread else scales
    sources: list[Source] = [values, scale]
    if zeros is not None:
        sources.append(Recipe((zeros,), (Step("unpack", 1, numbers=order), *spread), rows))
    else:
        # Symmetric codes without zero points are centred on the middle of their range.
        minus = float(1 << (32 // per_word - 1))
    steps = (Step("dequantise", 0, zero=minus), Step("transpose", numbers=(1, 0)))
    return Recipe(tuple(sources), steps, (outputs, inputs))


def _off_by(run: Run, zeros: Record | None, per_word: int) -> float:
    """Number that is missing from the stored zero points: 1 for GPTQ, 0 for its rare version 2.

    Symmetric zero points distinguish the two: in version 2 they are exactly the middle code.
    """
    if zeros is None:
        return 0.0
    words = _numbers(run, zeros)
    if words is None:
        return 1.0
    bits = 32 // per_word
    # Every code of a word is the middle of its range.
    middle = sum((1 << (bits - 1)) << (bits * position) for position in range(per_word))
    return 0.0 if (words.astype(np.uint32) == np.uint32(middle)).all() else 1.0


def _spread(run: Run, groups: Record | None, inputs: int, count: int) -> tuple[Step, ...] | None:
    """The step that gives every input the scale of its group; no step if groups are contiguous."""
    if inputs % count and groups is None:
        return None
    if groups is None:
        return ()
    numbers = _numbers(run, groups)
    # Numbers of groups come from a file; one out of range would read beyond the scales.
    if numbers is None or numbers.size != inputs or not 0 <= numbers.min() <= numbers.max() < count:
        return () if inputs % count == 0 else None
    # Group numbers that only count upwards add nothing to the shape.
    if inputs % count == 0 and (numbers == np.arange(inputs) // (inputs // count)).all():
        return ()
    return (Step("select", 0, numbers=tuple(int(number) for number in numbers)),)


def _numbers(run: Run, record: Record) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    try:
        values = run.raw(record).reshape(-1).astype(np.int64)
    except (DriftlineError, OSError, ValueError):
        return None  # comparing the tensor will report the reason
    return values if values.size == math.prod(record.shape) else None
