"""The table of element types: bit layout, storage, names in other tools, and derived values.

Names are torch's, without `torch.`; numpy's names are the same. Formats that numpy has no type for
(bfloat16, the float8 family, packed int4) are stored as raw unsigned integers and decoded here, so
captures do not need ml_dtypes. The C kernel uses the same table: `csrc/generate_tables.py` converts
it to a header when the library is built. That happens in an environment without numpy, so numpy is
imported inside the functions that decode.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kind: TypeAlias = Literal["float", "complex", "int", "uint", "bool", "bits"]
F64: TypeAlias = "npt.NDArray[np.float64]"

Special: TypeAlias = Literal["ieee", "nan_only", "minus_zero_nan", "finite", "scale"]
"""Which special values a float format has.

- ieee: infinities and NaN in the highest exponent.
- nan_only: the highest magnitude of either sign is NaN; no infinity (float8_e4m3fn).
- minus_zero_nan: the pattern of minus zero is the only NaN; no infinity (the `fnuz` formats).
- finite: every pattern is a number (float4).
- scale: powers of two without a sign; the highest pattern is NaN (float8_e8m0fnu).
"""


class DType(NamedTuple):
    """One element type.

    Attributes:
        name: torch's name without `torch.`.
        kind: float, complex, int, uint, bool, or bits for formats that are stored but not decoded.
        bits: Width of one element; 4 for packed formats, where a byte holds two elements, low
            nibble first.
        storage: The numpy dtype that holds the elements' bytes (raw unsigned integers for floats
            that numpy lacks).
        safetensors: The safetensors tag if every reader of that format knows it, otherwise U8 for
            raw bytes.
        exponent: Number of exponent bits of a float.
        mantissa: Number of stored mantissa bits of a float.
        bias: Exponent bias of a float.
        special: Which special values a float has; None for other types.
        component: Name of the real type of which a complex element holds two; otherwise the type's
            own name.
        onnx: ONNX's number of the type (`TensorProto.DataType`); 0 if it has none.
        ml_dtypes: The type's name in `ml_dtypes`; empty if numpy has the type itself.
        triton: Name of the number type in our Triton kernels; empty if they cannot read it.
        unit_roundoff: Half the distance from 1 to the next number; 0.0 for exact types.
        lowest: The most negative finite value, which attention masks use for minus infinity. 0.0
            for types that are not floats.
    """

    name: str
    kind: Kind
    bits: int
    storage: str
    safetensors: str
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    special: Special | None = None
    component: str = ""
    onnx: int = 0
    ml_dtypes: str = ""
    triton: str = ""
    unit_roundoff: float = 0.0
    lowest: float = 0.0

    @property
    def is_floating(self) -> bool:
        return self.kind in ("float", "complex")

    @property
    def reals(self) -> int:
        """Number of reals in one element."""
        return 2 if self.kind == "complex" else 1

    @property
    def has_sentinel(self) -> bool:
        """Whether the lowest value means -inf, as in attention masks of 16 bits or more."""
        return self.kind == "float" and self.bits >= 16

    @property
    def smallest_normal_exponent(self) -> int:
        """Exponent of the smallest normal number of a float format."""
        # A scale has no subnormal numbers, so its lowest pattern counts as a normal number.
        return -self.bias if self.special == "scale" else 1 - self.bias

    @property
    def past_largest(self) -> int:
        """The pattern after a float format's largest; also the count of its numbers from 0 up."""
        if self.special == "ieee":
            return (2**self.exponent - 1) << self.mantissa
        patterns = 1 << (self.exponent + self.mantissa)
        return patterns - 1 if self.special == "nan_only" else patterns

    def byte_count(self, elements: int) -> int:
        """Number of bytes of so many elements; packed formats round up to a whole byte."""
        return (elements * self.bits + 7) // 8

    def value(self, pattern: int) -> float:
        """The number that a bit pattern of a float format represents.

        >>> DTYPES["float16"].value(0x3C00), DTYPES["float8_e4m3fnuz"].value(0x80)
        (1.0, nan)
        """
        if self.special == "scale":
            return math.nan if pattern == 0xFF else math.ldexp(1.0, pattern - self.bias)
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        magnitude = pattern & ((1 << (self.bits - 1)) - 1)
        if self.special == "minus_zero_nan" and sign < 0 and magnitude == 0:
            return math.nan
        if magnitude >= self.past_largest:
            is_infinity = self.special == "ieee" and magnitude == self.past_largest
            return sign * math.inf if is_infinity else math.nan
        exponent = magnitude >> self.mantissa
        fraction = magnitude & ((1 << self.mantissa) - 1)
        if exponent:
            fraction += 1 << self.mantissa
        return sign * math.ldexp(fraction, max(exponent, 1) - self.bias - self.mantissa)


