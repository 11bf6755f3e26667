"""Facts about the values of parameters and buffers: summary, digests, roundings, samples.

They are enough to find out later whether two weights are equal, rounded, permuted, transposed or
different, without storing the weights. A thread reads the weights while the program continues;
code that changes weights waits for it. A framework's adapter reads the bytes of a tensor.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.captures.recorder import Refusal, Snapshot
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, DType
from driftline.runs.index_lines import encode_summary
from driftline.runs.sidecars.model_facts import WEIGHTS, grid_indices, grid_of, line_of

MOST_BYTES = 4 << 30
"""Largest size of a process's weights that are read in full; otherwise only samples are read."""
# Elements of a block: small enough for a processor's second-level cache, and large enough that
# numpy releases Python's lock.
_BLOCK = 1 << 16
_LARGEST_TENSOR = 1 << 30
"""Largest size of a tensor that is read in full; of a larger one only samples are used."""

Bits = npt.NDArray[Any]
ToHalf = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float16]], None]
"""Rounds a block of float32 into an array of float16."""


class Samples(NamedTuple):
    """The sampled elements of a tensor.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        values: Snapshot of the sampled elements, in C order of their grid.
        unordered: Digests of all elements, made where the tensor is; see `order_free`.
    """

    dtype: str
    shape: tuple[int, ...]
    values: Snapshot
    unordered: Mapping[str, str] = {}


class Weight(NamedTuple):
    """A tensor to be read.

    Attributes:
        site: Site of its module.
        name: Its name in the module.
        read: Returns its bytes or samples, or the reason why it cannot be read.
        nbytes: Its size.
    """

    site: str
    name: str
    read: Callable[[], Snapshot | Samples | Refusal]
    nbytes: int


