"""Values of parameters and buffers in few numbers: summary, digests, roundings, samples.

Enough to say later whether two weights are the same, rounded, permuted, transposed or different,
without keeping them. A thread reads them while the program goes on; whoever changes weights waits
for it. How a framework's tensor becomes bytes is asked of its adapter.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.captures.recorder import Refusal, Snapshot
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, DType
from driftline.runs.index_lines import encode_summary
from driftline.runs.sidecars.model_facts import WEIGHTS, grid_indices, grid_of, line_of

MOST_BYTES = 4 << 30
"""Weights of a process that are read in full; of larger models only the samples are looked at."""
# In elements. Small enough for a processor's second cache, large enough to let go of Python's lock.
_BLOCK = 1 << 16
_LARGEST_TENSOR = 1 << 30
"""Bytes of a tensor that is rounded as a whole; of a larger one only samples are kept."""

Bits = npt.NDArray[Any]
ToHalf = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float16]], None]
"""Rounds a block of float32 into an array of float16."""


class Samples(NamedTuple):
    """The sampled elements of a tensor that stays where it is.

    Attributes:
        dtype: Of the tensor.
        shape: Of the tensor.
        values: The sampled elements' own snapshot, in C order of their grid.
    """

    dtype: str
    shape: tuple[int, ...]
    values: Snapshot


class Weight(NamedTuple):
    """A tensor to be read.

    Attributes:
        site: Of the module that holds it.
        name: Its name there.
        read: Gives its bytes or samples of them, or says why it has none.
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
    """Reads weights in a thread of its own, and hands on a line for each.

    Args:
        add: Takes the name of a side file and its lines.
        to_half: How the framework rounds to float16; numpy takes nine times as long.
        undisturbed: Entered in the thread around all reading.
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
        """Read these; those begun before are waited for."""
        self.wait()
        self.total += sum(weight.nbytes for weight in weights)
        # One limit for all models of a process: many small ones are one large one.
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
        except RuntimeError:  # no threads any more: the interpreter is ending
            self._thread = None

    def wait(self, seconds: float | None = None) -> None:
        """Return when everything begun has been read, or give up the rest after some seconds."""
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
        """In a forked child: the thread is the parent's."""
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
        """The line of one weight."""
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
            count = samples.size // (dtype.bits // 8)
            summary = kernel.summarize(samples, dtype, count=count)
        if grid_of(shot.shape) == shot.shape:
            summary = summary._replace(sketch=())  # the samples are all of it
        fields["summary"] = json.loads(encode_summary(summary))
        fields["samples"] = binascii.b2a_base64(samples.data, newline=False).decode("ascii")
        return line_of("weight", **fields)

    def _rounded(self, data: npt.NDArray[np.uint8], dtype: DType) -> dict[str, Any]:
        """Digests of the roundings, and digests that do not depend on the order."""
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
    """Round to nearest, ties to even, as every framework does."""
    bits = values.view(np.uint32)
    carry = bits >> np.uint32(16)
    carry &= np.uint32(1)
    carry += np.uint32(0x7FFF)
    carry += bits
    carry >>= np.uint32(16)
    out[:] = carry
    # The carry of a NaN may run into its sign; every NaN becomes the usual one.
    unordered = np.isnan(values)
    if unordered.any():
        out[unordered] = 0x7FC0


def order_free(bits: Bits) -> str:
    """A digest of the elements that any order of them gives: the sum of a hash of each.

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
        # Two rounds of multiply and shift spread every bit of an element over the hash.
        hashes *= np.uint32(0x9E3779B1)
        hashes ^= hashes >> np.uint32(15)
        hashes *= np.uint32(0x85EBCA77)
        hashes ^= hashes >> np.uint32(13)
        total += int(hashes.sum(dtype=np.uint64))
    return f"sum32:{bits.size}:{total:x}"


def sampled(
    data: npt.NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """The bytes of the sampled elements, in C order of their grid."""
    size = dtype.bits // 8
    elements = data.reshape(*shape, size)
    if shape:
        elements = elements[np.ix_(*grid_indices(shape))]
    return np.ascontiguousarray(elements).reshape(-1)
