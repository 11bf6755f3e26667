"""The rows that the programs of a tensor left, joined in their order, as a Triton kernel.

So that the result does not depend on which program was faster, or on the device.
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
