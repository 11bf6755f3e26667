"""Element types and storage formats of Ascend files: the meaning of the numbers in a header.

The codes are those of `aclDataType` and `aclFormat`. Types that numpy and torch lack (HiFloat8,
six-bit floats, single bits) are read as a type of `numerics.dtypes` that holds each of their values
exactly. This file does not know files.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from driftline.numerics.dtypes import DTYPES, unpack_nibbles, value_table

AnyArray = np.ndarray[Any, np.dtype[Any]]
Recoding = Literal["", "table", "bits"]


class ElementType(NamedTuple):
    """One type code.

    Attributes:
        name: Name of the type in the csv files of a dump.
        dtype: Our type for its values; empty if there is none.
        bits: Width of one element in the file.
        recoded: How values are converted to `dtype`: not at all, by a table of codes, or bit by
            bit.
    """

    name: str
    dtype: str
    bits: int
    recoded: Recoding = ""

    def byte_count(self, elements: int) -> int:
        return (elements * self.bits + 7) // 8


ACL_TYPES: dict[int, ElementType] = {
    -1: ElementType("undefined", "", 0),
    0: ElementType("float", "float32", 32),
    1: ElementType("float16", "float16", 16),
    2: ElementType("int8", "int8", 8),
    3: ElementType("int32", "int32", 32),
    4: ElementType("uint8", "uint8", 8),
    6: ElementType("int16", "int16", 16),
    7: ElementType("uint16", "uint16", 16),
    8: ElementType("uint32", "uint32", 32),
    9: ElementType("int64", "int64", 64),
    10: ElementType("uint64", "uint64", 64),
    11: ElementType("double", "float64", 64),
    12: ElementType("bool", "bool", 8),
    13: ElementType("string", "", 0),
    16: ElementType("complex64", "complex64", 64),
    17: ElementType("complex128", "complex128", 128),
    27: ElementType("bf16", "bfloat16", 16),
    29: ElementType("int4", "int4", 4),
    30: ElementType("uint1", "bool", 1, "bits"),
    33: ElementType("complex32", "complex32", 32),
    34: ElementType("hifloat8", "float16", 8, "table"),
    35: ElementType("float8_e5m2", "float8_e5m2", 8),
    36: ElementType("float8_e4m3fn", "float8_e4m3fn", 8),
    37: ElementType("float8_e8m0", "float8_e8m0fnu", 8),
    38: ElementType("float6_e3m2", "float8_e5m2", 8, "table"),
    39: ElementType("float6_e2m3", "float8_e4m3fn", 8, "table"),
    40: ElementType("float4_e2m1", "float4_e2m1fn_x2", 4),
    41: ElementType("float4_e1m2", "float8_e5m2", 4, "table"),
}
"""`aclDataType`. Six-bit floats take one byte each; four-bit types are two to a byte, low first."""

ACL_FORMATS: dict[int, str] = {
    -1: "undefined",
    0: "NCHW",
    1: "NHWC",
    2: "ND",
    3: "NC1HWC0",
    4: "FRACTAL_Z",
    12: "NC1HWC0_C04",
    16: "HWCN",
    27: "NDHWC",
    29: "FRACTAL_NZ",
    30: "NCDHW",
    32: "NDC1HWC0",
    33: "FRACTAL_Z_3D",
    35: "NC",
    47: "NCL",
    50: "FRACTAL_NZ_C0_16",
    51: "FRACTAL_NZ_C0_32",
}
NZ_FORMATS = frozenset((29, 50, 51))
PLAIN_FORMATS = frozenset((-1, 0, 1, 2, 16, 27, 30, 35, 47))
"""Formats whose storage is the tensor in C order; the others reorder or pad."""

# Csv files use these three in addition to the names in the table above.
_BY_NAME: dict[str, ElementType] = {
    **{kind.name: kind for kind in ACL_TYPES.values()},
    "float32": ACL_TYPES[0],
    "float64": ACL_TYPES[11],
    "bfloat16": ACL_TYPES[27],
}


def type_named(name: str) -> ElementType | None:
    """The type with a name from a csv file: `float16`, or `ACL_FLOAT16` in old files.

    >>> type_named("ACL_BF16").dtype
    'bfloat16'
    """
    return _BY_NAME.get(name.strip().lower().removeprefix("acl_"))


def format_name(code: int) -> str:
    return ACL_FORMATS.get(code, f"format {code}")


def recode(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: ElementType, elements: int) -> AnyArray:
    """Convert bytes of a type that numpy and torch lack to flat storage values of `kind.dtype`."""
    storage = DTYPES[kind.dtype].storage
    if kind.recoded == "bits":
        return np.unpackbits(raw, count=elements, bitorder="little").view(storage)
    # Four-bit codes are two to a byte.
    codes = unpack_nibbles(raw, elements) if kind.bits == 4 else raw[:elements]
    return _recoding(kind.name)[codes]


@functools.cache
def _recoding(name: str) -> AnyArray:
    """Storage value of our type for each foreign code."""
    if name == "hifloat8":
        return hifloat8_values().astype("<f2")
    if name == "float6_e3m2":
        values, target = _small_floats(3, 2, 3), "float8_e5m2"
    elif name == "float6_e2m3":
        values, target = _small_floats(2, 3, 1), "float8_e4m3fn"
    else:
        values, target = _small_floats(1, 2, 1), "float8_e5m2"
    # The sign is part of the key, because 0.0 == -0.0.
    code_of = {
        (float(value), math.copysign(1.0, value)): code
        for code, value in enumerate(value_table(target).tolist())
    }
    codes = [code_of[value, math.copysign(1.0, value)] for value in values]
    # A byte whose unused high bits are set has the same value as without them.
    return np.resize(np.array(codes, np.uint8), 256)


def _small_floats(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    """Every value of a float without infinities and NaN, by its code."""
    values: list[float] = []
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
        fraction = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        size = fraction * 2.0 ** (1 - bias)
        # An exponent of zero marks subnormal values, which have no hidden one.
        if exponent:
            size = (1 + fraction) * 2.0 ** (exponent - bias)
        values.append(-size if code >> (exponent_bits + mantissa_bits) else size)
    return values


@functools.cache
def hifloat8_values() -> AnyArray:
    """The value of each HiFloat8 code (arXiv 2409.16626).

    After the sign, a prefix gives the number of exponent bits (11: 4, 10: 3, 01: 2, 001: 1, 0001:
    0, 0000: a power of two from 2^-22 to 2^-16). The exponent consists of a sign and a number whose
    leading 1 is not stored; the remaining bits are the fraction. 0x80 is NaN; 0x6F and 0xEF are
    infinite.

    >>> [float(hifloat8_values()[code]) for code in (0x08, 0x6E, 0x01, 0x07)]
    [1.0, 32768.0, 2.384185791015625e-07, 1.52587890625e-05]
    """
    values = np.empty(256)
    for code in range(256):
        body = code & 0x7F
        sign = -1.0 if code & 0x80 else 1.0
        # Prefix 0000: the three bits after it are an exponent of two.
        if body < 8:
            size = 0.0 if body == 0 else 2.0 ** (body - 23)
        else:
            width, left = next(
                (width, left)
                for prefix, left, width in ((3, 5, 4), (2, 5, 3), (1, 5, 2), (1, 4, 1), (1, 3, 0))
                if body >> left == prefix
            )
            fraction_bits = left - width
            fraction = (body & (2**fraction_bits - 1)) / 2**fraction_bits
            exponent = 0
            if width:
                field = (body >> fraction_bits) & (2**width - 1)
                magnitude = (1 << (width - 1)) | (field & (2 ** (width - 1) - 1))
                exponent = -magnitude if field >> (width - 1) else magnitude
            size = np.inf if body == 0x6F else (1 + fraction) * 2.0**exponent
        values[code] = sign * size
    # The code of negative zero means NaN in this type.
    values[0x80] = np.nan
    return values