def _float(
    name: str,
    storage: str,
    tag: str,
    layout: tuple[int, int, int, Special],
    onnx: int,
    ml_dtypes: str = "",
    triton: str = "",
) -> DType:
    """A float format from its layout: exponent bits, mantissa bits, bias, special values."""
    exponent, mantissa, bias, special = layout
    plain = DType(
        name=name,
        kind="float",
        bits=exponent + mantissa + (special != "scale"),
        storage=storage,
        safetensors=tag,
        exponent=exponent,
        mantissa=mantissa,
        bias=bias,
        special=special,
        component=name,
        onnx=onnx,
        ml_dtypes=ml_dtypes,
        triton=triton,
        unit_roundoff=2.0 ** -(mantissa + 1),
    )
    # A scale has no sign, so it has no lowest value.
    largest = 0.0 if special == "scale" else plain.value(plain.past_largest - 1)
    return plain._replace(lowest=-largest if largest else 0.0)


def _integer(name: str, kind: Kind, bits: int, storage: str, tag: str, **names: Any) -> DType:
    return DType(name, kind, bits, storage, tag, component=name, **names)


def _complex(name: str, component: DType, storage: str, onnx: int) -> DType:
    return DType(
        *(name, "complex", 2 * component.bits, storage, "U8"),
        component=component.name,
        onnx=onnx,
        unit_roundoff=component.unit_roundoff,
    )


_F64 = _float("float64", "<f8", "F64", (11, 52, 1023, "ieee"), 11, triton="f64")
_F32 = _float("float32", "<f4", "F32", (8, 23, 127, "ieee"), 1, triton="f32")
_F16 = _float("float16", "<f2", "F16", (5, 10, 15, "ieee"), 10, triton="f16")
_E4M3, _E4M3_FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
_E5M2, _E5M2_FNUZ = "float8_e5m2", "float8_e5m2fnuz"
_E8M0, _E2M1 = "float8_e8m0fnu", "float4_e2m1fn"

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _F64,
        _F32,
        _F16,
        _float("bfloat16", "<u2", "BF16", (8, 7, 127, "ieee"), 16, "bfloat16", "bf16"),
        _float(_E4M3, "|u1", "F8_E4M3", (4, 3, 7, "nan_only"), 17, _E4M3, "e4m3"),
        _float(_E4M3_FNUZ, "|u1", "U8", (4, 3, 8, "minus_zero_nan"), 18, _E4M3_FNUZ),
        _float(_E5M2, "|u1", "F8_E5M2", (5, 2, 15, "ieee"), 19, _E5M2, "e5m2"),
        _float(_E5M2_FNUZ, "|u1", "U8", (5, 2, 16, "minus_zero_nan"), 20, _E5M2_FNUZ),
        _float(_E8M0, "|u1", "U8", (8, 0, 127, "scale"), 24, _E8M0),
        _float(f"{_E2M1}_x2", "|u1", "U8", (2, 1, 1, "finite"), 23, _E2M1),
        _complex("complex128", _F64, "<c16", 15),
        _complex("complex64", _F32, "<c8", 14),
        _complex("complex32", _F16, "<u4", 0),
        _integer("int64", "int", 64, "<i8", "I64", onnx=7, triton="i64"),
        _integer("int32", "int", 32, "<i4", "I32", onnx=6, triton="i32"),
        _integer("int16", "int", 16, "<i2", "I16", onnx=5, triton="i16"),
        _integer("int8", "int", 8, "|i1", "I8", onnx=3, triton="i8"),
        _integer("uint64", "uint", 64, "<u8", "U64", onnx=13, triton="u64"),
        _integer("uint32", "uint", 32, "<u4", "U32", onnx=12, triton="u32"),
        _integer("uint16", "uint", 16, "<u2", "U16", onnx=4, triton="u16"),
        _integer("uint8", "uint", 8, "|u1", "U8", onnx=2, triton="u8"),
        _integer("bool", "bool", 8, "|b1", "BOOL", onnx=9, triton="b8"),
        _integer("int4", "int", 4, "|u1", "U8", onnx=22),
        _integer("uint4", "uint", 4, "|u1", "U8", onnx=21),
    )
}

