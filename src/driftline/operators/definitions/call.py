"""What an operator's definition receives and returns, and rounding to number formats.

Values are float64 (complex128) for floating formats, and integers or bool, unchanged, for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Unfit(Exception):
    """Why a call cannot be computed: the inputs or parameters do not fit the operator."""


class Tensor(NamedTuple):
    """An input: its values, and the format they came in."""

    values: AnyArray
    dtype: str


class Result(NamedTuple):
    """An output before it is rounded.

    Attributes:
        values: As the definition gives them.
        dtype: Format of the output.
        terms: How many terms were added up for one element.
        scale: For `terms` > 1: root of the sum of the squared terms, per element; or a function
            that computes it, because an accurate result does not need it.
        exact: Nothing was computed: values were moved, selected, compared or counted.
        note: Why this output cannot be compared with the values (such as randomness), or empty.
    """

    values: AnyArray
    dtype: str
    terms: int = 1
    scale: AnyArray | Callable[[], AnyArray] | None = None
    exact: bool = False
    note: str = ""


def scale_of(result: Result) -> AnyArray | None:
    """The size of the terms, computed if it has to be."""
    with np.errstate(all="ignore"):
        return result.scale() if callable(result.scale) else result.scale


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        param: Its parameters.
        inputs: Its input tensors.
        outputs: Formats of the outputs, where a dump knows them; empty otherwise.
    """

    param: Mapping[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()

    def at(self, number: int, what: str = "") -> Tensor:
        """An input by its number.

        Raises:
            Unfit: There is no such input.
        """
        # Missing inputs are the most common problem of a dump: say which one is meant.
        if number >= len(self.inputs):
            named = f" ({what})" if what else ""
            raise Unfit(f"input {number}{named} is missing; {_counted(len(self.inputs))} there")
        return self.inputs[number]

    def out_dtype(self, usual: str, number: int = 0) -> str:
        """Format of an output: the one of the dump, else what the operator usually gives."""
        return (self.outputs[number] if number < len(self.outputs) else "") or usual

    def number(self, name: str, default: float) -> float:
        """A parameter that is a number.

        Raises:
            Unfit: It is something else.
        """
        value = self.param.get(name, default)
        # `True` is an int for Python, but no number in a parameter file.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Unfit(f"parameter {name} is no number: {_short(value)}")
        return float(value)

    def first(self, name: str, default: float) -> float:
        """A parameter that is a list of one number, or a number.

        Raises:
            Unfit: It is something else.
        """
        value = self.param.get(name, default)
        if isinstance(value, (list, tuple)) and value:
            value = cast("Sequence[Any]", value)[0]
        return self._replace(param={name: value}).number(name, default)

    def whole(self, name: str, default: int) -> int:
        """A parameter that is a whole number, or an enumeration's.

        Raises:
            Unfit: It is something else.
        """
        value = self.param.get(name, default)
        if not isinstance(value, (int, float)) or value != int(value):
            raise Unfit(f"parameter {name} is no whole number: {_short(value)}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """A parameter that is true or false.

        Raises:
            Unfit: It is something else.
        """
        value = self.param.get(name, default)
        if not isinstance(value, (bool, int)):
            raise Unfit(f"parameter {name} is neither true nor false: {_short(value)}")
        return bool(value)

    def wholes(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        """A parameter that is a list of whole numbers; a single number is a list of one.

        Raises:
            Unfit: It is something else, or absent without a default.
        """
        value = self.param.get(name, default)
        if value is None:
            raise Unfit(f"parameter {name} is missing")
        listed = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
        for member in listed:
            if (
                isinstance(member, bool)
                or not isinstance(member, (int, float))
                or member != int(member)
            ):
                raise Unfit(f"parameter {name} is no list of whole numbers: {_short(listed)}")
        return [int(member) for member in listed]

    def group(self, name: str) -> Call:
        """The same call with the parameters of a named group.

        Raises:
            Unfit: It is no group.
        """
        value = self.param.get(name, {})
        if not isinstance(value, Mapping):
            raise Unfit(f"parameter {name} is no group of parameters: {_short(value)}")
        return self._replace(param=cast("Mapping[str, Any]", value))


Definition: TypeAlias = Callable[[Call], list[Result]]


def _counted(inputs: int) -> str:
    return "no input is" if not inputs else "1 input is" if inputs == 1 else f"{inputs} inputs are"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


ACL_DTYPES = {
    0: "float32",
    1: "float16",
    2: "int8",
    3: "int32",
    4: "uint8",
    6: "int16",
    7: "uint16",
    8: "uint32",
    9: "int64",
    10: "uint64",
    11: "float64",
    12: "bool",
    16: "complex64",
    17: "complex128",
    27: "bfloat16",
}
"""Numbers of element types in parameters such as outDataType."""

LARGEST = 2**30
"""Most elements of an output; the logits of 8000 tokens over a vocabulary have as many."""

_FLOATS = {
    # mantissa bits, smallest normal exponent, largest finite value, has infinities
    "bfloat16": (7, -126, (2 - 2**-7) * 2.0**127, True),
    "float8_e4m3fn": (3, -6, 448.0, False),
    "float8_e5m2": (2, -14, 57344.0, True),
}
_NATIVE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def rounded(values: AnyArray, dtype: str) -> AnyArray:
    """The nearest numbers of a format (ties to even), still as float64; integers are clamped.

    Raises:
        Unfit: The format is unknown.
    """
    if dtype in _NATIVE:
        with np.errstate(all="ignore"):
            return values.astype(_NATIVE[dtype]).astype(np.float64)
    if dtype in _FLOATS:
        with np.errstate(all="ignore"):
            return _nearest(values.astype(np.float64), *_FLOATS[dtype])
    if dtype in ("complex64", "complex128"):
        return values.astype(dtype).astype(np.complex128)
    if dtype == "bool":
        return values.astype(np.bool_)
    if dtype in _INTEGERS:
        if values.dtype.kind in "iub":
            return values.astype(dtype)
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        integers = np.rint(np.nan_to_num(values, nan=0.0, posinf=high, neginf=low))
        # 2**63 - 1 is no float64: what would round up to 2**63 is set afterwards.
        kept = np.clip(integers, low, np.nextafter(float(high), 0) if high > 2**52 else high)
        return np.where(integers >= float(high), np.asarray(high, dtype), kept.astype(dtype))
    raise Unfit(f"numbers of {dtype} cannot be made here")


def _nearest(
    values: AnyArray, mantissa: int, smallest: int, largest: float, infinities: bool
) -> AnyArray:
    finite = np.isfinite(values)
    exponent = np.frexp(np.where(finite, values, 0.0))[1] - 1
    # Below the smallest normal number all steps are equal: that is how subnormals are spaced.
    step = np.ldexp(1.0, np.maximum(exponent, smallest) - mantissa)
    result = np.where(finite, np.rint(np.where(finite, values, 0.0) / step) * step, values)
    beyond = np.abs(result) > largest
    # Formats without infinities overflow to NaN.
    return np.where(beyond, np.copysign(np.inf if infinities else np.nan, values), result)


def fits(condition: bool, why: str) -> None:
    """Refuse a call that does not fit.

    Raises:
        Unfit: The condition does not hold.
    """
    if not condition:
        raise Unfit(why)


def bounded(count: int, what: str) -> None:
    """Refuse a size that no real tensor has: parameters come from strangers' files.

    Raises:
        Unfit: It is too large, or negative.
    """
    fits(0 <= count <= LARGEST, f"{what} would have {count} elements")


def spread(*tensors: AnyArray) -> None:
    """Refuse tensors whose broadcast result would be too large.

    Raises:
        Unfit: They do not fit together, or they would.
    """
    try:
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except ValueError:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        raise Unfit(f"{shapes} do not fit together") from None
    bounded(math.prod(shape), "the result")


def one_of(axis: int, rank: int, name: str = "axis") -> int:
    """An axis counted from the front.

    Raises:
        Unfit: The tensor has no such axis.
    """
    fits(-rank <= axis < rank, f"{name} {axis} does not exist in a tensor of {rank} dimensions")
    return axis % rank


def real(tensor: Tensor) -> AnyArray:
    """The values as float64, whatever the format."""
    return tensor.values.astype(np.float64)
