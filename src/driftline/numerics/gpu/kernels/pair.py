# pyright: basic, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The kernels that measure a pair of tensors: rows of sums, and their joining."""

# Kernels are compiled from their text; types mean something else in them.
# `from __future__ import annotations` would turn the arguments' types into text.
import triton
import triton.language as tl

from driftline.numerics.gpu.kernels.pair_elements import (
    apart_bits,
    apart_numbers,
    apart_pair,
    elements,
    half_of,
    halves,
    ordinal,
    own_steps,
    pairs_of,
    value_of,
)
from driftline.numerics.gpu.kernels.summary import (
    greatest_pair,
    largest_pair,
    least_pair,
)


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
    """Leave the figures of a program in its row; see `joined_pair` for the fields."""
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


# Everything one pass over a pair of device tensors can know, as a Triton kernel.


WARPS = 4
"""Number of warps of a program that reads a pair."""
JOIN_WARPS = 8


@triton.jit(do_not_specialize=["count", "each", "rtol_bits", "atol_bits"])
def pair_rows(
    reference: tl.int64,
    candidate: tl.int64,
    count: tl.int64,
    each: tl.int64,
    rows_at: tl.int64,
    rtol_bits: tl.int64,
    atol_bits: tl.int64,
    R: tl.constexpr,
    C: tl.constexpr,
    R_LOWEST: tl.constexpr,
    C_LOWEST: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Partial figures of a pair: each program leaves its row; see `joined_pair` for the fields."""
    TOGETHER: tl.constexpr = LEVEL > 0
    ours = elements(reference, R)
    theirs = elements(candidate, C)
    rtol = rtol_bits.to(tl.float64, bitcast=True)
    atol = atol_bits.to(tl.float64, bitcast=True)
    rtol_32 = rtol.to(tl.float32)
    atol_32 = atol.to(tl.float32)
    pid = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = 2048
    begin = pid * each * 65536
    end = tl.minimum(begin + each * 65536, count)
    whole = begin + (end - begin) // TILE * TILE
    our_words = pairs_of(reference, R) + tl.arange(0, 256)
    their_words = pairs_of(candidate, C) + tl.arange(0, 256)

    first = value_of(tl.load(ours + begin), R)
    shift = tl.where(tl.abs(first) < 1e15, first, 0.0)
    s_x = tl.zeros([256], tl.float64)
    s_e = tl.zeros([256], tl.float64)
    s_xx = tl.zeros([256], tl.float64)
    s_xe = tl.zeros([256], tl.float64)
    s_ee = tl.zeros([256], tl.float64)
    s_ae = tl.zeros([256], tl.float64)
    s_rel = tl.zeros([256], tl.float64)
    outside = tl.zeros([256], tl.int32)
    different = tl.zeros([256], tl.int32)
    m_ae = tl.zeros([256], tl.float32)
    m_rel = tl.zeros([256], tl.float32)
    # Two numbers at a time, where the device has such instructions.
    PAIRS: tl.constexpr = LEVEL > 2 and R == C and C != "f32"
    # The bits of two bfloat16, or float32, need no shift before they are subtracted.
    BITS: tl.constexpr = PAIRS or (R == C and C == "bf16") or C == "f32"
    R_PACKED: tl.constexpr = LEVEL > 1 and R != "f32"
    C_PACKED: tl.constexpr = LEVEL > 1 and C != "f32"
    if BITS:
        m_ulp = tl.zeros([256], tl.uint32)
    else:
        m_ulp = tl.zeros([256], tl.int32)
    if R_PACKED:
        r_inf: tl.constexpr = 0x7F807F80 if R == "bf16" else 0x7C007C00
        r_min = tl.full([256], r_inf, tl.uint32)
        r_max = tl.full([256], r_inf + 0x80008000, tl.uint32)
    else:
        r_max = tl.full([256], float("-inf"), tl.float32)
        r_min = tl.full([256], float("inf"), tl.float32)
    if C_PACKED:
        c_inf: tl.constexpr = 0x7F807F80 if C == "bf16" else 0x7C007C00
        c_min = tl.full([256], c_inf, tl.uint32)
        c_max = tl.full([256], c_inf + 0x80008000, tl.uint32)
    else:
        c_max = tl.full([256], float("-inf"), tl.float32)
        c_min = tl.full([256], float("inf"), tl.float32)

    # The words of the next tile are on their way while those of this one are worked on.
    o_0, t_0 = ahead(our_words, their_words, begin, 0, whole > begin)
    o_1, t_1 = ahead(our_words, their_words, begin, 1, whole > begin)
    o_2, t_2 = ahead(our_words, their_words, begin, 2, whole > begin)
    o_3, t_3 = ahead(our_words, their_words, begin, 3, whole > begin)
    for at in range(begin, whole, TILE):
        a_0, a_1, a_2, a_3 = o_0, o_1, o_2, o_3
        b_0, b_1, b_2, b_3 = t_0, t_1, t_2, t_3
        after = tl.minimum(at + TILE, whole - TILE)
        o_0, t_0 = ahead(our_words, their_words, after, 0, True)
        o_1, t_1 = ahead(our_words, their_words, after, 1, True)
        o_2, t_2 = ahead(our_words, their_words, after, 2, True)
        o_3, t_3 = ahead(our_words, their_words, after, 3, True)
        f_x = tl.zeros([256], tl.float32)
        f_e = tl.zeros([256], tl.float32)
        f_xx = tl.zeros([256], tl.float32)
        f_xe = tl.zeros([256], tl.float32)
        f_ee = tl.zeros([256], tl.float32)
        f_ae = tl.zeros([256], tl.float32)
        f_rel = tl.zeros([256], tl.float32)
        for u in tl.static_range(4):
            if u == 0:
                our_word, their_word = a_0, b_0
            elif u == 1:
                our_word, their_word = a_1, b_1
            elif u == 2:
                our_word, their_word = a_2, b_2
            else:
                our_word, their_word = a_3, b_3
            our_word, their_word = halves(our_word, R), halves(their_word, C)
            if R_PACKED:
                r_min = least_pair(r_min, our_word, R)
                r_max = greatest_pair(r_max, our_word, R)
            if C_PACKED:
                c_min = least_pair(c_min, their_word, C)
                c_max = greatest_pair(c_max, their_word, C)
            if PAIRS:
                m_ulp = largest_pair(m_ulp, apart_pair(our_word, their_word))
            for half in tl.static_range(2):
                r = half_of(our_word, half, R)
                c = half_of(their_word, half, C)
                e = c - r
                x = r - shift
                ae = tl.abs(e)
                ar = tl.abs(r)
                # Two NaN are read again, so a difference that is not zero is a difference.
                differs = ae != 0.0
                rel = tl.where(differs, ae * one_over(ar, TOGETHER), 0.0)
                if BITS and not PAIRS:
                    m_ulp = tl.maximum(m_ulp, apart_bits(r, c, C))
                elif not BITS:
                    m_ulp = tl.maximum(m_ulp, apart_numbers(r, c, C))
                f_x += x
                f_e += e
                f_xx += x * x
                f_xe += x * e
                f_ee += e * e
                f_ae += ae
                f_rel += rel
                outside += (ae > atol_32 + rtol_32 * ar).to(tl.int32)
                different += differs.to(tl.int32)
                m_ae = tl.maximum(m_ae, ae)
                m_rel = tl.maximum(m_rel, rel)
                if not R_PACKED:
                    r_max = tl.maximum(r_max, r)
                    r_min = tl.minimum(r_min, r)
                if not C_PACKED:
                    c_max = tl.maximum(c_max, c)
                    c_min = tl.minimum(c_min, c)
        s_x += f_x.to(tl.float64)
        s_e += f_e.to(tl.float64)
        s_xx += f_xx.to(tl.float64)
        s_xe += f_xe.to(tl.float64)
        s_ee += f_ee.to(tl.float64)
        s_ae += f_ae.to(tl.float64)
        s_rel += f_rel.to(tl.float64)

    if R_PACKED:
        r_min = tl.minimum(half_of(r_min, 0, R), half_of(r_min, 1, R))
        r_max = tl.maximum(half_of(r_max, 0, R), half_of(r_max, 1, R))
    if C_PACKED:
        c_min = tl.minimum(half_of(c_min, 0, C), half_of(c_min, 1, C))
        c_max = tl.maximum(half_of(c_max, 0, C), half_of(c_max, 1, C))
    if PAIRS:
        m_ulp = tl.maximum(m_ulp & 0xFFFF, m_ulp >> 16)
    elif BITS and C == "bf16":
        m_ulp = m_ulp >> 16
    m_ulp = own_steps(m_ulp, C)
    # What float32 does not carry: read it again. (A NaN makes every comparison false.)
    size = tl.maximum(
        tl.maximum(tl.abs(r_max), tl.abs(r_min)), tl.maximum(tl.abs(c_max), tl.abs(c_min))
    )
    least_size = 8.7e-19  # 2 ** -60: the square of what matters is still an ordinary number
    fine = s_x - s_x == 0.0
    fine = fine & (s_e - s_e == 0.0) & (s_xx - s_xx == 0.0) & (s_ee - s_ee == 0.0)
    fine = fine & (size < 1e15) & ((m_ae == 0.0) | (m_ae > least_size))
    fine = fine & ((size == 0.0) | (size > least_size))
    fine = fine & (r_min > R_LOWEST) & (c_min > C_LOWEST)
    bad = (tl.max((~fine).to(tl.int32), 0) > 0) & (whole > begin)
    start = tl.where(bad, begin, whole)
    n = tl.where(bad, 0, whole - begin).to(tl.float64)
    if TOGETHER:
        s0, s1, s2, s3, s4, s5, s6, s7, s8, m0, m1, m2, m3, l0, l1 = tl.reduce(
            (
                s_x, s_e, s_xx, s_xe, s_ee, s_ae, s_rel, outside, different,
                m_ae, m_rel, r_max, c_max, r_min, c_min,
            ),
            0,
            joined,
        )  # fmt: skip
    else:
        s0, s1, s2 = tl.sum(s_x, 0), tl.sum(s_e, 0), tl.sum(s_xx, 0)
        s3, s4, s5 = tl.sum(s_xe, 0), tl.sum(s_ee, 0), tl.sum(s_ae, 0)
        s6, s7, s8 = tl.sum(s_rel, 0), tl.sum(outside, 0), tl.sum(different, 0)
        m0, m1, m2, m3 = tl.max(m_ae, 0), tl.max(m_rel, 0), tl.max(r_max, 0), tl.max(c_max, 0)
        l0, l1 = tl.min(r_min, 0), tl.min(c_min, 0)
    zero = n * 0.0
    x_1 = tl.where(bad, zero, s0)
    e_1 = tl.where(bad, zero, s1)
    xx = tl.where(bad, zero, s2)
    xe = tl.where(bad, zero, s3)
    ee = tl.where(bad, zero, s4)
    ae_1 = tl.where(bad, zero, s5)
    rel_1 = tl.where(bad, zero, s6)
    out_1 = tl.where(bad, 0, s7).to(tl.float64)
    dif_1 = tl.where(bad, 0, s8).to(tl.float64)
    ae_m = tl.where(bad, 0.0, m0).to(tl.float64)
    rel_m = tl.where(bad, 0.0, m1).to(tl.float64)
    ulp_m = tl.where(bad, 0, tl.max(m_ulp, 0).to(tl.int64)).to(tl.float64)
    r_top = tl.where(bad, float("-inf"), m2).to(tl.float64)
    c_top = tl.where(bad, float("-inf"), m3).to(tl.float64)
    r_low = tl.where(bad, float("inf"), l0).to(tl.float64)
    c_low = tl.where(bad, float("inf"), l1).to(tl.float64)
    shift_64 = shift.to(tl.float64)

    # One side at a time; where both are finite everywhere they say what the pair says.
    rn = n
    cn = n
    rx = x_1
    rxx = xx
    cy = x_1 + e_1
    cyy = xx + 2.0 * xe + ee
    r_nan = zero
    c_nan = zero
    r_pos = zero
    c_pos = zero
    r_neg = zero
    c_neg = zero
    lone = zero
    if start < end:
        v_n = tl.zeros([256], tl.float64)
        v_rn = tl.zeros([256], tl.float64)
        v_cn = tl.zeros([256], tl.float64)
        v_x_1 = tl.zeros([256], tl.float64)
        v_e_1 = tl.zeros([256], tl.float64)
        v_xx = tl.zeros([256], tl.float64)
        v_xe = tl.zeros([256], tl.float64)
        v_ee = tl.zeros([256], tl.float64)
        v_ae_1 = tl.zeros([256], tl.float64)
        v_rel_1 = tl.zeros([256], tl.float64)
        v_out_1 = tl.zeros([256], tl.float64)
        v_dif_1 = tl.zeros([256], tl.float64)
        v_lone = tl.zeros([256], tl.float64)
        v_rx = tl.zeros([256], tl.float64)
        v_rxx = tl.zeros([256], tl.float64)
        v_cy = tl.zeros([256], tl.float64)
        v_cyy = tl.zeros([256], tl.float64)
        v_r_nan = tl.zeros([256], tl.float64)
        v_c_nan = tl.zeros([256], tl.float64)
        v_r_pos = tl.zeros([256], tl.float64)
        v_c_pos = tl.zeros([256], tl.float64)
        v_r_neg = tl.zeros([256], tl.float64)
        v_c_neg = tl.zeros([256], tl.float64)
        v_ae_m = tl.zeros([256], tl.float64)
        v_rel_m = tl.zeros([256], tl.float64)
        v_ulp_m = tl.zeros([256], tl.float64)
        v_r_top = tl.full([256], float("-inf"), tl.float64)
        v_c_top = tl.full([256], float("-inf"), tl.float64)
        v_r_low = tl.full([256], float("inf"), tl.float64)
        v_c_low = tl.full([256], float("inf"), tl.float64)
        for at in range(start, end, 256):
            flat = at + tl.arange(0, 256)
            there = flat < end
            r_raw = value_of(tl.load(ours + flat, mask=there, other=0), R)
            c_raw = value_of(tl.load(theirs + flat, mask=there, other=0), C)
            r = r_raw.to(tl.float64)
            c = c_raw.to(tl.float64)
            r = tl.where(r == R_LOWEST, float("-inf"), r)
            c = tl.where(c == C_LOWEST, float("-inf"), c)
            rf = there & (r - r == 0.0)
            cf = there & (c - c == 0.0)
            both = rf & cf
            differs = there & (r != c) & ~((r != r) & (c != c))
            one = differs & ~both
            r_0 = tl.where(rf, r - shift_64, 0.0)
            c_0 = tl.where(cf, c - shift_64, 0.0)
            e = tl.where(both, c - r, 0.0)
            x = tl.where(both, r - shift_64, 0.0)
            ae = tl.abs(e)
            ar = tl.where(both, tl.abs(r), 1.0)
            rel = tl.where(ae == 0.0, 0.0, ae / ar)
            apart = own_steps(tl.abs(ordinal(r_raw, C) - ordinal(c_raw, C)), C)
            v_n += both.to(tl.int32).to(tl.float64)
            v_rn += rf.to(tl.int32).to(tl.float64)
            v_cn += cf.to(tl.int32).to(tl.float64)
            v_x_1 += x
            v_e_1 += e
            v_xx += x * x
            v_xe += x * e
            v_ee += e * e
            v_ae_1 += ae
            v_rel_1 += rel
            beyond = (both & ~(ae <= atol + rtol * ar)) | one
            v_out_1 += beyond.to(tl.int32).to(tl.float64)
            v_dif_1 += differs.to(tl.int32).to(tl.float64)
            v_lone += one.to(tl.int32).to(tl.float64)
            v_ae_m = tl.maximum(v_ae_m, (ae))
            v_rel_m = tl.maximum(v_rel_m, (rel))
            v_ulp_m = tl.maximum(v_ulp_m, (tl.where(both, apart, 0)).to(tl.float64))
            v_r_top = tl.maximum(v_r_top, (tl.where(rf, r, float("-inf"))))
            v_c_top = tl.maximum(v_c_top, (tl.where(cf, c, float("-inf"))))
            v_r_low = tl.minimum(v_r_low, tl.where(rf, r, float("inf")))
            v_c_low = tl.minimum(v_c_low, tl.where(cf, c, float("inf")))
            v_rx += r_0
            v_rxx += r_0 * r_0
            v_cy += c_0
            v_cyy += c_0 * c_0
            v_r_nan += (there & (r != r)).to(tl.int32).to(tl.float64)
            v_c_nan += (there & (c != c)).to(tl.int32).to(tl.float64)
            v_r_pos += (there & (r == float("inf"))).to(tl.int32).to(tl.float64)
            v_c_pos += (there & (c == float("inf"))).to(tl.int32).to(tl.float64)
            v_r_neg += (there & (r == float("-inf"))).to(tl.int32).to(tl.float64)
            v_c_neg += (there & (c == float("-inf"))).to(tl.int32).to(tl.float64)
        n += tl.sum(v_n, 0)
        rn += tl.sum(v_rn, 0)
        cn += tl.sum(v_cn, 0)
        x_1 += tl.sum(v_x_1, 0)
        e_1 += tl.sum(v_e_1, 0)
        xx += tl.sum(v_xx, 0)
        xe += tl.sum(v_xe, 0)
        ee += tl.sum(v_ee, 0)
        ae_1 += tl.sum(v_ae_1, 0)
        rel_1 += tl.sum(v_rel_1, 0)
        out_1 += tl.sum(v_out_1, 0)
        dif_1 += tl.sum(v_dif_1, 0)
        lone += tl.sum(v_lone, 0)
        rx += tl.sum(v_rx, 0)
        rxx += tl.sum(v_rxx, 0)
        cy += tl.sum(v_cy, 0)
        cyy += tl.sum(v_cyy, 0)
        r_nan += tl.sum(v_r_nan, 0)
        c_nan += tl.sum(v_c_nan, 0)
        r_pos += tl.sum(v_r_pos, 0)
        c_pos += tl.sum(v_c_pos, 0)
        r_neg += tl.sum(v_r_neg, 0)
        c_neg += tl.sum(v_c_neg, 0)
        ae_m = tl.maximum(ae_m, tl.max(v_ae_m, 0))
        rel_m = tl.maximum(rel_m, tl.max(v_rel_m, 0))
        ulp_m = tl.maximum(ulp_m, tl.max(v_ulp_m, 0))
        r_top = tl.maximum(r_top, tl.max(v_r_top, 0))
        c_top = tl.maximum(c_top, tl.max(v_c_top, 0))
        r_low = tl.minimum(r_low, tl.min(v_r_low, 0))
        c_low = tl.minimum(c_low, tl.min(v_c_low, 0))

    if pid == 0:  # where the second kernel puts positions: beyond the end, until it finds them
        spots = rows_at.to(tl.pointer_type(tl.int64)) + 35
        tl.store(spots + tl.arange(0, 8), tl.zeros([8], tl.int64) + count, mask=tl.arange(0, 8) < 5)
    left_pair(
        rows_at, pid + 1,
        n, x_1, e_1, xx, xe, ee, ae_1, rel_1, out_1, dif_1, rn, cn, rx, cy, rxx, cyy, r_nan, c_nan,
        r_pos, c_pos, r_neg, c_neg, lone, ae_m, rel_m, ulp_m, r_top, c_top, r_low, c_low, shift_64,
    )  # fmt: skip


# The rows that the programs of a pair left, joined; and positions looked up, as a Triton
# kernel.


@triton.jit(do_not_specialize=["count", "each", "many", "shares"])
def joined_pair(
    reference: tl.int64,
    candidate: tl.int64,
    count: tl.int64,
    each: tl.int64,
    rows_at: tl.int64,
    many: tl.int64,
    shares: tl.int64,
    R: tl.constexpr,
    C: tl.constexpr,
    R_LOWEST: tl.constexpr,
    C_LOWEST: tl.constexpr,
):
    """Row 0 from the others. Program 0 joins figures, `shares` each look one position up.

    Fields 0 to 25 are sums, 26 to 30 greatest, 31 and 32 least values, 33 and 34 means; 35 to 39
    the positions (whole numbers) of the greatest error, the first difference, the first element
    that is finite on one side only, and the first that is not finite on each side.
    """
    rows = rows_at.to(tl.pointer_type(tl.float64)) + 40
    out = rows_at.to(tl.pointer_type(tl.float64))
    program = tl.program_id(0)
    what = (program + shares - 1) // shares  # 0 for the first one, then `shares` of each
    share = (program + shares - 1) % shares
    lane = tl.arange(0, 256)  # rows that are looked at together
    if what == 0:
        field = tl.arange(0, 64)[None, :]
        line = tl.arange(0, 128)[:, None]
        # One table for all fields: three would not fit into registers.
        figures = tl.where(field < 26, 0.0, tl.where(field < 31, float("-inf"), float("inf")))
        figures = figures + tl.zeros([128, 64], tl.float64)
        for at in range(0, many, 128):
            there = at + line < many
            places = rows + (at + line) * 40 + field
            found = tl.load(places, mask=there & (field < 33), other=0.0)
            extreme = tl.where(field < 31, tl.maximum(figures, found), tl.minimum(figures, found))
            figures = tl.where(there, tl.where(field < 26, figures + found, extreme), figures)
        total = tl.sum(tl.where(field < 26, figures, 0.0), 0)
        number = tl.arange(0, 64)
        # The spread around the common mean: that of each part, and how far their means are off.
        r_n = tl.sum(tl.where(number == 11, total, 0.0), 0)
        c_n = tl.sum(tl.where(number == 12, total, 0.0), 0)
        r_mean = tl.sum(tl.where(number == 13, total, 0.0), 0) / tl.maximum(r_n, 1.0)
        c_mean = tl.sum(tl.where(number == 14, total, 0.0), 0) / tl.maximum(c_n, 1.0)
        r_apart = tl.zeros([256], tl.float64)
        c_apart = tl.zeros([256], tl.float64)
        for at in range(0, many, 256):
            there = at + lane < many
            mine = rows + (at + lane) * 40
            some = tl.load(mine + 11, mask=there, other=0.0)
            off = tl.load(mine + 33, mask=there, other=0.0) - r_mean
            r_apart += tl.where(some > 0.0, some * off * off, 0.0)
            some = tl.load(mine + 12, mask=there, other=0.0)
            off = tl.load(mine + 34, mask=there, other=0.0) - c_mean
            c_apart += tl.where(some > 0.0, some * off * off, 0.0)
        total += tl.where(number == 17, tl.sum(r_apart, 0), 0.0)
        total += tl.where(number == 18, tl.sum(c_apart, 0), 0.0)
        found = tl.where(
            number < 26, total, tl.where(number < 31, tl.max(figures, 0), tl.min(figures, 0))
        )
        tl.store(out + number, found, mask=number < 33)
    else:
        ours = elements(reference, R)
        theirs = elements(candidate, C)
        best = tl.zeros([256], tl.float64)
        for at in range(0, many, 256):
            there = at + lane < many
            best = tl.maximum(best, tl.load(rows + (at + lane) * 40 + 26, mask=there, other=0.0))
        most = tl.max(best, 0)
        never = many * 1
        part = tl.zeros([256], tl.int64) + never
        for at in range(0, many, 256):
            there = at + lane < many
            mine = rows + (at + lane) * 40
            if what == 1:
                hit = tl.load(mine + 26, mask=there, other=-1.0) == tl.where(most > 0.0, most, -2.0)
            elif what == 2:
                hit = tl.load(mine + 10, mask=there, other=0.0) > 0.0
            elif what == 3:
                hit = tl.load(mine + 25, mask=there, other=0.0) > 0.0
            elif what == 4:
                bad = tl.load(mine + 19, mask=there, other=0.0)
                bad += tl.load(mine + 21, mask=there, other=0.0)
                bad += tl.load(mine + 23, mask=there, other=0.0)
                hit = bad > 0.0
            else:
                bad = tl.load(mine + 20, mask=there, other=0.0)
                bad += tl.load(mine + 22, mask=there, other=0.0)
                bad += tl.load(mine + 24, mask=there, other=0.0)
                hit = bad > 0.0
            part = tl.minimum(part, tl.where(there & hit, at + lane, never))
        chosen = tl.min(part, 0)
        length = each * 65536
        piece = (length + shares - 1) // shares
        begin = chosen * length + share * piece
        end = tl.minimum(tl.minimum(begin + piece, (chosen + 1) * length), count)
        end = tl.where(chosen < many, end, begin)
        spot = tl.zeros([2048], tl.int64) + count
        for at in range(begin, end, 2048):
            flat = at + tl.arange(0, 2048)
            there = flat < end
            r_raw = value_of(tl.load(ours + flat, mask=there, other=0), R)
            c_raw = value_of(tl.load(theirs + flat, mask=there, other=0), C)
            r = r_raw.to(tl.float64)
            c = c_raw.to(tl.float64)
            r = tl.where(r == R_LOWEST, float("-inf"), r)
            c = tl.where(c == C_LOWEST, float("-inf"), c)
            rf = r - r == 0.0
            cf = c - c == 0.0
            differs = (r != c) & ~((r != r) & (c != c))
            if what == 1:
                # As it was found: exactly, or in float32.
                exact = tl.abs(c - r) == most
                fast = tl.abs(c_raw - r_raw).to(tl.float64) == most
                hit = rf & cf & (exact | fast)
            elif what == 2:
                hit = differs
            elif what == 3:
                hit = differs & ~(rf & cf)
            elif what == 4:
                hit = ~rf
            else:
                hit = ~cf
            spot = tl.minimum(spot, tl.where(there & hit, flat, count))
        place = tl.min(spot, 0)
        if place < count:
            tl.atomic_min(rows_at.to(tl.pointer_type(tl.int64)) + 34 + what, place)