C_CODES: dict[str, int] = {
    name: code
    for code, name in enumerate(name for name, d in DTYPES.items() if d.kind != "complex")
}
"""C's number of each real type; a complex type reaches C as twice as many reals."""


class Pattern(NamedTuple):
    """The bit patterns of one float format; a complex type is two reals.

    Attributes:
        name: The element type, as in `DTYPES`.
        bits: Number of bits of one real.
        reals: Number of reals in an element.
        normal: Magnitude pattern of the smallest normal number.
        top: Magnitude pattern of the largest finite number.
        infinity: Magnitude pattern of infinity; 0 if the format has none.
        odd_nan: Whether the pattern of minus zero is the only NaN.
        mantissa: Bits of the mantissa.
        largest: The largest finite value.
    """

    name: str
    bits: int
    reals: int
    normal: int
    top: int
    infinity: int
    odd_nan: bool
    mantissa: int
    largest: float

    @property
    def mask(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def narrow(self) -> bool:
        """Whether large activations can reach the format's limit: formats of up to 16 bits."""
        return self.bits <= 16

    def value(self, magnitude: int) -> float:
        """The number that a magnitude pattern represents."""
        if magnitude > self.mask:  # the kernel returns this for a NaN that looks like minus zero
            return math.nan
        return DTYPES[DTYPES[self.name].component].value(magnitude)

    def headroom(self, magnitude: int) -> float:
        """Number of powers of two between a magnitude and the format's largest value; 0 at the
        limit.

        >>> round(PATTERNS["float16"].headroom(0x7800), 3)  # 32768 of 65504
        0.999
        """
        if magnitude > self.top:
            return 0.0
        value = self.value(magnitude)
        return math.log2(self.largest) - math.log2(value) if value else math.inf


def _pattern(dtype: DType) -> Pattern:
    real = DTYPES[dtype.component]
    top = real.past_largest - 1
    return Pattern(
        name=dtype.name,
        bits=real.bits,
        reals=dtype.reals,
        normal=1 << real.mantissa,
        top=top,
        infinity=top + 1 if real.special == "ieee" else 0,
        odd_nan=real.special == "minus_zero_nan",
        mantissa=real.mantissa,
        largest=-real.lowest,
    )


PATTERNS: dict[str, Pattern] = {
    name: _pattern(dtype)
    for name, dtype in DTYPES.items()
    if dtype.is_floating and DTYPES[dtype.component].special not in ("scale", "finite")
}
"""Formats that have non-finite values; scales and packed formats are left out."""


@functools.cache
def value_table(name: str) -> F64:
    """The value of each bit pattern of an 8-bit or 4-bit float format."""
    import numpy as np

    dtype = DTYPES[name]
    if dtype.kind != "float" or dtype.bits > 8:
        raise KeyError(name)
    return np.array([dtype.value(pattern) for pattern in range(1 << dtype.bits)])


def unpack_nibbles(raw: npt.NDArray[np.uint8], elements: int) -> npt.NDArray[np.uint8]:
    """Unpack two 4-bit codes per byte, low nibble first, cut to the number of elements."""
    import numpy as np

    flat = raw.reshape(-1)
    codes = np.empty(flat.size * 2, np.uint8)
    codes[0::2] = flat & 0x0F
    codes[1::2] = flat >> 4
    return codes[:elements]


def to_float64(
    raw: npt.NDArray[np.generic], dtype: DType, elements: int | None = None
) -> npt.NDArray[np.generic]:
    """Decode storage values to float64 (complex128 for complex types), element by element.

    Args:
        raw: Array of `dtype.storage`; for 4-bit formats, packed bytes.
        dtype: Element type of the bytes.
        elements: Needed for 4-bit formats with an odd number of elements.

    64-bit integers beyond 2**53 are rounded here; to compare them exactly, compare integers.
    """
    import numpy as np

    with np.errstate(invalid="ignore"):  # a signalling NaN is treated like any NaN
        return _decoded(raw, dtype, elements)


def _decoded(
    raw: npt.NDArray[np.generic], dtype: DType, elements: int | None
) -> npt.NDArray[np.generic]:
    import numpy as np

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
    """The type with the lower precision; the first if both are equal."""
    return b if b.unit_roundoff > a.unit_roundoff else a
