# pyright: basic, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Triton kernel for the summary of a tensor of 16-bit elements: reads four words of two at a time.

Loads are written as instructions, so that they are 16 bytes wide and stay in the written order.
"""

# Triton compiles kernels from their source text, in which types have another meaning:
# `from __future__ import annotations` would turn the arguments' types into text.
import triton
import triton.language as tl

from driftline.numerics.gpu.kernels.summary import (
    classify,
    greatest_pair,
    key,
    least_pair,
    mixed,
    nearest_zero_pair,
    reduce_figures,
    signed,
    store_row,
)


@triton.jit
def low_half(word, KIND: tl.constexpr):
    """The first of the two elements of a 32-bit word."""
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
    """Load four words at once; the load is issued here, not where the words are used."""
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
        pointer = address.to(tl.pointer_type(tl.uint32))
        w_0, w_1, w_2, w_3 = (
            tl.load(pointer),
            tl.load(pointer + 1),
            tl.load(pointer + 2),
            tl.load(pointer + 3),
        )
    return w_0, w_1, w_2, w_3


@triton.jit
def flip_at(address, LEVEL: tl.constexpr):
    """A group's entry in the table: 5 bits select the word, bit 12 exchanges the halves."""
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
def flip_of(thread_flips, tile, LEVEL: tl.constexpr):
    """The entry of a thread's group in a tile."""
    return flip_at(thread_flips + tile.to(tl.int64) * 64, LEVEL)


@triton.jit
def signs_of(thread_signs, tile, LEVEL: tl.constexpr):
    """The signs of a thread's eight elements in a tile."""
    return eight_signs(thread_signs + tile.to(tl.int64) * 256, LEVEL)


@triton.jit
def words_of(thread_data, vector, tile, flip, LEVEL: tl.constexpr):
    """The four words of a thread in a tile."""
    return four_words(
        thread_data + tile.to(tl.int64) * 4096 + ((vector ^ ((flip >> 2) & 7)) << 4), LEVEL
    )


@triton.jit
def in_order(w_0, w_1, w_2, w_3, flip):
    """The words of a thread in the order of the buckets."""
    by_one = (flip & 1) != 0
    by_two = (flip & 2) != 0
    a_0 = tl.where(by_one, w_1, w_0)
    a_1 = tl.where(by_one, w_0, w_1)
    a_2 = tl.where(by_one, w_3, w_2)
    a_3 = tl.where(by_one, w_2, w_3)
    return (
        tl.where(by_two, a_2, a_0),
        tl.where(by_two, a_3, a_1),
        tl.where(by_two, a_0, a_2),
        tl.where(by_two, a_1, a_3),
    )


@triton.jit
def hashed(a, b, w_0, w_1, w_2, w_3):
    """The two sums of the digest after four more words."""
    a = a * 0xFF51AFD7ED558CCD + w_0.to(tl.uint64) * key(0) + w_1.to(tl.uint64) * key(1)
    b = b * 0xC4CEB9FE1A85EC53 + w_0.to(tl.uint64) * key(4) + w_1.to(tl.uint64) * key(5)
    a = a + w_2.to(tl.uint64) * key(2) + w_3.to(tl.uint64) * key(3)
    b = b + w_2.to(tl.uint64) * key(6) + w_3.to(tl.uint64) * key(7)
    return a, b


@triton.jit
def turned(word, flip):
    """The word, with its halves exchanged if the group's lowest bit is flipped."""
    turn = (flip >> 8).to(tl.uint32)
    return (word >> turn) | (word << ((32 - turn) & 31))


