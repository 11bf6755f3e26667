"""What the kernel for pairs is made of: elements as numbers, distances, sums of threads."""

# Kernels are compiled from their text; types mean something else in them.
# pyright: basic, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# `from __future__ import annotations` would turn the arguments' types into text.
import triton
import triton.language as tl


@triton.jit
def elements(address, KIND: tl.constexpr):
    if KIND == "bf16":
        at = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "f16":
        at = address.to(tl.pointer_type(tl.float16))
    else:
        at = address.to(tl.pointer_type(tl.float32))
    return at


@triton.jit
def pairs_of(address, KIND: tl.constexpr):
    """Where pairs of elements lie."""
    if KIND == "f32":
        at = address.to(tl.pointer_type(tl.uint64))
    else:
        at = address.to(tl.pointer_type(tl.uint32))
    return at


@triton.jit
def half_of(word, HALF: tl.constexpr, KIND: tl.constexpr):
    """One element of a pair, as float32."""
    if KIND == "f32":
        x = (word >> (32 * HALF)).to(tl.uint32).to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        if HALF == 0:
            x = (word << 16).to(tl.float32, bitcast=True)
        else:
            x = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        x = (word >> (16 * HALF)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def ordinal(x, KIND: tl.constexpr):
    """Where a float32 number, rounded to a format, stands in it; negative ones below zero."""
    bits = x.to(tl.int32, bitcast=True)
    if KIND == "f32":
        size = (bits & 0x7FFFFFFF).to(tl.int64)
    elif KIND == "bf16":
        size = bits & 0x7FFFFFFF
        size = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    else:
        size = tl.abs(x).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, -size, size)


@triton.jit
def known_ordinal(x, KIND: tl.constexpr):
    """The same for a number that is of the format already."""
    bits = x.to(tl.int32, bitcast=True)
    if KIND == "bf16":
        size = (bits & 0x7FFFFFFF) >> 16
        place = tl.where(bits < 0, -size, size)
    else:
        place = ordinal(x, KIND)
    return place


@triton.jit
def sorted_bits(x):
    """A float32's bits, so that they sort like the numbers; below zero they are off by one."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def one_over(x, TOGETHER: tl.constexpr):
    """About `1 / x`, without the care that a division takes; what is too small is infinite."""
    if TOGETHER:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def joined(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14,
):  # fmt: skip
    """Figures of two threads as one: nine sums, four greatest, two least."""
    return (
        a0 + b0,
        a1 + b1,
        a2 + b2,
        a3 + b3,
        a4 + b4,
        a5 + b5,
        a6 + b6,
        a7 + b7,
        a8 + b8,
        tl.maximum(a9, b9),
        tl.maximum(a10, b10),
        tl.maximum(a11, b11),
        tl.maximum(a12, b12),
        tl.minimum(a13, b13),
        tl.minimum(a14, b14),
    )


@triton.jit
def ahead(ours, theirs, at, U: tl.constexpr, there):
    """Pairs of elements of both sides, from element `at` on; zeros if there are none."""
    place = at // 2 + U * 256
    mask = tl.arange(0, 256) < tl.where(there, 256, 0)
    return tl.load(ours + place, mask=mask, other=0), tl.load(theirs + place, mask=mask, other=0)


@triton.jit
def left_pair(
    rows_at, row,
    n, x_1, e_1, xx, xe, ee, ae_1, rel_1, out_1, dif_1, rn, cn, rx, cy, rxx, cyy, r_nan, c_nan,
    r_pos, c_pos, r_neg, c_neg, lone, ae_m, rel_m, ulp_m, r_top, c_top, r_low, c_low, shift_64,
):  # fmt: skip
    """Leave the figures of a program in its row; see `pair_joining.joined_pair` for the fields."""
    out = rows_at.to(tl.pointer_type(tl.float64)) + row * 40
    rr = xx + 2.0 * shift_64 * x_1 + n * shift_64 * shift_64
    re = xe + shift_64 * e_1
    tl.store(out + 0, n)
    tl.store(out + 1, x_1 + n * shift_64)
    tl.store(out + 2, x_1 + n * shift_64 + e_1)
    tl.store(out + 3, rr)
    tl.store(out + 4, rr + 2.0 * re + ee)
    tl.store(out + 5, rr + re)
    tl.store(out + 6, ee)
    tl.store(out + 7, ae_1)
    tl.store(out + 8, rel_1)
    tl.store(out + 9, out_1)
    tl.store(out + 10, dif_1)
    tl.store(out + 11, rn)
    tl.store(out + 12, cn)
    tl.store(out + 13, rx + rn * shift_64)
    tl.store(out + 14, cy + cn * shift_64)
    tl.store(out + 15, rxx + 2.0 * shift_64 * rx + rn * shift_64 * shift_64)
    tl.store(out + 16, cyy + 2.0 * shift_64 * cy + cn * shift_64 * shift_64)
    r_some = tl.maximum(rn, 1.0)
    c_some = tl.maximum(cn, 1.0)
    tl.store(out + 17, tl.maximum(rxx - rx * (rx / r_some), 0.0))
    tl.store(out + 18, tl.maximum(cyy - cy * (cy / c_some), 0.0))
    tl.store(out + 19, r_nan)
    tl.store(out + 20, c_nan)
    tl.store(out + 21, r_pos)
    tl.store(out + 22, c_pos)
    tl.store(out + 23, r_neg)
    tl.store(out + 24, c_neg)
    tl.store(out + 25, lone)
    tl.store(out + 26, ae_m)
    tl.store(out + 27, rel_m)
    tl.store(out + 28, ulp_m)
    tl.store(out + 29, r_top)
    tl.store(out + 30, c_top)
    tl.store(out + 31, r_low)
    tl.store(out + 32, c_low)
    tl.store(out + 33, rx / r_some + shift_64)
    tl.store(out + 34, cy / c_some + shift_64)
