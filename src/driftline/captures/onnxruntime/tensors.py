"""Tensors of ONNX Runtime: their element types, snapshots of their bytes, and tensors from bytes.

Formats that numpy has no type for (bfloat16, the 8-bit floats, 4-bit integers) are read from memory
as they are there.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.captures.recorder import Refusal, Snapshot
from driftline.numerics.dtypes import DTYPES

TYPES: dict[int, str] = {d.onnx: d.name for d in DTYPES.values() if d.onnx}
"""ONNX's numbers of element types, as our names. 8 is a text, which has no numbers."""

NUMBERS = {name: number for number, name in TYPES.items()}
# Sessions print C++ names for these; the others are spelt as here.
_WORDS = {
    "float": "float32", "double": "float64", "bool": "bool", "float16": "float16",
    "bfloat16": "bfloat16",
}  # fmt: skip
AnyArray = npt.NDArray[Any]


def dtype_in(word: str) -> str:
    """Our name of a type as a session prints it: `tensor(float)`; empty if it has none.

    >>> dtype_in("tensor(float)"), dtype_in("tensor(int64)"), dtype_in("seq(tensor(float))")
    ('float32', 'int64', '')
    """
    if not word.startswith("tensor("):
        return ""
    inner = word[7:-1]
    name = _WORDS.get(inner, inner.replace("float8e", "float8_e"))
    return name if name in DTYPES else ""


class HostTensor:
    """Bytes in host memory that are fed to, or were read for, a model."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: AnyArray, dtype: str, shape: tuple[int, ...]) -> None:
        self.data = np.ascontiguousarray(data).reshape(-1)
        self.dtype = dtype
        self.shape = shape

    def to_ort(self, ort: Any) -> Any:
        """As a value of a session."""
        storage = self.data.view(np.dtype(DTYPES[self.dtype].storage))
        if np.dtype(storage.dtype).name == self.dtype:
            return ort.OrtValue.ortvalue_from_numpy(storage.reshape(self.shape))
        # Python bindings cannot build a value of less than a byte per element.
        if DTYPES[self.dtype].bits < 8:
            return None
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            storage.reshape(self.shape), NUMBERS[self.dtype]
        )


class TextTensor:
    """Texts that are fed to, or were given by, a model; they are handed on, and never recorded."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: AnyArray) -> None:
        self.data = data.astype(object)
        self.dtype = "text"
        self.shape: tuple[int, ...] = data.shape

    def to_ort(self, ort: Any) -> Any:
        """As it is: ONNX Runtime makes no value of texts by itself."""
        del ort
        return self.data


def look(value: Any, *, values: bool = True) -> Snapshot | Refusal:
    """Snapshot of a tensor of a session, or of one that is fed to it.

    The snapshot is a window on live memory: read it before the value is freed.
    """
    if isinstance(value, HostTensor):
        count = math.prod(value.shape)
        address, length = value.data.ctypes.data, value.data.nbytes
        return Snapshot(
            value.dtype, value.shape, address, length if values else -1, "cpu", None, count, "",
            value,
        )  # fmt: skip
    if isinstance(value, TextTensor):
        return Refusal("texts have no numbers")
    if not hasattr(value, "is_tensor") or not value.is_tensor():
        return Refusal("a sequence, map or optional value is no tensor")
    dtype = TYPES.get(value.element_type(), "")
    if not dtype:
        # Element type 8 of ONNX, the only one without a row in the table.
        return Refusal("texts have no numbers")
    shape = tuple(value.shape())
    count = math.prod(shape)
    length = DTYPES[dtype].byte_count(count)
    device = str(value.device_name())
    address, owner = 0, value
    # An empty tensor may have no address at all.
    if values and length:
        # Values on a device are copied to the host first.
        if device == "cpu":
            address = value.data_ptr()
        else:
            owner = np.ascontiguousarray(value.numpy())
            address = owner.ctypes.data
    return Snapshot(dtype, shape, address, length if values else -1, device, None, count, "", owner)
