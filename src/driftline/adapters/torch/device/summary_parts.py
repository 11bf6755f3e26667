"""What the summary's kernels share: hashes, signs, extremes of packed pairs, sums of threads.

The sketch is that of `numerics/definitions.py`; its tables, filled here once, tell for every group
of 64 elements which signs they have and where they go.
"""

# Kernels are compiled from their text; types mean something else in them.
# pyright: basic, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# `from __future__ import annotations` would turn the arguments' types into text.
import triton
import triton.language as tl

WARPS = 8
"""Warps of a program that reads a tensor."""


@triton.jit
def mixed(z):
    """A 64-bit hash of each 64-bit number."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _exchanged(z, mask, by):
    return ((z & mask) << by) | ((z >> by) & mask)


@triton.jit
def sketch_tables(signs_at: tl.int64, flips_at: tl.int64, first: tl.int64, BLOCK: tl.constexpr):
    """Fill the sketch's tables: signs in the order of the buckets, and the XOR of each group."""
    group = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = mixed((group + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    flip = (z * 0xD6E8FEB86659FD93) >> 58
    # Bit b of what is stored is bit b ^ flip of the hash: six exchanges of neighbours.
    z = tl.where((flip & 1) != 0, _exchanged(z, 0x5555555555555555, 1), z)
    z = tl.where((flip & 2) != 0, _exchanged(z, 0x3333333333333333, 2), z)
    z = tl.where((flip & 4) != 0, _exchanged(z, 0x0F0F0F0F0F0F0F0F, 4), z)
    z = tl.where((flip & 8) != 0, _exchanged(z, 0x00FF00FF00FF00FF, 8), z)
    z = tl.where((flip & 16) != 0, _exchanged(z, 0x0000FFFF0000FFFF, 16), z)
    z = tl.where((flip & 32) != 0, _exchanged(z, 0x00000000FFFFFFFF, 32), z)
    tl.store(signs_at.to(tl.pointer_type(tl.uint64)) + group, z)
    # As the kernels want it: which word of pairs of elements, and whether its halves are exchanged.
    tl.store(
        flips_at.to(tl.pointer_type(tl.uint16)) + group,
        ((flip >> 1) | ((flip & 1) << 12)).to(tl.uint16),
    )


@triton.jit
def signed(x, signs, place):
    """`x`, the other way round where bit `place` of the signs is set."""
    high = (signs << (31 - place)) & 0x80000000
    if x.dtype == tl.float64:
        y = (x.to(tl.uint64, bitcast=True) ^ (high.to(tl.uint64) << 32)).to(
            tl.float64, bitcast=True
        )
    else:
        y = (x.to(tl.uint32, bitcast=True) ^ high).to(tl.float32, bitcast=True)
    return y


@triton.jit
def least_pair(low, word, KIND: tl.constexpr):
    """The smaller of two packed pairs, half by half; NaN is passed over."""
    if KIND == "bf16":
        found = tl.inline_asm_elementwise(
            "min.bf16x2 $0, $1, $2;", "=r,r,r", [low, word], tl.uint32, True, 1
        )
    else:
        found = tl.inline_asm_elementwise(
            "min.f16x2 $0, $1, $2;", "=r,r,r", [low, word], tl.uint32, True, 1
        )
    return found


@triton.jit
def smallest_pair(least, word):
    """The smaller of two pairs of unsigned 16-bit numbers."""
    return tl.inline_asm_elementwise(
        "min.u16x2 $0, $1, $2;", "=r,r,r", [least, word], tl.uint32, True, 1
    )


@triton.jit
def greatest_pair(high, word, KIND: tl.constexpr):
    if KIND == "bf16":
        found = tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [high, word], tl.uint32, True, 1
        )
    else:
        found = tl.inline_asm_elementwise(
            "max.f16x2 $0, $1, $2;", "=r,r,r", [high, word], tl.uint32, True, 1
        )
    return found


@triton.jit
def key(U: tl.constexpr):
    """The keys of the digest: odd, and without a pattern."""
    if U == 0:
        key = 0x9E3779B97F4A7C15
    elif U == 1:
        key = 0xC2B2AE3D27D4EB4F
    elif U == 2:
        key = 0x165667B19E3779F9
    elif U == 3:
        key = 0xD6E8FEB86659FD93
    elif U == 4:
        key = 0xA0761D6478BD642F
    elif U == 5:
        key = 0xE7037ED1A0B428DB
    elif U == 6:
        key = 0x8EBC6AF09C88C6E3
    else:
        key = 0x589965CC75374CC3
    return key


@triton.jit
def added(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9):
    """How the figures of two threads become one: sums, but for the two extremes."""
    return (
        a0 + b0,
        a1 + b1,
        a2 + b2,
        a3 + b3,
        a4 + b4,
        a5 + b5,
        a6 + b6,
        a7 + b7,
        tl.minimum(a8, b8),
        tl.maximum(a9, b9),
    )


@triton.jit
def known_apart(x, fine, LOWEST: tl.constexpr, FLOAT: tl.constexpr):
    """Of one element: whether it is finite, NaN, plus infinity, minus infinity."""
    nan = fine & (x != x)
    above = fine & (x == float("inf"))
    below = fine & (x == float("-inf"))
    if FLOAT:
        if LOWEST != 0.0:
            below = below | (fine & (x == LOWEST))
        fine = fine & (x - x == 0.0) & ~below
    return fine, nan, above, below


@triton.jit
def together(
    sum_1, sum_2, seen, zeros, nans, infinite, digest_a, digest_b, low, high,
    FLAT: tl.constexpr, LEVEL: tl.constexpr,
):  # fmt: skip
    """The figures of all threads of a program as one.

    At once on a device: a dozen reductions one by one take longer than a small tensor.
    """
    sum_1, sum_2 = tl.reshape(sum_1, [FLAT]), tl.reshape(sum_2, [FLAT])
    seen, zeros = tl.reshape(seen, [FLAT]), tl.reshape(zeros, [FLAT])
    nans, infinite = tl.reshape(nans, [FLAT]), tl.reshape(infinite, [FLAT])
    digest_a, digest_b = tl.reshape(digest_a, [FLAT]), tl.reshape(digest_b, [FLAT])
    low, high = tl.reshape(low, [FLAT]), tl.reshape(high, [FLAT])
    if LEVEL > 0:
        total, squares, seen_, zeros_, nans_, infinite_, a, b, least, most = tl.reduce(
            (sum_1, sum_2, seen, zeros, nans, infinite, digest_a, digest_b, low, high), 0, added
        )
    else:
        total, squares = tl.sum(sum_1, 0), tl.sum(sum_2, 0)
        seen_, zeros_ = tl.sum(seen, 0), tl.sum(zeros, 0)
        nans_, infinite_ = tl.sum(nans, 0), tl.sum(infinite, 0)
        a, b = tl.sum(digest_a, 0), tl.sum(digest_b, 0)
        least, most = tl.min(low, 0), tl.max(high, 0)
    return total, squares, seen_, zeros_, nans_, infinite_, a, b, least, most


@triton.jit
def left_row(
    rows_at, row, count, shift, total, squares, zeros, nans, infinite, digest_a, digest_b, low, high
):  # fmt: skip
    """Leave the figures of a program in a row of the arena, all but the sketch."""
    finite = count.to(tl.float64)
    mean = total / tl.maximum(finite, 1.0)
    out = rows_at.to(tl.pointer_type(tl.float64)) + row * 80
    tl.store(out + 0, finite)
    tl.store(out + 1, mean + tl.where(finite > 0.0, shift, 0.0))
    tl.store(out + 2, tl.maximum(squares - total * mean, 0.0))
    tl.store(out + 3, low.to(tl.float64))
    tl.store(out + 4, high.to(tl.float64))
    tl.store(out + 5, zeros.to(tl.float64))
    tl.store(out + 6, nans.to(tl.float64))
    tl.store(out + 7, (infinite & 0xFFFFFFFF).to(tl.float64))
    tl.store(out + 8, (infinite >> 32).to(tl.float64))
    bits = rows_at.to(tl.pointer_type(tl.uint64)) + row * 80
    tl.store(bits + 9, digest_a)
    tl.store(bits + 10, digest_b)
