"""The element types: how wide they are, how bytes become numbers, how finely they count.

A leaf: numpy and the standard library only. Names are torch's, without the `torch.` in front;
numpy's own names agree with them. Formats numpy has no type for (bfloat16, the float8 family,
packed int4) are stored as raw unsigned integers and decoded here, so nothing needs ml_dtypes on the
capture side.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Kind: TypeAlias = 'Literal["float", "complex", "int", "uint", "bool", "bits"]'
F64: TypeAlias = "npt.NDArray[np.float64]"


class DType(NamedTuple):
    """One element type.

    Attributes:
        name: torch's name without `torch.`.
        kind: float, complex, int, uint, bool, or bits for formats that are only stored.
        bits: Width of one element; 4 for packed formats, where a byte holds two elements, low
            nibble first.
        storage: The numpy dtype whose bytes are the elements' bytes (raw unsigned for foreign
            floats).
        safetensors: The safetensors tag when every reader of that format knows it, else U8 raw
            bytes.
        unit_roundoff: Half the distance from 1 to the next number; 0.0 for exact types.
        lowest: The most negative finite value: attention masks use it to mean minus infinity. 0.0
            if not a float.
    """

    name: str
    kind: Kind
    bits: int
    storage: str
    safetensors: str
    unit_roundoff: float = 0.0
    lowest: float = 0.0

    @property
    def is_floating(self) -> bool:
        return self.kind in ("float", "complex")

    def byte_count(self, elements: int) -> int:
        """How many bytes that many elements take; packed formats round up to a whole byte."""
        return (elements * self.bits + 7) // 8


def _float(name: str, bits: int, storage: str, tag: str, mantissa: int, largest: float) -> DType:
    return DType(name, "float", bits, storage, tag, 2.0 ** -(mantissa + 1), -largest)


_BF16_MAX = (2 - 2**-7) * 2.0**127
_F16_MAX = 65504.0
_F32_MAX = (2 - 2**-23) * 2.0**127
_F64_MAX = (2 - 2**-52) * 2.0**1023

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _float("float64", 64, "<f8", "F64", 52, _F64_MAX),
        _float("float32", 32, "<f4", "F32", 23, _F32_MAX),
        _float("float16", 16, "<f2", "F16", 10, _F16_MAX),
        _float("bfloat16", 16, "<u2", "BF16", 7, _BF16_MAX),
        _float("float8_e4m3fn", 8, "|u1", "F8_E4M3", 3, 448.0),
        _float("float8_e4m3fnuz", 8, "|u1", "U8", 3, 240.0),
        _float("float8_e5m2", 8, "|u1", "F8_E5M2", 2, 57344.0),
        _float("float8_e5m2fnuz", 8, "|u1", "U8", 2, 57344.0),
        # A scale format: powers of two only, no sign, so nothing can be its lowest value.
        DType("float8_e8m0fnu", "float", 8, "|u1", "U8", 0.5, 0.0),
        DType("float4_e2m1fn_x2", "float", 4, "|u1", "U8", 0.25, -6.0),
        DType("complex128", "complex", 128, "<c16", "U8", 2.0**-53),
        DType("complex64", "complex", 64, "<c8", "U8", 2.0**-24),
        DType("complex32", "complex", 32, "<u4", "U8", 2.0**-11),
        DType("int64", "int", 64, "<i8", "I64"),
        DType("int32", "int", 32, "<i4", "I32"),
        DType("int16", "int", 16, "<i2", "I16"),
        DType("int8", "int", 8, "|i1", "I8"),
        DType("uint64", "uint", 64, "<u8", "U64"),
        DType("uint32", "uint", 32, "<u4", "U32"),
        DType("uint16", "uint", 16, "<u2", "U16"),
        DType("uint8", "uint", 8, "|u1", "U8"),
        DType("bool", "bool", 8, "|b1", "BOOL"),
        DType("int4", "int", 4, "|u1", "U8"),
        DType("uint4", "uint", 4, "|u1", "U8"),
    )
}


def _minifloat_table(
    exponent_bits: int, mantissa_bits: int, bias: int, *, fnuz: bool, infinities: bool
) -> F64:
    """Every value of an 8-bit (or 4-bit) float, by its bit pattern."""
    width = 1 + exponent_bits + mantissa_bits
    codes = np.arange(2**width, dtype=np.int64)
    sign = np.where(codes >> (width - 1), -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = codes & (2**mantissa_bits - 1)
    subnormal: F64 = np.ldexp(mantissa / 2**mantissa_bits, 1 - bias)
    normal: F64 = np.ldexp(1 + mantissa / 2**mantissa_bits, exponent - bias)
    values: F64 = np.where(exponent == 0, subnormal, normal)
    values *= sign
    if fnuz:
        values[2 ** (width - 1)] = np.nan  # the pattern of minus zero is the only NaN
    elif infinities:
        top = exponent == 2**exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    elif width == 8:
        values[(codes & 0x7F) == 0x7F] = np.nan  # e4m3fn: no infinities, one NaN per sign
    return values


@functools.cache
def value_table(name: str) -> F64:
    """The value of each bit pattern of an 8-bit or 4-bit float format."""
    if name == "float8_e4m3fn":
        return _minifloat_table(4, 3, 7, fnuz=False, infinities=False)
    if name == "float8_e4m3fnuz":
        return _minifloat_table(4, 3, 8, fnuz=True, infinities=False)
    if name == "float8_e5m2":
        return _minifloat_table(5, 2, 15, fnuz=False, infinities=True)
    if name == "float8_e5m2fnuz":
        return _minifloat_table(5, 2, 16, fnuz=True, infinities=False)
    if name == "float8_e8m0fnu":
        table = np.ldexp(1.0, np.arange(256) - 127)
        table[255] = np.nan
        return table
    if name == "float4_e2m1fn_x2":
        return _minifloat_table(2, 1, 1, fnuz=False, infinities=False)
    raise KeyError(name)


def unpack_nibbles(raw: npt.NDArray[np.uint8], elements: int) -> npt.NDArray[np.uint8]:
    """Two 4-bit codes per byte, low nibble first, cut to the number of elements."""
    flat = raw.reshape(-1)
    codes = np.empty(flat.size * 2, np.uint8)
    codes[0::2] = flat & 0x0F
    codes[1::2] = flat >> 4
    return codes[:elements]


def to_float64(
    raw: npt.NDArray[np.generic], dtype: DType, elements: int | None = None
) -> npt.NDArray[np.generic]:
    """Decode storage values into float64 (complex128 for complex types), element for element.

    Args:
        raw: Array of `dtype.storage`; for 4-bit formats, of packed bytes.
        dtype: What the bytes mean.
        elements: Needed for 4-bit formats with an odd number of elements.

    64-bit integers beyond 2**53 are rounded here; compare those exactly, as integers, instead.
    """
    if dtype.name == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name == "complex32":
        return raw.reshape(-1).view("<f2").astype(np.float64).view(np.complex128).reshape(raw.shape)
    if dtype.bits == 4:
        packed = raw.view(np.uint8)
        codes = unpack_nibbles(packed, packed.size * 2 if elements is None else elements)
        if dtype.kind == "float":
            return value_table(dtype.name)[codes]
        signed = codes.astype(np.int8)
        if dtype.kind == "int":
            signed = np.where(signed > 7, signed - 16, signed)
        return signed.astype(np.float64)
    if dtype.kind == "float" and dtype.bits == 8:
        return value_table(dtype.name)[raw.astype(np.intp)]
    if dtype.kind == "complex":
        return raw.astype(np.complex128)
    return raw.astype(np.float64)


def coarser(a: DType, b: DType) -> DType:
    """The one that counts less finely; the first when they count alike."""
    return b if b.unit_roundoff > a.unit_roundoff else a
