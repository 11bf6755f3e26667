# pyright: basic, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Elements of a pair as numbers, and the distance of two of them in steps of their format."""

# Kernels are compiled from their text; types mean something else in them.
# `from __future__ import annotations` would turn the arguments' types into text.
import triton
import triton.language as tl

from driftline.numerics.gpu.kernels.summary import largest_pair, smallest_pair


@triton.jit
def elements(address, KIND: tl.constexpr):
    if KIND == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "f16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif KIND == "e4m3" or KIND == "e5m2":
        pointer = address.to(tl.pointer_type(tl.uint8))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return pointer


@triton.jit
def pairs_of(address, KIND: tl.constexpr):
    """Where pairs of elements are."""
    if KIND == "f32":
        pointer = address.to(tl.pointer_type(tl.uint64))
    elif KIND == "e4m3" or KIND == "e5m2":
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint32))
    return pointer


@triton.jit
def halves(word, KIND: tl.constexpr):
    """A pair of elements; one of 8-bit floats as a pair of float16, which sort and differ alike.

    The patterns are those of the 8 bits moved up, so numbers of e4m3 come out 2 ** 8 times too
    small: float16's exponent is biased by 15, theirs by 7. By hand: only recent devices have e4m3.
    """
    if KIND == "e5m2":
        word = word.to(tl.uint32)
        word = ((word & 0xFF00) << 16) | ((word & 0x00FF) << 8)
    elif KIND == "e4m3":
        word = word.to(tl.uint32)
        word = ((word & 0xFF00) << 8) | (word & 0x00FF)
        size = word & 0x007F007F
        # The greatest size is NaN; adding 1 carries into the bit above, and float16 then has all
        # bits of its exponent.
        nan = (size + 0x00010001) & 0x00800080
        word = ((word & 0x00800080) << 8) | (size << 7) | (nan << 7)
    return word


@triton.jit
def value_of(element, KIND: tl.constexpr):
    """An element as it is stored, as float32."""
    if KIND == "e4m3" or KIND == "e5m2":
        x = half_of(halves(element, KIND), 0, KIND)
    else:
        x = element.to(tl.float32)
    return x


@triton.jit
def half_of(word, HALF: tl.constexpr, KIND: tl.constexpr):
    """One element of a pair of `halves`, as float32."""
    if KIND == "f32":
        x = (word >> (32 * HALF)).to(tl.uint32).to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        if HALF == 0:
            x = (word << 16).to(tl.float32, bitcast=True)
        else:
            x = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        x = (word >> (16 * HALF)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        if KIND == "e4m3":
            x *= 256.0
    return x


@triton.jit
def ordinal(x, KIND: tl.constexpr):
    """Where a float32 number, rounded to a format, stands in it; negative ones below zero.

    Of an 8-bit float, which must be of the format already: where it stands among float16.
    """
    bits = x.to(tl.int32, bitcast=True)
    if KIND == "f32":
        size = (bits & 0x7FFFFFFF).to(tl.int64)
    elif KIND == "bf16":
        size = bits & 0x7FFFFFFF
        size = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    elif KIND == "e4m3":
        size = tl.abs(x * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
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
def apart_bits(r, c, KIND: tl.constexpr):
    """How far two float32 are apart, or 65536 times that for two bfloat16; not negative."""
    ours_sorted = sorted_bits(r)
    theirs_sorted = sorted_bits(c)
    most = tl.maximum(ours_sorted, theirs_sorted).to(tl.uint32, bitcast=True)
    apart = most - tl.minimum(ours_sorted, theirs_sorted).to(tl.uint32, bitcast=True)
    if KIND == "f32":  # off by one where only one of them is below zero
        apart -= ((ours_sorted ^ theirs_sorted).to(tl.uint32, bitcast=True)) >> 31
    return apart


@triton.jit
def apart_numbers(r, c, KIND: tl.constexpr):
    """How many numbers of the candidate's format two float32 are apart; 8-bit ones as `halves`."""
    return tl.abs(ordinal(r, KIND) - known_ordinal(c, KIND))


@triton.jit
def own_steps(apart, KIND: tl.constexpr):
    """A distance of `halves` of 8-bit floats in steps of these; any other as it is."""
    if KIND == "e4m3":
        apart = apart >> 7
    elif KIND == "e5m2":
        apart = apart >> 8
    return apart


@triton.jit
def sortable_pair(word):
    """The patterns of two 16-bit floats as unsigned numbers that sort like the floats."""
    # 0xFFFF for a half that is below zero: each byte repeats the sign of the half it is in.
    below = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0xBB99;", "=r,r", [word], tl.uint32, True, 1
    )
    return word ^ (below | 0x80008000)


@triton.jit
def apart_pair(ours, theirs):
    """How many numbers of their 16-bit format the halves of two words are apart."""
    a, b = sortable_pair(ours), sortable_pair(theirs)
    # The greater minus the smaller one borrows nothing from the other half. Both zeros are one
    # number, so floats of unlike signs are one less apart than their patterns.
    return largest_pair(a, b) - smallest_pair(a, b) - (((ours ^ theirs) >> 15) & 0x00010001)
