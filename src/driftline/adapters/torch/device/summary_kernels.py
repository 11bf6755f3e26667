"""The summary of a device tensor in one pass over its memory, as a Triton kernel.

The figures and the sketch are those of `numerics/definitions.py`; the
digest is that of `digests.py`, because xxh3 can only be made by one thread after the other. Kernels
take addresses as plain numbers: whoever launches them keeps the memory alive.

One program takes some chunks of a tensor and leaves a row of partial figures. It reads fast first,
without a mask, and looks at its sums afterwards: if something was not finite, or a mask's
sentinel, it reads its chunks again carefully. Another kernel joins the rows of every tensor
(`summary_joining.py`). Elements of 16 bits have a kernel of their own (`summary_halves.py`).
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

from driftline.adapters.torch.device.summary_parts import (
    key,
    known_apart,
    left_row,
    mixed,
    signed,
    together,
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
    WIDE: tl.constexpr = KIND == "f64" or KIND == "i64" or KIND == "u64"
    NARROW: tl.constexpr = (
        KIND == "u8" or KIND == "i8" or KIND == "b8" or KIND == "e4m3" or KIND == "e5m2"
    )
    FLOAT: tl.constexpr = KIND == "f32" or KIND == "f64" or KIND == "e4m3" or KIND == "e5m2"
    # What 8 bits hold is summed exactly enough as it is.
    SHIFTED: tl.constexpr = not NARROW
    EXACT: tl.constexpr = WIDE or KIND == "i32" or KIND == "u32"  # float32 does not hold them
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
    column = tl.arange(0, 64)[None, :]
    sign_word = column >> 5
    place = column & 31
    # Each thread walks with pointers of its own: what is added to them is the same for all.
    my_flips = flips + (lane + column * 0)
    my_signs = sign_words + (lane * 2 + sign_word)
    my_data = data + (lane * 64 + column * 0)

    shift = 0.0
    if SHIFTED:
        # Any element of those that are summed will do: the spread is then taken around it.
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

    for chunk in range(begin, whole):
        a = tl.zeros([8, 64], tl.uint64)
        b = tl.zeros([8, 64], tl.uint64)
        present = tl.minimum((count - chunk * CHUNK) // (64 * TILE), TILES)
        for tile in range(present.to(tl.int32)):
            a = a * 0xFF51AFD7ED558CCD
            b = b * 0xC4CEB9FE1A85EC53
            ahead = chunk * 512 + tile * TILE
            for u in tl.static_range(STEPS):
                flip = tl.load(my_flips + ahead + u * 8).to(tl.int32)
                signs = tl.load(my_signs + ahead * 2 + u * 16)
                flip = ((flip & 31) << 1) | (flip >> 12)
                word = tl.load(my_data + ahead * 64 + u * 512 + (column ^ flip))
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
        spot = mixed((thread + chunk * 512 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ spot)
        digest_b += mixed(b + spot)

    finite = tl.minimum(whole * CHUNK, count) - begin * CHUNK
    bad = False
    if FLOAT:
        # What is not finite leaves a trace in the sum; a sentinel is the least there is.
        odd_one = sum_1 - sum_1 != 0.0
        if LOWEST != 0.0:
            odd_one = odd_one | (low <= LOWEST)
        bad = tl.max(tl.reshape(odd_one.to(tl.int32), [512]), 0) > 0
    start = whole
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
                at = group * 64 + (column ^ (((flip & 31) << 1) | (flip >> 12)))
                fine = at < count
                word = tl.load(data + at, mask=fine, other=0)
                x = _decoded(word, KIND)
                zeros += (fine & (x == 0.0)).to(tl.int32)
                fine, nan, up, down = known_apart(x, fine, LOWEST, FLOAT)
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
        spot = mixed((thread + chunk * 512 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        digest_a += mixed(a ^ spot)
        digest_b += mixed(b + spot)

    infinities = above + (below.to(tl.int64) << 32)
    total, squares, seen_, zeros_, nans_, infinite, da, db, least, most = together(
        sum_1, sum_2, seen, zeros, nans, infinities, digest_a, digest_b, low, high, 512, LEVEL
    )
    left_row(
        rows_at, row + pid, finite + seen_, shift, total, squares, zeros_, nans_, infinite, da, db,
        least, most,
    )  # fmt: skip
    out = rows_at.to(tl.pointer_type(tl.float64)) + (row + pid) * 80
    tl.store(out + 16 + tl.arange(0, 64), tl.sum(sketch, 0))
    if pid == 0:
        meta = meta_at.to(tl.pointer_type(tl.int64)) + slot * 2
        tl.store(meta, row)
        tl.store(meta + 1, tl.num_programs(0).to(tl.int64))
