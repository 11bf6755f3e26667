"""The summary of a device tensor in one pass over its memory, as Triton kernels.

The figures are those of `numerics/definition.py`, the sketch is that of `numerics/sketch.py`; the
digest is that of `digests.py`, because xxh3 can only be made by one thread after the other. Kernels
take addresses as plain numbers: whoever launches them keeps the memory alive.

One program takes some chunks of a tensor and leaves a row of partial figures. It reads fast first,
without a mask, and looks at its sums afterwards: if something was not finite, or a mask's
sentinel, it reads its chunks again carefully. A second kernel joins the rows of every tensor, in
their order, so that the result does not depend on which program was faster, or on the device.
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

ROW = 80
"""Numbers of one row: figures first, the 64 of the sketch from `SKETCH_AT` on."""
SKETCH_AT = 16
CHUNK = 32768
"""Elements of a chunk, of which a program takes some."""
WARPS = 8


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
def _decoded(word, KIND: tl.constexpr):
    """One element of a word as a number: float32 where that holds it, else float64."""
    if KIND == "f32":
        x = word.to(tl.float32, bitcast=True)
    elif KIND == "f64":
        x = word.to(tl.float64, bitcast=True)
    elif KIND == "i32":
        x = word.to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == "i64":
        x = word.to(tl.int64, bitcast=True).to(tl.float64)
    elif KIND == "u8":
        x = word.to(tl.float32)
    elif KIND == "i8":
        x = word.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "b8":
        x = (word != 0).to(tl.float32)
    elif KIND == "e4m3":
        # By hand: only recent devices have the format.
        code = (word & 0x7F).to(tl.uint32)
        normal = (code << 20) + 0x3C000000
        small = code.to(tl.float32) * 0.001953125
        x = tl.where(code >= 8, normal.to(tl.float32, bitcast=True), small)
        x = tl.where(code == 0x7F, float("nan"), x)
        x = tl.where((word & 0x80) != 0, -x, x)
    elif KIND == "e5m2":
        x = (word.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # u32, u64
        x = word.to(tl.float64)
    return x


@triton.jit
def _low(word, KIND: tl.constexpr):
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
def _high(word, KIND: tl.constexpr):
    if KIND == "bf16":
        x = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        x = _low(word >> 16, KIND)
    return x


@triton.jit
def _signed(x, signs, place):
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
def _least_pair(low, word, KIND: tl.constexpr):
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
def _smallest_pair(least, word):
    """The smaller of two pairs of unsigned 16-bit numbers."""
    return tl.inline_asm_elementwise(
        "min.u16x2 $0, $1, $2;", "=r,r,r", [least, word], tl.uint32, True, 1
    )


@triton.jit
def _greatest_pair(high, word, KIND: tl.constexpr):
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
def _key(U: tl.constexpr):
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
def _added(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9):
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
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def summary_rows(
    address: tl.int64,
    count: tl.int64,
    each: tl.int64,
    rows_at: tl.int64,
    row: tl.int64,
    meta_at: tl.int64,
    slot: tl.int64,
    signs_at: tl.int64,
    flips_at: tl.int64,
    nothing: tl.int64,
    KIND: tl.constexpr,
    LOWEST: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Partial figures of one tensor: each program leaves row `row + program` of the arena.

    Args:
        address: Where its elements begin, in C order.
        count: How many there are.
        each: Chunks of one program.
        rows_at: The arena of rows.
        row: The first row of this tensor.
        meta_at: For the joining kernel: first row and number of rows of each slot.
        slot: This tensor's.
        signs_at: Table of the sketch, for as many groups as the tensor has.
        flips_at: Likewise.
        nothing: 0, which the compiler must not know: it would spread the table's loads over threads
            as if they were the main thing, and shuffle everything else to fit.
        KIND: How elements are decoded.
        LOWEST: What counts as minus infinity; 0 where nothing does.
        LEVEL: What the device can do: 0 the interpreter, 1 any device (all figures are reduced at
            once: a dozen reductions one by one take longer than a small tensor), 2 extremes of two
            packed numbers in one instruction, 3 also of packed integers.
    """
    PAIRED: tl.constexpr = KIND == "bf16" or KIND == "f16" or KIND == "i16" or KIND == "u16"
    WIDE: tl.constexpr = KIND == "f64" or KIND == "i64" or KIND == "u64"
    NARROW: tl.constexpr = (
        KIND == "u8" or KIND == "i8" or KIND == "b8" or KIND == "e4m3" or KIND == "e5m2"
    )
    FLOAT: tl.constexpr = (
        KIND == "bf16"
        or KIND == "f16"
        or KIND == "f32"
        or KIND == "f64"
        or KIND == "e4m3"
        or KIND == "e5m2"
    )
    # What 16 bits hold is summed exactly enough as it is.
    SHIFTED: tl.constexpr = WIDE or KIND == "f32" or KIND == "i32" or KIND == "u32"
    EXACT: tl.constexpr = WIDE or KIND == "i32" or KIND == "u32"  # float32 does not hold them
    TOGETHER: tl.constexpr = LEVEL > 0
    PACKED: tl.constexpr = LEVEL > 1 and (KIND == "bf16" or KIND == "f16")  # two at a time
    SELDOM: tl.constexpr = LEVEL > 2 and PACKED  # zeros are counted only where there are any
    COLUMNS: tl.constexpr = 32 if PAIRED else 64
    STEPS: tl.constexpr = 4
    TILE: tl.constexpr = 32  # groups that are read at a time: STEPS of 8 each
    TILES: tl.constexpr = 16  # of a chunk
    CHUNK: tl.constexpr = 32768  # elements of a chunk
    if WIDE:
        data = address.to(tl.pointer_type(tl.uint64))
    elif NARROW:
        data = address.to(tl.pointer_type(tl.uint8))
    else:
        data = address.to(tl.pointer_type(tl.uint32))
    sign_words = signs_at.to(tl.pointer_type(tl.uint32))
    flips = flips_at.to(tl.pointer_type(tl.uint16))
    pid = tl.program_id(0).to(tl.int64)
    chunks = (count + CHUNK - 1) // CHUNK
    begin = pid * each
    end = tl.minimum(begin + each, chunks)
    whole = tl.maximum(tl.minimum(end, count // CHUNK), begin)
    if count % (64 * TILE) == 0:  # nothing but whole tiles: the last chunk is read fast too
        whole = end

    lane = (tl.arange(0, 8)[:, None] ^ nothing).to(tl.int32)
    column = tl.arange(0, COLUMNS)[None, :]
    if PAIRED:
        sign_word = column >> 4
        place = (column * 2) & 31
    else:
        sign_word = column >> 5
        place = column & 31
    # Each thread walks with pointers of its own: what is added to them is the same for all.
    my_flips = flips + (lane + column * 0)
    my_signs = sign_words + (lane * 2 + sign_word)
    my_data = data + (lane * COLUMNS + column * 0)

    shift = 0.0
    if SHIFTED:
        # Any element of those that are summed will do: the spread is then taken around it.
        first = _decoded(tl.load(data + begin * CHUNK), KIND).to(tl.float64)
        half = (begin * CHUNK + tl.minimum(end * CHUNK, count)) // 2
        middle = _decoded(tl.load(data + half), KIND).to(tl.float64)
        shift = tl.where(first - first == 0.0, first, tl.where(middle - middle == 0.0, middle, 0.0))
        if LOWEST != 0.0:
            shift = tl.where(shift == LOWEST, 0.0, shift)

    sum_1 = tl.zeros([8, COLUMNS], tl.float64)
    sum_2 = tl.zeros([8, COLUMNS], tl.float64)
    sketch_0 = tl.zeros([8, COLUMNS], tl.float64)
    sketch_1 = tl.zeros([8, COLUMNS], tl.float64)
    if PACKED:
        inf: tl.constexpr = 0x7F807F80 if KIND == "bf16" else 0x7C007C00
        low = tl.full([8, COLUMNS], inf, tl.uint32)
        high = tl.full([8, COLUMNS], inf + 0x80008000, tl.uint32)
    elif EXACT:
        low = tl.full([8, COLUMNS], float("inf"), tl.float64)
        high = tl.full([8, COLUMNS], float("-inf"), tl.float64)
    else:
        low = tl.full([8, COLUMNS], float("inf"), tl.float32)
        high = tl.full([8, COLUMNS], float("-inf"), tl.float32)
    zeros = tl.zeros([8, COLUMNS], tl.int32)
    smallest = tl.full([8, COLUMNS], 0x7FFF7FFF, tl.uint32)
    digest_a = tl.zeros([8, COLUMNS], tl.uint64)
    digest_b = tl.zeros([8, COLUMNS], tl.uint64)
    thread = (tl.arange(0, 8)[:, None] * COLUMNS + column).to(tl.int64)

    for chunk in range(begin, whole):
        a = tl.zeros([8, COLUMNS], tl.uint64)
        b = tl.zeros([8, COLUMNS], tl.uint64)
        present = tl.minimum((count - chunk * CHUNK) // (64 * TILE), TILES)
        for tile in range(present.to(tl.int32)):
            few = tl.zeros([8, COLUMNS], tl.float32)
            a = a * 0xFF51AFD7ED558CCD
            b = b * 0xC4CEB9FE1A85EC53
            ahead = chunk * 512 + tile * TILE
            for u in tl.static_range(STEPS):
                flip = tl.load(my_flips + ahead + u * 8).to(tl.int32)
                signs = tl.load(my_signs + ahead * 2 + u * 16)
                if PAIRED:
                    word = tl.load(my_data + ahead * 32 + u * 256 + (column ^ (flip & 31)))
                    if PACKED:
                        low = _least_pair(low, word, KIND)
                        high = _greatest_pair(high, word, KIND)
                    if SELDOM:
                        smallest = _smallest_pair(smallest, word & 0x7FFF7FFF)
                    turn = flip >> 8
                    turned = (word >> turn) | (word << ((32 - turn) & 31))
                    even = _low(turned, KIND)
                    odd = _high(turned, KIND)
                    if not PACKED:
                        low = tl.minimum(low, tl.minimum(even, odd))
                        high = tl.maximum(high, tl.maximum(even, odd))
                    if not SELDOM:
                        zeros += (even == 0.0).to(tl.int32) + (odd == 0.0).to(tl.int32)
                    few += even + odd
                    even = _signed(even, signs, place).to(tl.float64)
                    odd = _signed(odd, signs, place + 1).to(tl.float64)
                    sum_2 += even * even
                    sum_2 += odd * odd
                    sketch_0 += even
                    sketch_1 += odd
                else:
                    flip = ((flip & 31) << 1) | (flip >> 12)
                    word = tl.load(my_data + ahead * 64 + u * 512 + (column ^ flip))
                    x = _decoded(word, KIND)
                    low = tl.minimum(low, x)
                    high = tl.maximum(high, x)
                    zeros += (x == 0.0).to(tl.int32)
                    x = x.to(tl.float64)
                    sketch_0 += _signed(x, signs, place)
                    x -= shift
                    sum_1 += x
                    sum_2 += x * x
                a += word.to(tl.uint64) * _key(u)
                b += word.to(tl.uint64) * _key(u + 4)
            if PAIRED:
                sum_1 += few.to(tl.float64)  # eight of 16 bits: float32 holds that
        spot = mixed((thread + chunk * (8 * COLUMNS) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ spot)
        digest_b += mixed(b + spot)

    if PACKED:
        low = tl.minimum(_low(low, KIND), _high(low, KIND))
        high = tl.maximum(_low(high, KIND), _high(high, KIND))
    finite = tl.minimum(whole * CHUNK, count) - begin * CHUNK
    bad = False
    if FLOAT:
        # What is not finite leaves a trace in the sum; a sentinel is the least there is.
        odd_one = sum_1 - sum_1 != 0.0
        if LOWEST != 0.0:
            odd_one = odd_one | (low <= LOWEST)
        bad = tl.max(tl.reshape(odd_one.to(tl.int32), [8 * COLUMNS]), 0) > 0
    if SELDOM:
        some = ((smallest & 0xFFFF) == 0) | ((smallest >> 16) == 0)
        if tl.max(tl.reshape(some.to(tl.int32), [8 * COLUMNS]), 0) > 0:
            flat_words = tl.arange(0, 8)[:, None] * 32 + column
            for tile in range(begin * 16, (tl.minimum(whole * CHUNK, count) + 2047) // 2048):
                for u in tl.static_range(STEPS):
                    word = tl.load(data + tile * 1024 + u * 256 + flat_words) & 0x7FFF7FFF
                    zeros += ((word & 0xFFFF) == 0).to(tl.int32) + ((word >> 16) == 0).to(tl.int32)
    start = whole
    if bad:
        start = begin
        finite = finite * 0
        sum_1 = tl.zeros([8, COLUMNS], tl.float64)
        sum_2 = tl.zeros([8, COLUMNS], tl.float64)
        sketch_0 = tl.zeros([8, COLUMNS], tl.float64)
        sketch_1 = tl.zeros([8, COLUMNS], tl.float64)
        low = tl.full([8, COLUMNS], float("inf"), low.dtype)
        high = tl.full([8, COLUMNS], float("-inf"), high.dtype)
        zeros = tl.zeros([8, COLUMNS], tl.int32)
        digest_a = tl.zeros([8, COLUMNS], tl.uint64)
        digest_b = tl.zeros([8, COLUMNS], tl.uint64)

    seen = tl.zeros([8, COLUMNS], tl.int32)
    nans = tl.zeros([8, COLUMNS], tl.int32)
    above = tl.zeros([8, COLUMNS], tl.int32)
    below = tl.zeros([8, COLUMNS], tl.int32)
    for chunk in range(start, end):
        a = tl.zeros([8, COLUMNS], tl.uint64)
        b = tl.zeros([8, COLUMNS], tl.uint64)
        left = count - chunk * CHUNK
        present = tl.minimum((left + 64 * TILE - 1) // (64 * TILE), TILES)
        for tile in range(present.to(tl.int32)):
            a = a * 0xFF51AFD7ED558CCD
            b = b * 0xC4CEB9FE1A85EC53
            for u in tl.static_range(STEPS):
                group = chunk * 512 + (tile * TILE + u * 8) + lane
                there = group * 64 < count
                flip = tl.load(flips + group, mask=there, other=0).to(tl.int32)
                signs = tl.load(sign_words + group * 2 + sign_word, mask=there, other=0)
                if PAIRED:
                    at = (group * 32 + (column ^ (flip & 31))) * 2
                    word = tl.load(data + (at >> 1), mask=at < count, other=0)
                    word = tl.where(at + 1 == count, word & 0xFFFF, word)
                    for half in tl.static_range(2):
                        # Half 0 goes to the even bucket; it is the word's other half where the
                        # group's lowest bit is flipped.
                        of = (flip >> 12) ^ half
                        x = tl.where(of == 0, _low(word, KIND), _high(word, KIND))
                        fine = at + of < count
                        zeros += (fine & (x == 0.0)).to(tl.int32)
                        if FLOAT:
                            nans += (fine & (x != x)).to(tl.int32)
                            above += (fine & (x == float("inf"))).to(tl.int32)
                            if LOWEST != 0.0:
                                lowest = (x == float("-inf")) | (x == LOWEST)
                                below += (fine & lowest).to(tl.int32)
                                fine = fine & (x - x == 0.0) & (x != LOWEST)
                            else:
                                below += (fine & (x == float("-inf"))).to(tl.int32)
                                fine = fine & (x - x == 0.0)
                        seen += fine.to(tl.int32)
                        low = tl.minimum(low, tl.where(fine, x, float("inf")))
                        high = tl.maximum(high, tl.where(fine, x, float("-inf")))
                        z = tl.where(fine, x, 0.0).to(tl.float64)
                        sum_1 += z
                        sum_2 += z * z
                        if half == 0:
                            sketch_0 += _signed(z, signs, place)
                        else:
                            sketch_1 += _signed(z, signs, place + 1)
                else:
                    at = group * 64 + (column ^ (((flip & 31) << 1) | (flip >> 12)))
                    fine = at < count
                    word = tl.load(data + at, mask=fine, other=0)
                    x = _decoded(word, KIND)
                    zeros += (fine & (x == 0.0)).to(tl.int32)
                    if FLOAT:
                        nans += (fine & (x != x)).to(tl.int32)
                        above += (fine & (x == float("inf"))).to(tl.int32)
                        if LOWEST != 0.0:
                            lowest = (x == float("-inf")) | (x == LOWEST)
                            below += (fine & lowest).to(tl.int32)
                            fine = fine & (x - x == 0.0) & (x != LOWEST)
                        else:
                            below += (fine & (x == float("-inf"))).to(tl.int32)
                            fine = fine & (x - x == 0.0)
                    seen += fine.to(tl.int32)
                    low = tl.minimum(low, tl.where(fine, x, float("inf")))
                    high = tl.maximum(high, tl.where(fine, x, float("-inf")))
                    z = tl.where(fine, x, 0.0).to(tl.float64)
                    sketch_0 += _signed(z, signs, place)
                    z = tl.where(fine, z - shift, 0.0)
                    sum_1 += z
                    sum_2 += z * z
                a += word.to(tl.uint64) * _key(u)
                b += word.to(tl.uint64) * _key(u + 4)
        spot = mixed((thread + chunk * (8 * COLUMNS) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ spot)
        digest_b += mixed(b + spot)

    infinities = above + (below.to(tl.int64) << 32)
    if TOGETHER:
        flat: tl.constexpr = 8 * COLUMNS
        figures = (
            tl.reshape(sum_1, [flat]),
            tl.reshape(sum_2, [flat]),
            tl.reshape(seen, [flat]),
            tl.reshape(zeros, [flat]),
            tl.reshape(nans, [flat]),
            tl.reshape(infinities, [flat]),
            tl.reshape(digest_a, [flat]),
            tl.reshape(digest_b, [flat]),
            tl.reshape(low, [flat]),
            tl.reshape(high, [flat]),
        )
        total, squares, seen_, zeros_, nans_, infinite, da, db, least, most = tl.reduce(
            figures, 0, _added
        )
    else:
        total = tl.sum(tl.sum(sum_1, 1), 0)
        squares = tl.sum(tl.sum(sum_2, 1), 0)
        seen_ = tl.sum(tl.sum(seen, 1), 0)
        zeros_ = tl.sum(tl.sum(zeros, 1), 0)
        nans_ = tl.sum(tl.sum(nans, 1), 0)
        infinite = tl.sum(tl.sum(infinities, 1), 0)
        da = tl.sum(tl.sum(digest_a, 1), 0)
        db = tl.sum(tl.sum(digest_b, 1), 0)
        least = tl.min(tl.min(low, 1), 0)
        most = tl.max(tl.max(high, 1), 0)
    finite = (finite + seen_).to(tl.float64)
    some = tl.maximum(finite, 1.0)
    mean = total / some
    spread = squares - total * mean
    out = rows_at.to(tl.pointer_type(tl.float64)) + (row + pid) * 80
    tl.store(out + 0, finite)
    tl.store(out + 1, mean + tl.where(finite > 0.0, shift, 0.0))
    tl.store(out + 2, tl.maximum(spread, 0.0))
    tl.store(out + 3, least.to(tl.float64))
    tl.store(out + 4, most.to(tl.float64))
    tl.store(out + 5, zeros_.to(tl.float64))
    tl.store(out + 6, nans_.to(tl.float64))
    tl.store(out + 7, (infinite & 0xFFFFFFFF).to(tl.float64))
    tl.store(out + 8, (infinite >> 32).to(tl.float64))
    bits = rows_at.to(tl.pointer_type(tl.uint64)) + (row + pid) * 80
    tl.store(bits + 9, da)
    tl.store(bits + 10, db)
    if PAIRED:
        pairs = tl.arange(0, COLUMNS) * 2 + 16
        if TOGETHER:
            evens, odds = tl.reduce((sketch_0, sketch_1), 0, _both)
        else:
            evens, odds = tl.sum(sketch_0, 0), tl.sum(sketch_1, 0)
        tl.store(out + pairs, evens)
        tl.store(out + pairs + 1, odds)
    else:
        tl.store(out + 16 + tl.arange(0, COLUMNS), tl.sum(sketch_0, 0))
    if pid == 0:
        meta = meta_at.to(tl.pointer_type(tl.int64)) + slot * 2
        tl.store(meta, row)
        tl.store(meta + 1, tl.num_programs(0).to(tl.int64))


@triton.jit
def joined_rows(rows_at: tl.int64, meta_at: tl.int64, out_at: tl.int64, slot: tl.int64):
    """The rows of each tensor as one, in slot `slot + program` of the results."""
    mine = slot + tl.program_id(0).to(tl.int64)
    meta = meta_at.to(tl.pointer_type(tl.int64)) + mine * 2
    first = tl.load(meta)
    many = tl.load(meta + 1)
    rows = rows_at.to(tl.pointer_type(tl.float64)) + first * 80
    bits = rows_at.to(tl.pointer_type(tl.uint64)) + first * 80
    lane = tl.arange(0, 64)
    bucket = tl.arange(0, 64)[None, :]
    finite = tl.zeros([64], tl.float64)
    weighted = tl.zeros([64], tl.float64)
    spread = tl.zeros([64], tl.float64)
    low = tl.full([64], float("inf"), tl.float64)
    high = tl.full([64], float("-inf"), tl.float64)
    zeros = tl.zeros([64], tl.float64)
    nans = tl.zeros([64], tl.float64)
    above = tl.zeros([64], tl.float64)
    below = tl.zeros([64], tl.float64)
    digest_a = tl.zeros([64], tl.uint64)
    digest_b = tl.zeros([64], tl.uint64)
    sketch = tl.zeros([64, 64], tl.float64)
    for at in range(0, many, 64):
        there = at + lane < many
        place = (at + lane) * 80
        n = tl.load(rows + place, mask=there, other=0.0)
        finite += n
        weighted += n * tl.load(rows + place + 1, mask=there, other=0.0)
        spread += tl.load(rows + place + 2, mask=there, other=0.0)
        low = tl.minimum(low, tl.load(rows + place + 3, mask=there, other=float("inf")))
        high = tl.maximum(high, tl.load(rows + place + 4, mask=there, other=float("-inf")))
        zeros += tl.load(rows + place + 5, mask=there, other=0.0)
        nans += tl.load(rows + place + 6, mask=there, other=0.0)
        above += tl.load(rows + place + 7, mask=there, other=0.0)
        below += tl.load(rows + place + 8, mask=there, other=0.0)
        digest_a += tl.load(bits + place + 9, mask=there, other=0)
        digest_b += tl.load(bits + place + 10, mask=there, other=0)
        sketch += tl.load(rows + place[:, None] + 16 + bucket, mask=there[:, None], other=0.0)
    count = tl.sum(finite, 0)
    mean = tl.sum(weighted, 0) / tl.maximum(count, 1.0)
    apart = tl.zeros([64], tl.float64)
    for at in range(0, many, 64):
        there = at + lane < many
        place = (at + lane) * 80
        n = tl.load(rows + place, mask=there, other=0.0)
        off = tl.load(rows + place + 1, mask=there, other=0.0) - mean
        apart += tl.where(n > 0.0, n * off * off, 0.0)
    out = out_at.to(tl.pointer_type(tl.float64)) + mine * 80
    tl.store(out + 0, count)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.sum(spread, 0) + tl.sum(apart, 0))
    tl.store(out + 3, tl.min(low, 0))
    tl.store(out + 4, tl.max(high, 0))
    tl.store(out + 5, tl.sum(zeros, 0))
    tl.store(out + 6, tl.sum(nans, 0))
    tl.store(out + 7, tl.sum(above, 0))
    tl.store(out + 8, tl.sum(below, 0))
    words = out_at.to(tl.pointer_type(tl.uint64)) + mine * 80
    tl.store(words + 9, tl.sum(digest_a, 0))
    tl.store(words + 10, tl.sum(digest_b, 0))
    tl.store(out + 16 + tl.arange(0, 64), tl.sum(sketch, 0))
