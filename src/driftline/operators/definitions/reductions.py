"""Reductions over axes, sorting, counting, one-hot rows, and additions at indices."""

from __future__ import annotations

import numpy as np

from driftline.operators.definitions.call import (
    LARGEST,
    AnyArray,
    Call,
    Definition,
    Result,
    Unfit,
    bounded,
    fits,
    is_float,
    one_of,
    real,
)

_MAX, _MIN, _SUM = 1, 2, 3
_ADD, _ADD_VALID = 1, 2


def cumsum(call: Call) -> list[Result]:
    """Running sums along one axis."""
    x = call.at(0, "x")
    axes = call.wholes("axes")
    fits(len(axes) == 1, f"axes {axes} must be one axis")
    axis = one_of(axes[0], x.values.ndim, "axes")
    dtype = call.out_dtype(x.dtype)
    values = _running(x.values, axis, call)
    # Integers are added without rounding.
    if not is_float(x.dtype):
        return [Result(values, dtype, exact=True)]
    scale = np.sqrt(_running(x.values**2, axis, call))
    return [Result(values, dtype, x.values.shape[axis], scale)]


def _running(values: AnyArray, axis: int, call: Call) -> AnyArray:
    turned = np.flip(values, axis) if call.flag("reverse", False) else values
    sums = np.cumsum(turned, axis)
    # An exclusive sum leaves the element itself out.
    if call.flag("exclusive", False):
        sums = sums - turned
    return np.flip(sums, axis) if call.flag("reverse", False) else sums


def reduce(call: Call) -> list[Result]:
    """Maximum, minimum or sum over axes, which disappear."""
    x = call.at(0, "x")
    kind = call.whole("reduceType", 0)
    axes = tuple(sorted({one_of(axis, x.values.ndim) for axis in call.wholes("axis")}))
    dtype = call.out_dtype(x.dtype)
    if kind == _MAX:
        return [Result(x.values.max(axes), dtype, exact=True)]
    if kind == _MIN:
        return [Result(x.values.min(axes), dtype, exact=True)]
    fits(kind == _SUM, f"reduceType {kind} is not known")
    if not is_float(x.dtype):
        return [Result(x.values.sum(axes, dtype=np.int64), dtype, exact=True)]
    terms = int(np.prod([x.values.shape[axis] for axis in axes]))
    scale = np.sqrt((x.values**2).sum(axes))
    return [Result(x.values.sum(axes), dtype, terms, scale)]


def sort(call: Call) -> list[Result]:
    """The largest elements of each row in falling order, and their positions."""
    x = call.at(0, "x")
    keep = call.wholes("num")
    fits(
        len(keep) == 1 and x.values.ndim > 0 and 0 < keep[0] <= x.values.shape[-1],
        f"num {keep} of {list(x.values.shape)} cannot be kept",
    )
    places = falling(x.values)[..., : keep[0]]
    values = np.take_along_axis(x.values, places, -1)
    # Positions of equal elements are not determined: such an output is not judged.
    note = ""
    if np.any(values[..., 1:] == values[..., :-1]):
        note = "equal elements may be given in any order"
    return [
        Result(values, call.out_dtype(x.dtype), exact=True),
        Result(places, call.out_dtype("int32", 1), exact=True, note=note),
    ]


def falling(values: AnyArray) -> AnyArray:
    """Positions of the elements of each row from largest to smallest; the first of equals first."""
    # Unsigned numbers cannot be negated.
    if values.dtype.kind in "ub":
        values = values.astype(np.int64)
    return np.argsort(-values, -1, kind="stable")


