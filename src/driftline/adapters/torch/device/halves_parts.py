"""Elements of 16 bits as the summary's kernel reads them: four words at a time, two in each.

Loads are written out as instructions: so they are 16 bytes wide, and made where they are said.
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

from driftline.adapters.torch.device.summary_parts import key


@triton.jit
def low_half(word, KIND: tl.constexpr):
    """The first of two elements of a 32-bit word."""
    if KIND == "bf16":
        x = (word << 16).to(tl.float32, bitcast=True)
    elif KIND == "f16":
        x = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "i16":
        x = (word & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True).to(tl.float32)
    else:  # u16
        x = (word & 0xFFFF).to(tl.float32)
    return x


@triton.jit
def high_half(word, KIND: tl.constexpr):
    if KIND == "bf16":
        x = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        x = low_half(word >> 16, KIND)
    return x


@triton.jit
def four_words(address, LEVEL: tl.constexpr):
    """Four words, one load; asked for when it is said, not when they are needed."""
    if LEVEL > 0:
        w_0, w_1, w_2, w_3 = tl.inline_asm_elementwise(
            "ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [address],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            False,
            1,
        )
    else:
        at = address.to(tl.pointer_type(tl.uint32))
        w_0, w_1, w_2, w_3 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return w_0, w_1, w_2, w_3


@triton.jit
def flip_at(address, LEVEL: tl.constexpr):
    """What a table says of a group: 5 bits of which word, the 13th whether halves are exchanged."""
    if LEVEL > 0:
        flip = tl.inline_asm_elementwise(
            "{ .reg .u16 h; ld.global.nc.u16 h, [$1]; cvt.u32.u16 $0, h; }",
            "=r,l",
            [address],
            tl.int32,
            False,
            1,
        )
    else:
        flip = tl.load(address.to(tl.pointer_type(tl.uint16))).to(tl.int32)
    return flip


@triton.jit
def eight_signs(address, LEVEL: tl.constexpr):
    if LEVEL > 0:
        signs = tl.inline_asm_elementwise(
            "{ .reg .u16 h; ld.global.nc.u8 h, [$1]; cvt.u32.u16 $0, h; }",
            "=r,l",
            [address],
            tl.uint32,
            False,
            1,
        )
    else:
        signs = tl.load(address.to(tl.pointer_type(tl.uint8))).to(tl.uint32)
    return signs


@triton.jit
def in_order(w_0, w_1, w_2, w_3, flip):
    """The words of a thread in the order of the buckets."""
    once = (flip & 1) != 0
    twice = (flip & 2) != 0
    a_0 = tl.where(once, w_1, w_0)
    a_1 = tl.where(once, w_0, w_1)
    a_2 = tl.where(once, w_3, w_2)
    a_3 = tl.where(once, w_2, w_3)
    return (
        tl.where(twice, a_2, a_0),
        tl.where(twice, a_3, a_1),
        tl.where(twice, a_0, a_2),
        tl.where(twice, a_1, a_3),
    )


@triton.jit
def hashed(a, b, w_0, w_1, w_2, w_3):
    """The digest's two sums after four more words."""
    a = a * 0xFF51AFD7ED558CCD + w_0.to(tl.uint64) * key(0) + w_1.to(tl.uint64) * key(1)
    b = b * 0xC4CEB9FE1A85EC53 + w_0.to(tl.uint64) * key(4) + w_1.to(tl.uint64) * key(5)
    a = a + w_2.to(tl.uint64) * key(2) + w_3.to(tl.uint64) * key(3)
    b = b + w_2.to(tl.uint64) * key(6) + w_3.to(tl.uint64) * key(7)
    return a, b


@triton.jit
def turned(word, flip):
    """The word with its halves exchanged where the group's lowest bit is flipped."""
    turn = (flip >> 8).to(tl.uint32)
    return (word >> turn) | (word << ((32 - turn) & 31))


@triton.jit
def eight_sums(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7
