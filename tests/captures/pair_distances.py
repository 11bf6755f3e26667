"""Values and distances that the kernel for pairs sees in single pairs of 8-bit floats.

Triton's interpreter must be on before this file is imported; see `interpreted.py`.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from driftline.numerics.gpu.kernels.pair_elements import (
    apart_numbers,
    half_of,
    halves,
    own_steps,
    value_of,
)


class Distances(NamedTuple):
    """Of each pair.

    Attributes:
        reference: The number that the reference is, as the fast way reads it.
        candidate: The number that the candidate is, as the careful way reads it.
        by_numbers: The distance as the careful way computes it.
        by_patterns: The distance of the patterns as they lie in `halves`.
    """

    reference: Any
    candidate: Any
    by_numbers: Any
    by_patterns: Any


@triton.jit
def _distances(ours, theirs, into, KIND: tl.constexpr, HALF: tl.constexpr):
    """Of pairs of elements: each program looks at 4096 words, and at one half of each."""
    word = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    r_pair = halves(tl.load(ours.to(tl.pointer_type(tl.uint16)) + word), KIND)
    c_pair = halves(tl.load(theirs.to(tl.pointer_type(tl.uint16)) + word), KIND)
    r = half_of(r_pair, HALF, KIND)
    element = word * 2 + HALF
    c = value_of(tl.load(theirs + element), KIND)
    tl.store(into + element * 4, r)
    tl.store(into + element * 4 + 1, c)
    fast = own_steps(apart_numbers(r, half_of(c_pair, HALF, KIND), KIND), KIND)
    tl.store(into + element * 4 + 2, fast.to(tl.float32))
    size = 0x7FFF
    r_bits = ((r_pair >> (16 * HALF)) & 0xFFFF).to(tl.int32)
    c_bits = ((c_pair >> (16 * HALF)) & 0xFFFF).to(tl.int32)
    r_at = tl.where(r_bits > size, -(r_bits & size), r_bits)
    c_at = tl.where(c_bits > size, -(c_bits & size), c_bits)
    tl.store(into + element * 4 + 3, own_steps(tl.abs(r_at - c_at), KIND).to(tl.float32))


def distances_of_pairs(ours: Any, theirs: Any, kind: str) -> Distances:
    """The distances of codes; a multiple of 8192 of them."""
    into = torch.empty((ours.size, 4), dtype=torch.float32)
    for half in range(2):
        _distances[(ours.size // 8192,)](
            torch.from_numpy(np.ascontiguousarray(ours)),
            torch.from_numpy(np.ascontiguousarray(theirs)),
            into,
            KIND=kind,
            HALF=half,
        )
    return Distances(*into.numpy().T)
