"""The rows that the programs of a pair left, joined; and positions looked up, as a Triton kernel.

A position is looked for only in the part that it must lie in, by many programs.
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

from driftline.adapters.torch.device.pair_parts import elements

WARPS = 8


@triton.jit
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
        line = tl.arange(0, 64)[:, None]
        sums = tl.zeros([64, 64], tl.float64)
        tops = tl.full([64, 64], float("-inf"), tl.float64)
        lows = tl.full([64, 64], float("inf"), tl.float64)
        for at in range(0, many, 64):
            there = at + line < many
            places = rows + (at + line) * 40 + field
            found = tl.load(places, mask=there & (field < 33), other=0.0)
            sums += tl.where(field < 26, found, 0.0)
            tops = tl.maximum(tops, tl.where(there & (field < 31), found, float("-inf")))
            lows = tl.minimum(lows, tl.where(there & (field > 30), found, float("inf")))
        total = tl.sum(sums, 0)
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
            number < 26, total, tl.where(number < 31, tl.max(tops, 0), tl.min(lows, 0))
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
            r_raw = tl.load(ours + flat, mask=there, other=0.0)
            c_raw = tl.load(theirs + flat, mask=there, other=0.0)
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
                fast = tl.abs(c_raw.to(tl.float32) - r_raw.to(tl.float32)).to(tl.float64) == most
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