def gating(call: Call) -> list[Result]:
    """Which tokens each expert gets: the choices sorted by expert, and running counts."""
    chosen = call.at(0, "chosen experts").values.reshape(-1).astype(np.int64)
    per_token, experts = call.whole("topkExpertNum", 1), call.whole("cumSumNum", 0)
    fits(per_token > 0, f"topkExpertNum {per_token} must be positive")
    fits(not chosen.size or chosen.min() >= 0, "an expert's number is negative")
    highest = int(chosen.max(initial=-1))
    # `bincount` allocates as many counters as the largest number: it is checked before.
    fits(highest < (experts or LARGEST), f"expert {highest} is not below cumSumNum {experts}")
    bounded(experts, "the result")
    order = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=experts)
    own = call.wholes("deviceExpert", [])
    outputs = [
        Result(order // per_token, call.out_dtype("int32"), exact=True),
        Result(np.cumsum(counts), call.out_dtype(_count_dtype(call), 1), exact=True),
        Result(order, call.out_dtype("int32", 2), exact=True),
    ]
    if own:
        why = "with deviceExpert only a part of the output is defined"
        outputs = [output._replace(note=why) for output in outputs]
    return outputs


def _count_dtype(call: Call) -> str:
    return "int64" if call.flag("cumSumInt64", False) else "int32"


def index_add(call: Call) -> list[Result]:
    """Updates times alpha, added to the slices at the given indices."""
    target, indices, updates = call.at(0, "target"), call.at(1, "indices"), call.at(2, "updates")
    kind = call.whole("indexType", 0)
    axis = one_of(call.whole("axis", 0), target.values.ndim)
    places, added = indices.values.reshape(-1).astype(np.int64), real(updates)
    alpha = 1.0
    if kind == _ADD:
        alpha = float(real(call.at(3, "alpha")).reshape(-1)[0]) if len(call.inputs) > 3 else 1.0
    elif kind == _ADD_VALID:
        valid = int(call.at(3, "number of valid indices").values.reshape(-1)[0])
        places, added = places[:valid], np.take(added, range(valid), axis)
    else:
        raise Unfit(f"indexType {kind} is not known")
    length = target.values.shape[axis]
    fits(
        not places.size or (places.min() >= 0 and places.max() < length),
        f"an index lies outside of 0 to {length - 1}",
    )
    values = np.moveaxis(real(target).copy(), axis, 0)
    size = values**2
    moved = np.moveaxis(added * alpha, axis, 0)
    # Unlike `values[places] += moved`, this adds repeated indices every time.
    np.add.at(values, places, moved)
    np.add.at(size, places, moved**2)
    # The longest sum is that of the index that occurs most often, and the target itself.
    most = int(np.bincount(places).max()) + 1 if places.size else 1
    dtype = call.out_dtype(target.dtype)
    scale = np.moveaxis(np.sqrt(size), 0, axis)
    return [Result(np.moveaxis(values, 0, axis), dtype, most, scale)]


def nonzero(call: Call) -> list[Result]:
    """Positions of the elements that are not zero, padded with zeros, and their number."""
    x = call.at(0, "x")
    places = np.stack(np.nonzero(x.values)) if x.values.ndim else np.zeros((0, 1), np.int64)
    padded = np.zeros((x.values.ndim, x.values.size), np.int64)
    padded[:, : places.shape[1]] = places
    dtype = call.out_dtype("int64")
    return [
        Result(padded, dtype, exact=True),
        Result(np.asarray(places.shape[1]), call.out_dtype("int64", 1), exact=True),
    ]


def onehot(call: Call) -> list[Result]:
    """A one at each index, along a new axis of `depth` elements."""
    x = call.at(0, "indices")
    depth = call.whole("depth", 0)
    axis = one_of(call.whole("axis", 0), x.values.ndim + 1)
    fits(depth > 0 and depth * x.values.size <= 2**31, f"depth {depth} is no size")
    hot = np.arange(depth) == x.values[..., None]
    on, off = (_single(call, number, usual) for number, usual in ((1, 1), (2, 0)))
    values = np.where(np.moveaxis(hot, -1, axis), on, off)
    return [Result(values, call.out_dtype(x.dtype), exact=True)]


def _single(call: Call, number: int, usual: int) -> AnyArray:
    """The values for hot and cold, where they are inputs of their own."""
    if number < len(call.inputs) and call.inputs[number].values.size:
        return call.inputs[number].values.reshape(-1)[0]
    return np.asarray(usual)


DEFINITIONS: dict[str, Definition] = {
    "Cumsum": cumsum,
    "Gating": gating,
    "IndexAdd": index_add,
    "Nonzero": nonzero,
    "Onehot": onehot,
    "Reduce": reduce,
    "Sort": sort,
}
