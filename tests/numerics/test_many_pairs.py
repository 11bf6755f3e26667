"""Pairs that threads of the kernel's own measure: the same moments, and memory that stays."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.many_pairs import ManyPairs, ask

pytestmark = pytest.mark.skipif(
    not kernel.takes_addresses(), reason="the C kernel was not built here"
)
TYPES = (("float32", "<f4"), ("float16", "<f2"), ("complex64", "<c8"), ("int64", "<i8"))


def values(dtype: str, count: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * 100).astype(dtype)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_pairs_have_the_moments_that_each_has_alone(threads: int) -> None:
    sides = [
        (name, values(storage, 1000 + at, at), values(storage, 1000 + at, at + 1))
        for at in range(20)
        for name, storage in TYPES
    ]
    asks = [
        ask(r.ctypes.data, c.ctypes.data, (name, name), r.size, 1e-3, 1e-2) for name, r, c in sides
    ]
    many = ManyPairs(asks, sides, threads)
    many.end(wanted=True)
    for at, (name, r, c) in enumerate(sides):
        alone = kernel.pair_moments(
            *(r, DTYPES[name], c, DTYPES[name]), count=r.size, rtol=1e-3, atol=1e-2
        )
        assert many.moments(at) == alone


def test_what_is_not_wanted_is_not_measured_and_what_goes_away_is_waited_for() -> None:
    large = np.ones(1 << 20, np.float32)
    asks = [ask(large.ctypes.data, large.ctypes.data, ("float32",) * 2, large.size, 0.0, 0.0)]
    many = ManyPairs(asks * 200, large)
    many.end(wanted=False)
    found = [many.moments(at) for at in range(200)]
    assert found[-1] is None
    assert all(moments is None or moments.count == large.size for moments in found)
    many.end(wanted=True)  # a second end is none
    begun = ManyPairs(asks * 200, bytearray(1))
    del begun
    gc.collect()
