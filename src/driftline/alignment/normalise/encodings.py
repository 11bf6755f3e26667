"""Weights that are packed into words of 32 bits (GPTQ, AWQ): seen as the matrix they stand for.

Such a module has no `weight`. It has `qweight`, several codes to a word, `qzeros`, packed too,
`scales` for groups of inputs, and with GPTQ `g_idx`, the group of every input. What is seen in
their place is a `weight` as [out, in], with the recipe that makes it; which site it belongs to, and
what it is set against, the other rules say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from driftline.alignment.normalise.view import Gathered, Origin, SeenRun, aside_of, origins_of
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.errors import DriftlineError
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

CODES, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
_WORDS = ("int32", "uint32")
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's element k of every eight is in this nibble of its word."""

_Parts = dict[str, Record]


def seen_packed(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs with packed weights seen as matrices, unless both sides packed them alike."""
    ours, theirs = _modules(reference), _modules(candidate)
    alike = ours.keys() == theirs.keys() and all(
        # Codes of the same shape were packed by the same tool; they are compared as they
        # are stored.
        parts[CODES].shape == theirs[place][CODES].shape
        for place, parts in ours.items()
    )
    if alike:
        return reference, candidate  # codes are equal or not
    return _seen(reference, ours), _seen(candidate, theirs)


def _modules(run: Run) -> dict[TensorKey, _Parts]:
    """The parts of each packed weight, by the key that it would have."""
    found: dict[TensorKey, _Parts] = {}
    for record in run.records:
        if (name := _name(record.key)) in (CODES, ZEROS, SCALES, GROUPS):
            found.setdefault(_renamed(record.key, name), {}).setdefault(name, record)
    return {key: parts for key, parts in found.items() if {CODES, SCALES} <= parts.keys()}


def _name(key: TensorKey) -> str:
    """What a tensor is called: its slot as a parameter, the end of its name in a file."""
    return key.slot if key.port == "param" else key.site.rpartition(".")[2]


def _renamed(key: TensorKey, name: str) -> TensorKey:
    if key.port == "param":
        return key.with_slot("weight")
    return key._replace(site=key.site.removesuffix(name) + "weight")


def _seen(run: Run, modules: Mapping[TensorKey, _Parts]) -> Run:
    origins: dict[TensorKey, Origin] = dict(origins_of(run))
    whole = run.whole if isinstance(run, SeenRun) else run
    instead: dict[int, Record | None] = {}
    for key, parts in modules.items():
        # Parts that are themselves gathered from ranks have no stored record to unpack.
        real = {name: origins.get(part.key, part) for name, part in parts.items()}
        stored = {name: part for name, part in real.items() if isinstance(part, Record)}
        recipe = _recipe(whole, stored) if len(stored) == len(real) else None
        if recipe is None:
            continue
        codes = parts[CODES]
        shown = codes._replace(
            # float16 is what both tools compute with; the digest and summary of the
            # codes say nothing of it.
            key=key,
            dtype="float16",
            shape=recipe.shape,
            digest="",
            blob=None,
            summary=None,
        )
        origins[key] = Gathered(recipe)
        # The codes' record is replaced in place, which keeps the order of execution; the
        # others go.
        instead |= {id(part): None for part in parts.values()}
        instead[id(codes)] = shown
    if not instead:
        return run
    records = [new for r in run.records if (new := instead.get(id(r), r)) is not None]
    return SeenRun(whole, records, origins, aside_of(run))


def _recipe(run: Run, parts: _Parts) -> Recipe | None:
    """What makes [out, in] of the parts; None where their shapes fit none of the layouts."""
    codes, scales = parts[CODES], parts[SCALES]
    shapes = [part.shape for part in parts.values() if part is not parts.get(GROUPS)]
    if codes.dtype not in _WORDS or any(len(shape) != 2 or 0 in shape for shape in shapes):
        return None
    groups, wide = scales.shape
    zeros = parts.get(ZEROS)
    # Without zero points nothing says how wide a code is: four bits is what both tools write.
    per_word = wide // zeros.shape[1] if zeros is not None else 8
    if per_word not in (4, 8) or (zeros is not None and zeros.shape != (groups, wide // per_word)):
        return None
    order = tuple(range(per_word))
    minus = 0.0
    # GPTQ and AWQ differ in which axis is packed, which the shapes tell.
    if codes.shape[1] == wide:  # GPTQ: several inputs in a word
        deep = codes.shape[0] * per_word
        values = Recipe((codes,), (Step("unpack", 0, numbers=order),), (deep, wide))
        minus = _off_by(run, zeros, per_word)
    elif codes.shape[1] * 8 == wide and per_word == 8:  # AWQ: several outputs in a word
        order, deep = _AWQ, codes.shape[0]
        values = Recipe((codes,), (Step("unpack", 1, numbers=order),), (deep, wide))
    else:
        return None
    spread = _spread(run, parts.get(GROUPS), deep, groups)
    if spread is None:
        return None
    # Scales are spread over the inputs only where groups are not contiguous.
    rows = (deep if spread else groups, wide)
    scale: Source = Recipe((scales,), spread, rows) if spread else scales
    sources: list[Source] = [values, scale]
    if zeros is not None:
        sources.append(Recipe((zeros,), (Step("unpack", 1, numbers=order), *spread), rows))
    else:
        # Symmetric codes without zero points are centred on the middle of their range.
        minus = float(1 << (32 // per_word - 1))
    steps = (Step("dequantise", 0, zero=minus), Step("transpose", numbers=(1, 0)))
    return Recipe(tuple(sources), steps, (wide, deep))


def _off_by(run: Run, zeros: Record | None, per_word: int) -> float:
    """GPTQ's files hold a zero point less one, but for its second version, which is rare.

    What tells it is a symmetric one in the middle, which then is not one below.
    """
    if zeros is None:
        return 0.0
    words = _numbers(run, zeros)
    if words is None:
        return 1.0
    bits = 32 // per_word
    # Every code of a word at the middle of its range.
    middle = sum((1 << (bits - 1)) << (bits * at) for at in range(per_word))
    return 0.0 if (words.astype(np.uint32) == np.uint32(middle)).all() else 1.0


def _spread(run: Run, groups: Record | None, deep: int, count: int) -> tuple[Step, ...] | None:
    """Nothing where groups lie one after the other; else which one every input is of."""
    if deep % count and groups is None:
        return None
    if groups is None:
        return ()
    numbers = _numbers(run, groups)
    # Numbers of groups come from a file: one out of range would read beside the scales.
    if numbers is None or numbers.size != deep or not 0 <= numbers.min() <= numbers.max() < count:
        return () if deep % count == 0 else None
    # Group numbers that only count upwards say what the shape says already.
    if deep % count == 0 and (numbers == np.arange(deep) // (deep // count)).all():
        return ()
    return (Step("select", 0, numbers=tuple(int(number) for number in numbers)),)


def _numbers(run: Run, record: Record) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    try:
        values = run.raw(record).reshape(-1).astype(np.int64)
    except (DriftlineError, OSError, ValueError):
        return None  # comparing it will say why
    return values if values.size == math.prod(record.shape) else None
