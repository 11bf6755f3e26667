"""Pairs that threads of the kernel's own measure: the same moments, and memory that stays."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

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
    many = ManyPairs(b"".join(asks), len(asks), sides, threads)
    found = [many.moments(at) for at in reversed(range(len(asks)))][::-1]
    many.finish()
    for at, (name, r, c) in enumerate(sides):
        alone = kernel.pair_moments(
            *(r, DTYPES[name], c, DTYPES[name]), count=r.size, rtol=1e-3, atol=1e-2
        )
        assert many.moments(at) == found[at] == alone


def test_what_is_not_wanted_is_not_measured_and_what_goes_away_is_waited_for() -> None:
    large = np.ones(1 << 20, np.float32)
    asks = [ask(large.ctypes.data, large.ctypes.data, ("float32",) * 2, large.size, 0.0, 0.0)]
    many = ManyPairs(b"".join(asks) * 200, 200 * len(asks), large)
    many.end()
    found = [many.moments(at) for at in range(200)]
    assert found[-1] is None
    assert all(moments is None or moments.count == large.size for moments in found)
    many.finish()  # a second end is none
    begun = ManyPairs(b"".join(asks) * 200, 200 * len(asks), bytearray(1))
    del begun
    gc.collect()


def test_pages_of_a_mapped_file_that_were_let_go_come_back(tmp_path: Path) -> None:
    values = np.arange(1 << 21, dtype=np.float32)
    values.tofile(tmp_path / "values")
    with (tmp_path / "values").open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)
    place = mapped.ctypes.data
    asked = ask(place, place, ("float32", "float32"), mapped.size, 0.0, 0.0, mapped=True)
    many = ManyPairs(asked, 1, mapped)
    first = many.moments(0)
    assert first is not None and first.count == mapped.size
    many.finish()
    assert np.array_equal(mapped, values)
