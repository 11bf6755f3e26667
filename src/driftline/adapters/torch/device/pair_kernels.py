"""Everything one pass over a pair of device tensors can know, as a Triton kernel.

The figures are those of `numerics/fields.py`. As in the summary's kernel a program reads its part
fast first, eight elements in float32 and their sums in float64, and looks at its figures: what
float32 cannot carry (not finite, sentinels, very large or very small) is read again carefully.
Another kernel joins the programs' rows and looks up positions (`pair_joining.py`).
"""

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

from driftline.adapters.torch.device.pair_parts import (
    ahead,
    elements,
    half_of,
    joined,
    known_ordinal,
    left_pair,
    one_over,
    ordinal,
    pairs_of,
    sorted_bits,
)
from driftline.adapters.torch.device.summary_parts import greatest_pair, least_pair

WARPS = 8


@triton.jit
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

    first = tl.load(ours + begin).to(tl.float32)
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
    # The bits of two bfloat16, or float32, need no shift before they are subtracted.
    BITS: tl.constexpr = (R == C and C == "bf16") or C == "f32"
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
            if R_PACKED:
                r_min = least_pair(r_min, our_word, R)
                r_max = greatest_pair(r_max, our_word, R)
            if C_PACKED:
                c_min = least_pair(c_min, their_word, C)
                c_max = greatest_pair(c_max, their_word, C)
            for half in tl.static_range(2):
                r = half_of(our_word, half, R)
                c = half_of(their_word, half, C)
                e = c - r
                x = r - shift
                ae = tl.abs(e)
                ar = tl.abs(r)
                rel = tl.where(ae == 0.0, 0.0, ae * one_over(ar, TOGETHER))
                if BITS:
                    ours_sorted = sorted_bits(r)
                    theirs_sorted = sorted_bits(c)
                    most = tl.maximum(ours_sorted, theirs_sorted).to(tl.uint32, bitcast=True)
                    apart = most - tl.minimum(ours_sorted, theirs_sorted).to(
                        tl.uint32, bitcast=True
                    )
                    if C == "f32":  # off by one where only one of them is below zero
                        apart -= ((ours_sorted ^ theirs_sorted).to(tl.uint32, bitcast=True)) >> 31
                else:
                    apart = tl.abs(ordinal(r, C) - known_ordinal(c, C))
                f_x += x
                f_e += e
                f_xx += x * x
                f_xe += x * e
                f_ee += e * e
                f_ae += ae
                f_rel += rel
                outside += (ae > atol_32 + rtol_32 * ar).to(tl.int32)
                different += (r != c).to(tl.int32)
                m_ae = tl.maximum(m_ae, ae)
                m_rel = tl.maximum(m_rel, rel)
                m_ulp = tl.maximum(m_ulp, apart)
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
    if BITS and C == "bf16":
        m_ulp = m_ulp >> 16
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
            r_raw = tl.load(ours + flat, mask=there, other=0.0)
            c_raw = tl.load(theirs + flat, mask=there, other=0.0)
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
            apart = tl.abs(ordinal(r_raw.to(tl.float32), C) - ordinal(c_raw.to(tl.float32), C))
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
