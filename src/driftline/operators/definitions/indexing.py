"""Operators that move, select or repeat elements: their results are exact."""

from __future__ import annotations

import math

import numpy as np

from driftline.operators.definitions.call import (
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    Unfit,
    bounded,
    fits,
    one_of,
    spread,
)


def _moved(call: Call, values: AnyArray, source: Tensor, number: int = 0) -> Result:
    return Result(values, call.out_dtype(source.dtype, number), exact=True)


def as_strided(call: Call) -> list[Result]:
    """Elements of the flat input at offset + index · stride."""
    x = call.at(0, "x")
    size, stride = call.wholes("size"), call.wholes("stride")
    offset = (call.wholes("offset", [0]) or [0])[0]
    fits(len(size) == len(stride), f"size {size} and stride {stride} differ in length")
    # Older versions of numpy have at most 32 axes.
    fits(all(n > 0 for n in size) and len(size) <= 32, f"size {size} is no shape")
    bounded(math.prod(size), "the result")
    # The first and last element touched must exist: strides come from a file, and numpy does not
    # check.
    first = offset + sum(min(0, (n - 1) * s) for n, s in zip(size, stride, strict=True))
    last = offset + sum(max(0, (n - 1) * s) for n, s in zip(size, stride, strict=True))
    flat = np.ascontiguousarray(x.values).reshape(-1)
    fits(first >= 0 and last < flat.size, f"element {last} of {flat.size} does not exist")
    steps = [s * flat.itemsize for s in stride]
    view = np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False)
    return [_moved(call, view.copy(), x)]


def concat(call: Call) -> list[Result]:
    first = call.at(0, "x")
    # The second input is required, otherwise nothing is joined.
    call.at(1, "y")
    axis = one_of(call.whole("concatDim", 0), first.values.ndim, "concatDim")
    return [_moved(call, np.concatenate([tensor.values for tensor in call.inputs], axis), first)]


def fill(call: Call) -> list[Result]:
    """A number where the mask is set, or everywhere in a new tensor."""
    number = call.first("value", 0.0)
    if not call.flag("withMask", True):
        shape = call.wholes("outDim")
        fits(all(size >= 0 for size in shape), f"outDim {shape} is no shape")
        bounded(math.prod(shape), "the result")
        return [Result(np.full(shape, number), call.out_dtype("float16"), exact=True)]
    x, mask = call.at(0, "x"), call.at(1, "mask")
    values = np.where(np.broadcast_to(mask.values != 0, x.values.shape), number, x.values)
    return [_moved(call, values, x)]