def numpy_half(values: npt.NDArray[np.float32], out: npt.NDArray[np.float16]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = values


class WeightReader:
    """Reads weights in a separate thread, and writes a line for each.

    Args:
        add: Adds lines to a side file; takes the file's name and the lines.
        to_half: The framework's rounding to float16; numpy's takes nine times as long.
        undisturbed: Returns a context that the thread enters around all reading.
    """

    def __init__(
        self,
        add: Callable[[str, str], None],
        to_half: ToHalf = numpy_half,
        undisturbed: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._add = add
        self._to_half = to_half
        self._undisturbed = undisturbed
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.total = 0

    def begin(self, weights: Sequence[Weight]) -> None:
        """Begin to read weights, after waiting for those begun before."""
        self.wait()
        self.total += sum(weight.nbytes for weight in weights)
        # All models of a process share the limit.
        full = self.total <= MOST_BYTES
        if not full:
            text = (
                f"the weights take more than {MOST_BYTES >> 30} GB: an even sample of each was "
                "looked at"
            )
            self._add(WEIGHTS, line_of("note", text=text))
        self._thread = threading.Thread(
            target=self._read, args=(list(weights), full), name="driftline-weights", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._thread = None

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all weights are read, or give up the rest after some seconds."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(seconds)
        if thread.is_alive():
            self._stopped = True
            text = "the program ended before all of its weights were read"
            self._add(WEIGHTS, line_of("note", text=text))
        self._thread = None

    def forget(self) -> None:
        """Reset the state in a forked child, which does not have the parent's thread."""
        self._thread = None
        self.total = 0

    def _read(self, weights: list[Weight], full: bool) -> None:
        with self._undisturbed():
            for weight in weights:
                if self._stopped:
                    return
                try:
                    line = self.line(weight, full=full)
                except Exception as error:
                    reason = f"not readable: {type(error).__name__}"
                    line = line_of("weight", site=weight.site, name=weight.name, unreadable=reason)
                self._add(WEIGHTS, line)

    def line(self, weight: Weight, *, full: bool = True) -> str:
        """Read one weight and return its line."""
        shot = weight.read()
        place = {"site": weight.site, "name": weight.name}
        if isinstance(shot, Refusal):
            return line_of("weight", **place, unreadable=f"not readable: {shot.reason}")
        values = shot.values if isinstance(shot, Samples) else shot
        dtype, data = DTYPES[shot.dtype], values.data
        if data is None or dtype.bits < 8:
            return line_of("weight", **place, unreadable="not readable: packed")
        fields: dict[str, Any] = {**place, "dtype": shot.dtype, "shape": list(shot.shape)}
        only_samples = isinstance(shot, Samples)
        samples = data if only_samples else sampled(data, dtype, shot.shape)
        if full and not only_samples and values.length <= _LARGEST_TENSOR:
            fields["digest"] = kernel.digest_at(values.address, values.length)
            fields |= self._rounded(data, dtype)
            summary = kernel.summarize_at(
                values.address, values.length, dtype, count=math.prod(shot.shape)
            )
        else:
            fields["basis"] = "sample"
            if only_samples and shot.unordered:
                fields["unordered"] = dict(shot.unordered)
            count = samples.size // (dtype.bits // 8)
            summary = kernel.summarize(samples, dtype, count=count)
        if grid_of(shot.shape) == shot.shape:
            summary = summary._replace(sketch=())  # the samples are all elements
        fields["summary"] = json.loads(encode_summary(summary))
        fields["samples"] = binascii.b2a_base64(samples.data, newline=False).decode("ascii")
        return line_of("weight", **fields)

    def _rounded(self, data: npt.NDArray[np.uint8], dtype: DType) -> dict[str, Any]:
        """Digests of the rounded values, and digests that do not depend on the elements' order."""
        bits = data.view(f"<u{min(dtype.bits // 8, 8)}")
        unordered = {"own": order_free(bits)}
        rounded: dict[str, str] = {}
        if dtype.name in ("float32", "float64", "bfloat16", "float16"):
            for name in ("bfloat16", "float16"):
                if name == dtype.name:
                    continue
                values = self._to_16_bits(data, dtype, name)
                rounded[name] = kernel.digest(values)
                if name == "bfloat16":
                    unordered[name] = order_free(values)
        return {"rounded": rounded, "unordered": unordered}

    def _to_16_bits(
        self, data: npt.NDArray[np.uint8], dtype: DType, name: str
    ) -> npt.NDArray[np.uint16]:
        count = data.size * 8 // dtype.bits
        out = np.empty(count, np.uint16)
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            values = _as_float32(data, dtype, start, stop)
            if name == "float16":
                self._to_half(values, out[start:stop].view(np.float16))
            else:
                _to_bfloat16(values, out[start:stop])
        return out


def _as_float32(
    data: npt.NDArray[np.uint8], dtype: DType, start: int, stop: int
) -> npt.NDArray[np.float32]:
    size = dtype.bits // 8
    block = data[start * size : stop * size]
    if dtype.name == "float32":
        return block.view("<f4")
    if dtype.name == "bfloat16":
        return (block.view("<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return block.view("<f2" if dtype.name == "float16" else "<f8").astype(np.float32)


def _to_bfloat16(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
    """Round to bfloat16, to nearest, ties to even, as every framework does."""
    bits = values.view(np.uint32)
    carry = bits >> np.uint32(16)
    carry &= np.uint32(1)
    carry += np.uint32(0x7FFF)
    carry += bits
    carry >>= np.uint32(16)
    out[:] = carry
    # For a NaN the carry may change the sign bit, so every NaN is replaced by the standard one.
    unordered = np.isnan(values)
    if unordered.any():
        out[unordered] = 0x7FC0


def order_free(bits: Bits) -> str:
    """A digest that is equal for any order of the elements: the sum of their hashes.

    >>> order_free(np.array([1, 2, 3], np.uint32)) == order_free(np.array([3, 1, 2], np.uint32))
    True
    """
    total = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        if block.dtype.itemsize == 8:
            hashes = (block ^ (block >> np.uint64(29))).astype(np.uint32)
        else:
            hashes = block.astype(np.uint32)
        # Two rounds of multiplication and shift spread every bit of an element over the hash.
        hashes *= np.uint32(0x9E3779B1)
        hashes ^= hashes >> np.uint32(15)
        hashes *= np.uint32(0x85EBCA77)
        hashes ^= hashes >> np.uint32(13)
        total += int(hashes.sum(dtype=np.uint64))
    return order_free_text(bits.size, total)


def order_free_text(count: int, total: int) -> str:
    """The digest of as many elements, from the sum of their hashes."""
    return f"sum32:{count}:{total:x}"


def sampled(
    data: npt.NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """The bytes of the sampled elements, in C order of their grid."""
    size = dtype.bits // 8
    elements = data.reshape(*shape, size)
    if shape:
        elements = elements[np.ix_(*grid_indices(shape))]
    return np.ascontiguousarray(elements).reshape(-1)
