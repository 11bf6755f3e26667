# pyright: basic, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Triton kernels for the summary of a device tensor, and the functions they share with the 16-bit
kernel.

The sketch is that of `numerics/definitions.py`. Its tables are filled here once; they hold the
signs and the XOR of every group of 64 elements.
"""

# Triton compiles kernels from their source text, in which types have another meaning:
# `from __future__ import annotations` would turn the arguments' types into text.
import triton
import triton.language as tl

WARPS = 8
"""Number of warps of a program that reads a tensor."""


@triton.jit
def mixed(z):
    """A 64-bit hash of each 64-bit number."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _exchanged(z, mask, by):
    return ((z & mask) << by) | ((z >> by) & mask)


@triton.jit(do_not_specialize=["first"])
def sketch_tables(signs_at: tl.int64, flips_at: tl.int64, first: tl.int64, BLOCK: tl.constexpr):
    """Fill the sketch's tables: signs in the order of the buckets, and the XOR of each group."""
    group = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = mixed((group + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    flip = (z * 0xD6E8FEB86659FD93) >> 58
    # Bit b of the stored word is bit b ^ flip of the hash: six exchanges of neighbouring bits.
    z = tl.where((flip & 1) != 0, _exchanged(z, 0x5555555555555555, 1), z)
    z = tl.where((flip & 2) != 0, _exchanged(z, 0x3333333333333333, 2), z)
    z = tl.where((flip & 4) != 0, _exchanged(z, 0x0F0F0F0F0F0F0F0F, 4), z)
    z = tl.where((flip & 8) != 0, _exchanged(z, 0x00FF00FF00FF00FF, 8), z)
    z = tl.where((flip & 16) != 0, _exchanged(z, 0x0000FFFF0000FFFF, 16), z)
    z = tl.where((flip & 32) != 0, _exchanged(z, 0x00000000FFFFFFFF, 32), z)
    tl.store(signs_at.to(tl.pointer_type(tl.uint64)) + group, z)
    # The kernels need the number of the word of a pair, and whether its halves are exchanged.
    tl.store(
        flips_at.to(tl.pointer_type(tl.uint16)) + group,
        ((flip >> 1) | ((flip & 1) << 12)).to(tl.uint16),
    )


@triton.jit
def signed(x, signs, place):
    """`x`, negated if bit `place` of the signs is set."""
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
    """The smaller of two packed pairs, half by half; NaN is ignored."""
    if KIND == "bf16":
        result = tl.inline_asm_elementwise(
            "min.bf16x2 $0, $1, $2;", "=r,r,r", [low, word], tl.uint32, True, 1
        )
    else:
        result = tl.inline_asm_elementwise(
            "min.f16x2 $0, $1, $2;", "=r,r,r", [low, word], tl.uint32, True, 1
        )
    return result


@triton.jit
def smallest_pair(least, word):
    """The smaller of two pairs of unsigned 16-bit numbers."""
    return tl.inline_asm_elementwise(
        "min.u16x2 $0, $1, $2;", "=r,r,r", [least, word], tl.uint32, True, 1
    )


@triton.jit
def largest_pair(most, word):
    """The larger of two pairs of unsigned 16-bit numbers."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [most, word], tl.uint32, True, 1
    )


@triton.jit
def nearest_zero_pair(least, word, KIND: tl.constexpr):
    """The element with the smaller size of two packed pairs, half by half; signs mean nothing."""
    if KIND == "bf16":
        result = tl.inline_asm_elementwise(
            "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [least, word], tl.uint32, True, 1
        )
    else:
        result = tl.inline_asm_elementwise(
            "min.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [least, word], tl.uint32, True, 1
        )
    return result


@triton.jit
def greatest_pair(high, word, KIND: tl.constexpr):
    if KIND == "bf16":
        result = tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [high, word], tl.uint32, True, 1
        )
    else:
        result = tl.inline_asm_elementwise(
            "max.f16x2 $0, $1, $2;", "=r,r,r", [high, word], tl.uint32, True, 1
        )
    return result


@triton.jit
def key(U: tl.constexpr):
    """The keys of the digest: odd numbers without a pattern."""
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
def combine_figures(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9):
    """Combine the figures of two threads: sums, and the two extremes."""
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
def classify(x, fine, LOWEST: tl.constexpr, FLOAT: tl.constexpr):
    """For one element: whether it is finite, NaN, plus infinity, or minus infinity."""
    nan = fine & (x != x)
    above = fine & (x == float("inf"))
    below = fine & (x == float("-inf"))
    if FLOAT:
        if LOWEST != 0.0:
            below = below | (fine & (x == LOWEST))
        fine = fine & (x - x == 0.0) & ~below
    return fine, nan, above, below


@triton.jit
def reduce_figures(
    sum_1, sum_2, seen, zeros, nans, infinite, digest_a, digest_b, low, high,
    FLAT: tl.constexpr, LEVEL: tl.constexpr,
):  # fmt: skip
    """Reduce the figures of all threads of a program.

    In a single reduction on a device: a dozen separate reductions take longer than a small tensor.
    """
    sum_1, sum_2 = tl.reshape(sum_1, [FLAT]), tl.reshape(sum_2, [FLAT])
    seen, zeros = tl.reshape(seen, [FLAT]), tl.reshape(zeros, [FLAT])
    nans, infinite = tl.reshape(nans, [FLAT]), tl.reshape(infinite, [FLAT])
    digest_a, digest_b = tl.reshape(digest_a, [FLAT]), tl.reshape(digest_b, [FLAT])
    low, high = tl.reshape(low, [FLAT]), tl.reshape(high, [FLAT])
    if LEVEL > 0:
        total, squares, seen_, zeros_, nans_, infinite_, a, b, least, most = tl.reduce(
            (sum_1, sum_2, seen, zeros, nans, infinite, digest_a, digest_b, low, high),
            0,
            combine_figures,
        )
    else:
        total, squares = tl.sum(sum_1, 0), tl.sum(sum_2, 0)
        seen_, zeros_ = tl.sum(seen, 0), tl.sum(zeros, 0)
        nans_, infinite_ = tl.sum(nans, 0), tl.sum(infinite, 0)
        a, b = tl.sum(digest_a, 0), tl.sum(digest_b, 0)
        least, most = tl.min(low, 0), tl.max(high, 0)
    return total, squares, seen_, zeros_, nans_, infinite_, a, b, least, most


@triton.jit
def store_row(
    rows_at, row, count, shift, total, squares, zeros, nans, infinite, digest_a, digest_b, low, high
):  # fmt: skip
    """Store the figures of a program in a row of the arena, without the sketch."""
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


# The kernel that summarises a device tensor in one pass over its memory.


@triton.jit
def _decoded(word, KIND: tl.constexpr):
    """One element of a word as a number: float32 if that can hold it, otherwise float64."""
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
        # Decoded by hand, because only recent devices have the format.
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


@triton.jit(do_not_specialize=["count", "each", "row", "slot", "nothing"])
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
    """Partial figures of one tensor. Each program stores row `row + program` of the arena.

    Args:
        address: Address of the first element; elements are in C order.
        count: Number of elements.
        each: Number of chunks for one program.
        rows_at: Address of the arena of rows.
        row: The first row of this tensor.
        meta_at: Address of a table for the joining kernel: first row and number of rows of each
            slot.
        slot: Slot of this tensor.
        signs_at: Address of the sketch's signs, for as many groups as the tensor has.
        flips_at: Address of the sketch's XORs, likewise.
        nothing: 0. The compiler must not know this: otherwise it would distribute the loads of the
            table over the threads as if they were the main work, and rearrange everything else to
            fit.
        KIND: How elements are decoded.
        LOWEST: The value that counts as minus infinity; 0 if there is none.
        LEVEL: What the device supports. 0: the interpreter. 1: any device (all figures are reduced
            at once, because a dozen separate reductions take longer than a small tensor). 2:
            extremes of two packed numbers in one instruction. 3: also of packed integers.
    """
    WIDE: tl.constexpr = KIND == "f64" or KIND == "i64" or KIND == "u64"
    NARROW: tl.constexpr = (
        KIND == "u8" or KIND == "i8" or KIND == "b8" or KIND == "e4m3" or KIND == "e5m2"
    )
    FLOAT: tl.constexpr = KIND == "f32" or KIND == "f64" or KIND == "e4m3" or KIND == "e5m2"
    # Values of 8 bits are summed accurately enough without a shift.
    SHIFTED: tl.constexpr = not NARROW
    EXACT: tl.constexpr = WIDE or KIND == "i32" or KIND == "u32"  # float32 cannot hold them
    STEPS: tl.constexpr = 4
    TILE: tl.constexpr = 32  # groups that are read together: STEPS of 8 each
    TILES: tl.constexpr = 16  # tiles of a chunk
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
    full_end = tl.maximum(tl.minimum(end, count // CHUNK), begin)
    if count % (64 * TILE) == 0:  # whole tiles only: the last chunk is read by the fast loop too
        full_end = end

    lane = (tl.arange(0, 8)[:, None] ^ nothing).to(tl.int32)
    column = tl.arange(0, 64)[None, :]
    sign_word = column >> 5
    place = column & 31
    # Each thread has its own base pointers, so that the added offsets are the same for all.
    thread_flips = flips + (lane + column * 0)
    thread_signs = sign_words + (lane * 2 + sign_word)
    thread_data = data + (lane * 64 + column * 0)

    shift = 0.0
    if SHIFTED:
        # Any element of the sum serves as the shift; sums are then taken around it.
        first = _decoded(tl.load(data + begin * CHUNK), KIND).to(tl.float64)
        half = (begin * CHUNK + tl.minimum(end * CHUNK, count)) // 2
        middle = _decoded(tl.load(data + half), KIND).to(tl.float64)
        shift = tl.where(first - first == 0.0, first, tl.where(middle - middle == 0.0, middle, 0.0))
        if LOWEST != 0.0:
            shift = tl.where(shift == LOWEST, 0.0, shift)

    sum_1 = tl.zeros([8, 64], tl.float64)
    sum_2 = tl.zeros([8, 64], tl.float64)
    sketch = tl.zeros([8, 64], tl.float64)
    if EXACT:
        low = tl.full([8, 64], float("inf"), tl.float64)
        high = tl.full([8, 64], float("-inf"), tl.float64)
    else:
        low = tl.full([8, 64], float("inf"), tl.float32)
        high = tl.full([8, 64], float("-inf"), tl.float32)
    zeros = tl.zeros([8, 64], tl.int32)
    digest_a = tl.zeros([8, 64], tl.uint64)
    digest_b = tl.zeros([8, 64], tl.uint64)
    thread = (tl.arange(0, 8)[:, None] * 64 + column).to(tl.int64)

    for chunk in range(begin, full_end):
        a = tl.zeros([8, 64], tl.uint64)
        b = tl.zeros([8, 64], tl.uint64)
        present = tl.minimum((count - chunk * CHUNK) // (64 * TILE), TILES)
        for tile in range(present.to(tl.int32)):
            a = a * 0xFF51AFD7ED558CCD
            b = b * 0xC4CEB9FE1A85EC53
            first_group = chunk * 512 + tile * TILE
            for u in tl.static_range(STEPS):
                flip = tl.load(thread_flips + first_group + u * 8).to(tl.int32)
                signs = tl.load(thread_signs + first_group * 2 + u * 16)
                flip = ((flip & 31) << 1) | (flip >> 12)
                word = tl.load(thread_data + first_group * 64 + u * 512 + (column ^ flip))
                x = _decoded(word, KIND)
                low = tl.minimum(low, x)
                high = tl.maximum(high, x)
                zeros += (x == 0.0).to(tl.int32)
                x = x.to(tl.float64)
                sketch += signed(x, signs, place)
                x -= shift
                sum_1 += x
                sum_2 += x * x
                a += word.to(tl.uint64) * key(u)
                b += word.to(tl.uint64) * key(u + 4)
        seed = mixed((thread + chunk * 512 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ seed)
        digest_b += mixed(b + seed)

    finite = tl.minimum(full_end * CHUNK, count) - begin * CHUNK
    bad = False
    if FLOAT:
        # A non-finite value makes the sum non-finite; a sentinel is the least value.
        suspect = sum_1 - sum_1 != 0.0
        if LOWEST != 0.0:
            suspect = suspect | (low <= LOWEST)
        bad = tl.max(tl.reshape(suspect.to(tl.int32), [512]), 0) > 0
    start = full_end
    if bad:
        start = begin
        finite = finite * 0
        sum_1 = tl.zeros([8, 64], tl.float64)
        sum_2 = tl.zeros([8, 64], tl.float64)
        sketch = tl.zeros([8, 64], tl.float64)
        low = tl.full([8, 64], float("inf"), low.dtype)
        high = tl.full([8, 64], float("-inf"), high.dtype)
        zeros = tl.zeros([8, 64], tl.int32)
        digest_a = tl.zeros([8, 64], tl.uint64)
        digest_b = tl.zeros([8, 64], tl.uint64)

    seen = tl.zeros([8, 64], tl.int32)
    nans = tl.zeros([8, 64], tl.int32)
    above = tl.zeros([8, 64], tl.int32)
    below = tl.zeros([8, 64], tl.int32)
    for chunk in range(start, end):
        a = tl.zeros([8, 64], tl.uint64)
        b = tl.zeros([8, 64], tl.uint64)
        remaining = count - chunk * CHUNK
        present = tl.minimum((remaining + 64 * TILE - 1) // (64 * TILE), TILES)
        for tile in range(present.to(tl.int32)):
            a = a * 0xFF51AFD7ED558CCD
            b = b * 0xC4CEB9FE1A85EC53
            for u in tl.static_range(STEPS):
                group = chunk * 512 + (tile * TILE + u * 8) + lane
                inside = group * 64 < count
                flip = tl.load(flips + group, mask=inside, other=0).to(tl.int32)
                signs = tl.load(sign_words + group * 2 + sign_word, mask=inside, other=0)
                index = group * 64 + (column ^ (((flip & 31) << 1) | (flip >> 12)))
                fine = index < count
                word = tl.load(data + index, mask=fine, other=0)
                x = _decoded(word, KIND)
                zeros += (fine & (x == 0.0)).to(tl.int32)
                fine, nan, up, down = classify(x, fine, LOWEST, FLOAT)
                nans += nan.to(tl.int32)
                above += up.to(tl.int32)
                below += down.to(tl.int32)
                seen += fine.to(tl.int32)
                low = tl.minimum(low, tl.where(fine, x, float("inf")))
                high = tl.maximum(high, tl.where(fine, x, float("-inf")))
                z = tl.where(fine, x, 0.0).to(tl.float64)
                sketch += signed(z, signs, place)
                z = tl.where(fine, z - shift, 0.0)
                sum_1 += z
                sum_2 += z * z
                a += word.to(tl.uint64) * key(u)
                b += word.to(tl.uint64) * key(u + 4)
        seed = mixed((thread + chunk * 512 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ seed)
        digest_b += mixed(b + seed)

    infinities = above + (below.to(tl.int64) << 32)
    total, squares, seen_, zeros_, nans_, infinite, da, db, least, most = reduce_figures(
        sum_1, sum_2, seen, zeros, nans, infinities, digest_a, digest_b, low, high, 512, LEVEL
    )
    store_row(
        rows_at, row + pid, finite + seen_, shift, total, squares, zeros_, nans_, infinite, da, db,
        least, most,
    )  # fmt: skip
    out = rows_at.to(tl.pointer_type(tl.float64)) + (row + pid) * 80
    tl.store(out + 16 + tl.arange(0, 64), tl.sum(sketch, 0))
    if pid == 0:
        meta = meta_at.to(tl.pointer_type(tl.int64)) + slot * 2
        tl.store(meta, row)
        tl.store(meta + 1, tl.num_programs(0).to(tl.int64))


# The kernel that joins the rows of each tensor's programs, in order.


@triton.jit(do_not_specialize=["slot"])
def joined_rows(rows_at: tl.int64, meta_at: tl.int64, out_at: tl.int64, slot: tl.int64):
    """Join the rows of each tensor into slot `slot + program` of the results."""
    result_slot = slot + tl.program_id(0).to(tl.int64)
    meta = meta_at.to(tl.pointer_type(tl.int64)) + result_slot * 2
    first = tl.load(meta)
    row_count = tl.load(meta + 1)
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
    for at in range(0, row_count, 64):
        inside = at + lane < row_count
        place = (at + lane) * 80
        n = tl.load(rows + place, mask=inside, other=0.0)
        finite += n
        weighted += n * tl.load(rows + place + 1, mask=inside, other=0.0)
        spread += tl.load(rows + place + 2, mask=inside, other=0.0)
        low = tl.minimum(low, tl.load(rows + place + 3, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(rows + place + 4, mask=inside, other=float("-inf")))
        zeros += tl.load(rows + place + 5, mask=inside, other=0.0)
        nans += tl.load(rows + place + 6, mask=inside, other=0.0)
        above += tl.load(rows + place + 7, mask=inside, other=0.0)
        below += tl.load(rows + place + 8, mask=inside, other=0.0)
        digest_a += tl.load(bits + place + 9, mask=inside, other=0)
        digest_b += tl.load(bits + place + 10, mask=inside, other=0)
        sketch += tl.load(rows + place[:, None] + 16 + bucket, mask=inside[:, None], other=0.0)
    count = tl.sum(finite, 0)
    mean = tl.sum(weighted, 0) / tl.maximum(count, 1.0)
    mean_spread = tl.zeros([64], tl.float64)
    for at in range(0, row_count, 64):
        inside = at + lane < row_count
        place = (at + lane) * 80
        n = tl.load(rows + place, mask=inside, other=0.0)
        mean_error = tl.load(rows + place + 1, mask=inside, other=0.0) - mean
        mean_spread += tl.where(n > 0.0, n * mean_error * mean_error, 0.0)
    out = out_at.to(tl.pointer_type(tl.float64)) + result_slot * 80
    tl.store(out + 0, count)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.sum(spread, 0) + tl.sum(mean_spread, 0))
    tl.store(out + 3, tl.min(low, 0))
    tl.store(out + 4, tl.max(high, 0))
    tl.store(out + 5, tl.sum(zeros, 0))
    tl.store(out + 6, tl.sum(nans, 0))
    tl.store(out + 7, tl.sum(above, 0))
    tl.store(out + 8, tl.sum(below, 0))
    words = out_at.to(tl.pointer_type(tl.uint64)) + result_slot * 80
    tl.store(words + 9, tl.sum(digest_a, 0))
    tl.store(words + 10, tl.sum(digest_b, 0))
    tl.store(out + 16 + tl.arange(0, 64), tl.sum(sketch, 0))