@triton.jit
def eight_sums(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


# The kernel that summarises a device tensor of 16-bit elements in one pass over its memory.


@triton.jit(do_not_specialize=["count", "each", "row", "slot", "nothing"])
def summary_of_halves(
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
    """Partial figures of one tensor whose address is a multiple of 16.

    `summary.summary_rows` describes the arguments.
    """
    FLOAT: tl.constexpr = KIND == "bf16" or KIND == "f16"
    PACKED: tl.constexpr = LEVEL > 1 and FLOAT  # extremes of two at a time
    RARE_ZEROS: tl.constexpr = LEVEL > 2 and PACKED  # zeros are counted only if there are any
    TILE: tl.constexpr = 2048  # elements: 32 groups
    TILES: tl.constexpr = 16  # tiles of a chunk
    CHUNK: tl.constexpr = 32768
    pid = tl.program_id(0).to(tl.int64)
    chunks = (count + CHUNK - 1) // CHUNK
    begin = pid * each
    end = tl.minimum(begin + each, chunks)
    full_end = tl.maximum(tl.minimum(end, count // CHUNK), begin)
    if count % TILE == 0:  # whole tiles only: the last chunk is read by the fast loop too
        full_end = end
    # Numbers of tiles have 32 bits, enough for 4e12 elements: arithmetic of 64 bits takes longer.
    first = (begin * TILES).to(tl.int32)
    last = (tl.minimum(full_end * CHUNK, count) // TILE).to(tl.int32)

    lane = (tl.arange(0, 32)[:, None] + tl.zeros([32, 8], tl.int32)).to(tl.int64)
    vector = tl.arange(0, 8)[None, :] + tl.zeros([32, 8], tl.int32)
    thread = lane * 8 + vector.to(tl.int64)
    thread_flips = flips_at + lane * 2
    thread_signs = signs_at + thread
    thread_data = address + lane * 128

    sum_1 = tl.zeros([32, 8], tl.float64)
    sum_2 = tl.zeros([32, 8], tl.float64)
    s_0 = tl.zeros([32, 8], tl.float64)
    s_1 = tl.zeros([32, 8], tl.float64)
    s_2 = tl.zeros([32, 8], tl.float64)
    s_3 = tl.zeros([32, 8], tl.float64)
    s_4 = tl.zeros([32, 8], tl.float64)
    s_5 = tl.zeros([32, 8], tl.float64)
    s_6 = tl.zeros([32, 8], tl.float64)
    s_7 = tl.zeros([32, 8], tl.float64)
    if PACKED:
        inf: tl.constexpr = 0x7F807F80 if KIND == "bf16" else 0x7C007C00
        low = tl.full([32, 8], inf, tl.uint32)
        high = tl.full([32, 8], inf + 0x80008000, tl.uint32)
    else:
        low = tl.full([32, 8], float("inf"), tl.float32)
        high = tl.full([32, 8], float("-inf"), tl.float32)
    zeros = tl.zeros([32, 8], tl.int32)
    smallest = tl.full([32, 8], 0x7FFF7FFF, tl.uint32)
    digest_a = tl.zeros([32, 8], tl.uint64)
    digest_b = tl.zeros([32, 8], tl.uint64)

    if last > first:
        final = last - 1
        second = tl.minimum(first + 1, final)
        third = tl.minimum(first + 2, final)
        flip = flip_of(thread_flips, first, LEVEL)
        next_flip = flip_of(thread_flips, second, LEVEL)
        far_flip = flip_of(thread_flips, third, LEVEL)
        signs = signs_of(thread_signs, first, LEVEL)
        next_signs = signs_of(thread_signs, second, LEVEL)
        w_0, w_1, w_2, w_3 = words_of(thread_data, vector, first, flip, LEVEL)
        n_0, n_1, n_2, n_3 = words_of(thread_data, vector, second, next_flip, LEVEL)
        base = first
        for chunk in range(begin, full_end):
            a = tl.zeros([32, 8], tl.uint64)
            b = tl.zeros([32, 8], tl.uint64)
            for at in tl.range(0, tl.minimum(last - base, TILES), loop_unroll_factor=4):
                tile = base + at
                # The words of the tile after the next one are loaded now. The compiler moves a load
                # to the end of the loop, so one tile ahead would be too late to hide its latency.
                far = tl.minimum(tile + 2, final)
                f_0, f_1, f_2, f_3 = words_of(thread_data, vector, far, far_flip, LEVEL)
                far_signs = signs_of(thread_signs, far, LEVEL)
                farther_flip = flip_of(thread_flips, tl.minimum(tile + 3, final), LEVEL)

                w_0, w_1, w_2, w_3 = in_order(w_0, w_1, w_2, w_3, flip)
                a, b = hashed(a, b, w_0, w_1, w_2, w_3)
                tile_sum = tl.zeros([32, 8], tl.float32)
                for k in tl.static_range(4):
                    if k == 0:
                        word = w_0
                    elif k == 1:
                        word = w_1
                    elif k == 2:
                        word = w_2
                    else:
                        word = w_3
                    if PACKED:
                        low = least_pair(low, word, KIND)
                        high = greatest_pair(high, word, KIND)
                    if RARE_ZEROS:
                        smallest = nearest_zero_pair(smallest, word, KIND)
                    word = turned(word, flip)
                    even = low_half(word, KIND)
                    odd = high_half(word, KIND)
                    if not PACKED:
                        low = tl.minimum(low, tl.minimum(even, odd))
                        high = tl.maximum(high, tl.maximum(even, odd))
                    if not RARE_ZEROS:
                        zeros += (even == 0.0).to(tl.int32) + (odd == 0.0).to(tl.int32)
                    tile_sum += even + odd
                    even = signed(even, signs, 2 * k).to(tl.float64)
                    odd = signed(odd, signs, 2 * k + 1).to(tl.float64)
                    sum_2 += even * even
                    sum_2 += odd * odd
                    if k == 0:
                        s_0 += even
                        s_1 += odd
                    elif k == 1:
                        s_2 += even
                        s_3 += odd
                    elif k == 2:
                        s_4 += even
                        s_5 += odd
                    else:
                        s_6 += even
                        s_7 += odd
                sum_1 += tile_sum.to(tl.float64)  # float32 can sum eight elements of 16 bits
                w_0, w_1, w_2, w_3 = n_0, n_1, n_2, n_3
                n_0, n_1, n_2, n_3 = f_0, f_1, f_2, f_3
                flip, next_flip, far_flip = next_flip, far_flip, farther_flip
                signs, next_signs = next_signs, far_signs
            seed = mixed((thread + chunk * 256 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
            digest_a += mixed(a ^ seed)
            digest_b += mixed(b + seed)
            base += TILES

    if PACKED:
        low = tl.minimum(low_half(low, KIND), high_half(low, KIND))
        high = tl.maximum(low_half(high, KIND), high_half(high, KIND))
    finite = tl.minimum(full_end * CHUNK, count) - begin * CHUNK
    bad = False
    if FLOAT:
        # A non-finite value makes the sum non-finite; a sentinel is the least value.
        suspect = sum_1 - sum_1 != 0.0
        if LOWEST != 0.0:
            suspect = suspect | (low <= LOWEST)
        bad = tl.max(tl.reshape(suspect.to(tl.int32), [256]), 0) > 0
    if RARE_ZEROS:
        has_zero = ((smallest & 0x7FFF) == 0) | ((smallest & 0x7FFF0000) == 0)
        if tl.max(tl.reshape(has_zero.to(tl.int32), [256]), 0) > 0:
            for tile in range(first, last):
                w_0, w_1, w_2, w_3 = four_words(
                    thread_data + tile.to(tl.int64) * 4096 + (vector << 4), LEVEL
                )
                for k in tl.static_range(4):
                    if k == 0:
                        word = w_0 & 0x7FFF7FFF
                    elif k == 1:
                        word = w_1 & 0x7FFF7FFF
                    elif k == 2:
                        word = w_2 & 0x7FFF7FFF
                    else:
                        word = w_3 & 0x7FFF7FFF
                    zeros += ((word & 0xFFFF) == 0).to(tl.int32) + ((word >> 16) == 0).to(tl.int32)
    start = full_end
    if bad:
        start = begin
        finite = finite * 0
        sum_1 = tl.zeros([32, 8], tl.float64)
        sum_2 = tl.zeros([32, 8], tl.float64)
        s_0 = tl.zeros([32, 8], tl.float64)
        s_1 = tl.zeros([32, 8], tl.float64)
        s_2 = tl.zeros([32, 8], tl.float64)
        s_3 = tl.zeros([32, 8], tl.float64)
        s_4 = tl.zeros([32, 8], tl.float64)
        s_5 = tl.zeros([32, 8], tl.float64)
        s_6 = tl.zeros([32, 8], tl.float64)
        s_7 = tl.zeros([32, 8], tl.float64)
        low = tl.full([32, 8], float("inf"), tl.float32)
        high = tl.full([32, 8], float("-inf"), tl.float32)
        zeros = tl.zeros([32, 8], tl.int32)
        digest_a = tl.zeros([32, 8], tl.uint64)
        digest_b = tl.zeros([32, 8], tl.uint64)

    seen = tl.zeros([32, 8], tl.int32)
    nans = tl.zeros([32, 8], tl.int32)
    above = tl.zeros([32, 8], tl.int32)
    below = tl.zeros([32, 8], tl.int32)
    words = address.to(tl.pointer_type(tl.uint32))
    flips = flips_at.to(tl.pointer_type(tl.uint16))
    sign_bytes = signs_at.to(tl.pointer_type(tl.uint8))
    for chunk in range(start, end):
        a = tl.zeros([32, 8], tl.uint64)
        b = tl.zeros([32, 8], tl.uint64)
        present = tl.minimum((count - chunk * CHUNK + TILE - 1) // TILE, TILES)
        for tile in range(present.to(tl.int32)):
            group = chunk * 512 + tile * 32 + (lane ^ nothing)
            inside = group * 64 < count
            flip = tl.load(flips + group, mask=inside, other=0).to(tl.int32)
            signs = tl.load(sign_bytes + group * 8 + vector, mask=inside, other=0).to(tl.uint32)
            a = a * 0xFF51AFD7ED558CCD
            b = b * 0xC4CEB9FE1A85EC53
            for k in tl.static_range(4):
                index = (group * 32 + ((vector * 4 + k) ^ (flip & 31))) * 2
                word = tl.load(words + (index >> 1), mask=index < count, other=0)
                word = tl.where(index + 1 == count, word & 0xFFFF, word)
                a += word.to(tl.uint64) * key(k)
                b += word.to(tl.uint64) * key(k + 4)
                for half in tl.static_range(2):
                    # Half 0 goes to the even bucket. It is the word's other half if the group's
                    # lowest bit is flipped.
                    position = (flip >> 12) ^ half
                    x = tl.where(position == 0, low_half(word, KIND), high_half(word, KIND))
                    fine = index + position < count
                    zeros += (fine & (x == 0.0)).to(tl.int32)
                    fine, nan, up, down = classify(x, fine, LOWEST, FLOAT)
                    nans += nan.to(tl.int32)
                    above += up.to(tl.int32)
                    below += down.to(tl.int32)
                    seen += fine.to(tl.int32)
                    low = tl.minimum(low, tl.where(fine, x, float("inf")))
                    high = tl.maximum(high, tl.where(fine, x, float("-inf")))
                    z = tl.where(fine, x, 0.0).to(tl.float64)
                    sum_1 += z
                    sum_2 += z * z
                    z = signed(z, signs, 2 * k + half)
                    if k == 0:
                        if half == 0:
                            s_0 += z
                        else:
                            s_1 += z
                    elif k == 1:
                        if half == 0:
                            s_2 += z
                        else:
                            s_3 += z
                    elif k == 2:
                        if half == 0:
                            s_4 += z
                        else:
                            s_5 += z
                    else:
                        if half == 0:
                            s_6 += z
                        else:
                            s_7 += z
        seed = mixed((thread + chunk * 256 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ seed)
        digest_b += mixed(b + seed)

    infinities = above + (below.to(tl.int64) << 32)
    total, squares, seen_, zeros_, nans_, infinite, da, db, least, most_ = reduce_figures(
        sum_1, sum_2, seen, zeros, nans, infinities, digest_a, digest_b, low, high, 256, LEVEL
    )
    store_row(
        rows_at, row + pid, finite + seen_, 0.0, total, squares, zeros_, nans_, infinite, da, db,
        least, most_,
    )  # fmt: skip
    if LEVEL > 0:
        r_0, r_1, r_2, r_3, r_4, r_5, r_6, r_7 = tl.reduce(
            (s_0, s_1, s_2, s_3, s_4, s_5, s_6, s_7), 0, eight_sums
        )
    else:
        r_0, r_1, r_2, r_3 = tl.sum(s_0, 0), tl.sum(s_1, 0), tl.sum(s_2, 0), tl.sum(s_3, 0)
        r_4, r_5, r_6, r_7 = tl.sum(s_4, 0), tl.sum(s_5, 0), tl.sum(s_6, 0), tl.sum(s_7, 0)
    out = rows_at.to(tl.pointer_type(tl.float64)) + (row + pid) * 80
    buckets = out + 16 + tl.arange(0, 8) * 8
    tl.store(buckets, r_0)
    tl.store(buckets + 1, r_1)
    tl.store(buckets + 2, r_2)
    tl.store(buckets + 3, r_3)
    tl.store(buckets + 4, r_4)
    tl.store(buckets + 5, r_5)
    tl.store(buckets + 6, r_6)
    tl.store(buckets + 7, r_7)
    if pid == 0:
        meta = meta_at.to(tl.pointer_type(tl.int64)) + slot * 2
        tl.store(meta, row)
        tl.store(meta + 1, tl.num_programs(0).to(tl.int64))