def gather(call: Call) -> list[Result]:
    """Slices of the first input at the indices of the second."""
    x, indices = call.at(0, "x"), call.at(1, "indices")
    axis, batch = call.whole("axis", 0), call.whole("batchDims", 0)
    axis = one_of(axis, x.values.ndim)
    fits(0 <= batch <= min(axis, indices.values.ndim), f"batchDims {batch} does not fit")
    places, length = indices.values.astype(np.int64), x.values.shape[axis]
    fits(
        # Negative indices mean padding in some operators; here they are errors.
        not places.size or (places.min() >= 0 and places.max() < length),
        f"an index lies outside of 0 to {length - 1}",
    )
    # A few indices into large slices can ask for any amount of memory.
    bounded(places.size * (x.values.size // max(length, 1)), "the result")
    if not batch:
        return [_moved(call, np.take(x.values, places, axis), x)]
    # With batch dimensions every batch has indices of its own.
    shape = x.values.shape[:batch]
    fits(shape == places.shape[:batch], "the batches of x and of the indices differ")
    rows = x.values.reshape(-1, *x.values.shape[batch:])
    chosen = places.reshape(-1, *places.shape[batch:])
    slices = [np.take(row, own, axis - batch) for row, own in zip(rows, chosen, strict=True)]
    values = np.stack(slices)
    return [_moved(call, values.reshape(*shape, *values.shape[1:]), x)]


def pad(call: Call) -> list[Result]:
    """The last token of each sequence."""
    x, lengths = call.at(0, "tokens"), call.at(2, "sequence lengths")
    # Lengths add up to the ends of the sequences in the packed tokens.
    last = np.cumsum(lengths.values.reshape(-1).astype(np.int64)) - 1
    fits(not last.size or last[-1] < x.values.shape[0], "the sequences are longer than the tokens")
    return [_moved(call, x.values[last], x)]


def unpad(call: Call) -> list[Result]:
    """All sequences without their padding, and where each token came from."""
    ids, offsets, count, lengths = (call.at(n) for n in range(4))
    batch, longest = ids.values.shape[:2]
    sizes = lengths.values.reshape(-1).astype(np.int64)
    before = offsets.values.reshape(-1).astype(np.int64)
    fits(sizes.size == batch == before.size, "one length and one offset for each sequence")
    fits(not sizes.size or sizes.max() <= longest, "a sequence is longer than its row")
    tokens = int(count.values.reshape(-1)[0]) if count.values.size else 0
    fits(tokens == sizes.sum(), f"{tokens} tokens, but the lengths add up to {sizes.sum()}")
    total = batch * longest
    flat = np.zeros((1, total), np.int64)
    padding = np.zeros((1, total), np.int64)
    # Each token's offset is the padding of all sequences before its own.
    shifted = np.concatenate([[0], before[:-1]])
    kept = [ids.values[row, :size] for row, size in enumerate(sizes)]
    flat[0, :tokens] = np.concatenate(kept) if kept else 0
    padding[0, :tokens] = np.repeat(shifted, sizes)
    return [
        _moved(call, flat, ids),
        Result(shifted.reshape(offsets.values.shape), call.out_dtype(offsets.dtype, 1), exact=True),
        Result(padding, call.out_dtype("int32", 2), exact=True),
    ]


def repeat(call: Call) -> list[Result]:
    x, times = call.at(0, "x"), call.wholes("multiples")
    fits(all(n > 0 for n in times), f"multiples {times} must be positive")
    bounded(x.values.size * math.prod(times), "the result")
    return [_moved(call, np.tile(x.values, times), x)]


def set_value(call: Call) -> list[Result]:
    """The second input copied into a part of the first, and the second unchanged."""
    target, source = call.at(0, "target"), call.at(1, "source")
    starts, ends = call.wholes("starts"), call.wholes("ends")
    steps = call.wholes("strides", [1] * len(starts))
    fits(
        len(starts) == len(ends) == len(steps) <= target.values.ndim,
        f"starts {starts}, ends {ends} and strides {steps} do not fit the target",
    )
    place = tuple(slice(a, b, s) for a, b, s in zip(starts, ends, steps, strict=True))
    values = target.values.copy()
    fits(
        values[place].shape == source.values.shape,
        f"the place {list(values[place].shape)} is not of the source's shape",
    )
    values[place] = source.values
    return [_moved(call, values, target), _moved(call, source.values, source, 1)]


def cut(call: Call) -> list[Result]:
    """A block of the input; a size of -1 reaches to the end."""
    x = call.at(0, "x")
    offsets, size = call.wholes("offsets"), call.wholes("size")
    shape = x.values.shape
    fits(
        len(offsets) == len(size) == len(shape),
        f"offsets {offsets} and size {size} are not for {len(shape)} dimensions",
    )
    place: list[slice] = []
    for start, length, full in zip(offsets, size, shape, strict=True):
        start = start + full if start < 0 else start
        end = full if length == -1 else start + length
        fits(0 <= start <= end <= full, f"offsets {offsets} and size {size} leave {list(shape)}")
        place.append(slice(start, end))
    return [_moved(call, x.values[tuple(place)], x)]


def split(call: Call) -> list[Result]:
    x = call.at(0, "x")
    axis = one_of(call.whole("splitDim", 0), x.values.ndim, "splitDim")
    parts, lengths = call.whole("splitNum", 2), call.wholes("splitSizes", [])
    full = x.values.shape[axis]
    # Sizes, if given, take precedence over a number of equal parts.
    if lengths:
        fits(sum(lengths) == full, f"splitSizes {lengths} do not add up to {full}")
        pieces = np.split(x.values, np.cumsum(lengths)[:-1].tolist(), axis)
    else:
        fits(parts > 0 and full % parts == 0, f"{full} elements cannot be split into {parts}")
        pieces = np.split(x.values, parts, axis)
    return [_moved(call, piece, x, number) for number, piece in enumerate(pieces)]


def transpose(call: Call) -> list[Result]:
    x, order = call.at(0, "x"), call.wholes("perm")
    fits(
        sorted(order) == list(range(x.values.ndim)),
        f"perm {order} is no order of {x.values.ndim} dimensions",
    )
    return [_moved(call, np.transpose(x.values, order), x)]


def where(call: Call) -> list[Result]:
    condition, x, y = call.at(0, "condition"), call.at(1, "x"), call.at(2, "y")
    spread(condition.values, x.values, y.values)
    return [_moved(call, np.where(condition.values != 0, x.values, y.values), x)]


_TO_ND, _TO_NZ = 1, 2
_ROWS = 16


def transdata(call: Call) -> list[Result]:
    """Plain order into tiles of 16 rows, and back."""
    kind, x = call.whole("transdataType", 0), call.at(0, "x")
    if kind == _TO_NZ:
        # A tile is 32 bytes wide: 32 elements of int8, 16 of 16-bit formats.
        return [_moved(call, to_tiles(x.values, 32 if x.dtype == "int8" else 16), x)]
    if kind == _TO_ND:
        crops = call.wholes("outCrops", [0, 0])
        values = from_tiles(x.values) if x.values.ndim == 4 else x.values
        if values.ndim == 2:
            values = values[None]
        fits(
            values.ndim == 3 and len(crops) == 2,
            f"{list(x.values.shape)} is no tensor of tiles, or outCrops {crops} is no size",
        )
        rows, columns = (crop or full for crop, full in zip(crops, values.shape[1:], strict=True))
        fits(
            rows <= values.shape[1] and columns <= values.shape[2],
            f"outCrops {crops} is larger than {list(values.shape[1:])}",
        )
        return [_moved(call, values[:, :rows, :columns], x)]
    raise Unfit(f"transdataType {kind} is not known")


def to_tiles(values: AnyArray, width: int) -> AnyArray:
    """(…, m, n) → (batch, n1, m rounded up to 16, width), padded with zeros."""
    fits(values.ndim >= 2, "a tensor of one dimension has no tiles")
    rows, columns = values.shape[-2:]
    batch = values.reshape(-1, rows, columns)
    more = ((0, 0), (0, -rows % _ROWS), (0, -columns % width))
    # Tiles are filled with zeros, so that products with the padding do not matter.
    padded = np.pad(batch, more)
    return padded.reshape(*padded.shape[:2], -1, width).transpose(0, 2, 1, 3)


def from_tiles(values: AnyArray) -> AnyArray:
    """(batch, n1, m, width) → (batch, m, n1 · width)."""
    turned = values.transpose(0, 2, 1, 3)
    return turned.reshape(*turned.shape[:2], -1)


DEFINITIONS: dict[str, Definition] = {
    "AsStrided": as_strided,
    "Concat": concat,
    "Fill": fill,
    "Gather": gather,
    "Pad": pad,
    "Repeat": repeat,
    "SetValue": set_value,
    "Slice": cut,
    "Split": split,
    "Transdata": transdata,
    "Transpose": transpose,
    "Unpad": unpad,
    "Where": where,
}
