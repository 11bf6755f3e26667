"""Tensors of ONNX Runtime: their element types, snapshots of their bytes, and tensors from bytes.

Elements for which numpy has no type (bfloat16, 8-bit floats, 4-bit integers) are read from memory
as raw bytes.
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
"""Our names of ONNX's element types, by ONNX's number. Type 8, text, has none."""

NUMBERS = {name: number for number, name in TYPES.items()}
# Sessions print C++ names of these types; other types have the same names as ours.
_WORDS = {
    "float": "float32", "double": "float64", "bool": "bool", "float16": "float16",
    "bfloat16": "bfloat16",
}  # fmt: skip
AnyArray = npt.NDArray[Any]


def dtype_in(word: str) -> str:
    """Our name of a type that a session prints, such as `tensor(float)`; empty if there is none.

    >>> dtype_in("tensor(float)"), dtype_in("tensor(int64)"), dtype_in("seq(tensor(float))")
    ('float32', 'int64', '')
    """
    if not word.startswith("tensor("):
        return ""
    inner = word[7:-1]
    name = _WORDS.get(inner, inner.replace("float8e", "float8_e"))
    return name if name in DTYPES else ""


class HostTensor:
    """A tensor in host memory: an input of a model, or a weight read from its files."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: AnyArray, dtype: str, shape: tuple[int, ...]) -> None:
        self.data = np.ascontiguousarray(data).reshape(-1)
        self.dtype = dtype
        self.shape = shape

    def to_ort(self, ort: Any) -> Any:
        """The tensor as a value of ONNX Runtime; None if it cannot be converted."""
        storage = self.data.view(np.dtype(DTYPES[self.dtype].storage))
        if np.dtype(storage.dtype).name == self.dtype:
            return ort.OrtValue.ortvalue_from_numpy(storage.reshape(self.shape))
        # The Python bindings cannot make a value with less than a byte per element.
        if DTYPES[self.dtype].bits < 8:
            return None
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            storage.reshape(self.shape), NUMBERS[self.dtype]
        )


class TextTensor:
    """A tensor of texts, an input or output of a model. It is never recorded."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: AnyArray) -> None:
        self.data = data.astype(object)
        self.dtype = "text"
        self.shape: tuple[int, ...] = data.shape

    def to_ort(self, ort: Any) -> Any:
        """The array itself, because ONNX Runtime has no values of texts in Python."""
        del ort
        return self.data


def look(value: Any, *, values: bool = True) -> Snapshot | Refusal:
    """Snapshot of an output of a session, or of one of its inputs.

    The snapshot refers to live memory, so it must be read before the value is freed.
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
        # The only element type that is not in the table is text.
        return Refusal("texts have no numbers")
    shape = tuple(value.shape())
    count = math.prod(shape)
    length = DTYPES[dtype].byte_count(count)
    device = str(value.device_name())
    address, owner = 0, value
    # An empty tensor may have no address.
    if values and length:
        # A value on a device is copied to the host first.
        if device == "cpu":
            address = value.data_ptr()
        else:
            owner = np.ascontiguousarray(value.numpy())
            address = owner.ctypes.data
    return Snapshot(dtype, shape, address, length if values else -1, device, None, count, "", owner)
