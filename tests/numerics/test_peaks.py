"""The largest magnitude and the special values of a tensor, on every format and path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftline.numerics import peaks
from driftline.numerics.dtypes import PATTERNS
from driftline.numerics.peaks import peak_at, tally_at

REAL = [name for name, pattern in PATTERNS.items() if pattern.reals == 1]


def raw_of(name: str, seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    width = PATTERNS[name].bits // 8
    return rng.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")


def as_torch(raw: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(raw.view(np.uint8).copy()).view(getattr(torch, name))


@pytest.mark.parametrize("name", REAL)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300))
def test_the_kernel_counts_what_torch_sees_in_random_bits(name: str, seed: int, count: int) -> None:
    raw = raw_of(name, seed, count)
    pattern = PATTERNS[name]
    values = as_torch(raw, name).to(torch.float64)
    tally = tally_at(raw.ctypes.data, count, pattern)
    assert tally.nan == int(values.isnan().sum())
    assert tally.pos_inf == int((values == math.inf).sum())
    assert tally.neg_inf == int((values == -math.inf).sum())
    assert tally.zero == int((values == 0).sum())
    assert tally.top == int((values == pattern.largest).sum())
    assert tally.bottom == int((values == -pattern.largest).sum())
    peak = peak_at(raw.ctypes.data, count, pattern)
    finite = bool(values.isfinite().all())
    assert (peak <= pattern.top) == finite
    if finite:
        assert pattern.value(peak) == float(values.abs().max())
    elif tally.nan:
        assert math.isnan(pattern.value(peak))
    else:
        assert pattern.value(peak) == math.inf


@pytest.mark.parametrize("name", REAL)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 200))
def test_numpy_says_the_same_as_the_kernel(name: str, seed: int, count: int) -> None:
    raw, pattern = raw_of(name, seed, count), PATTERNS[name]
    assert peaks._peak_in_numpy(raw, pattern) == peak_at(raw.ctypes.data, count, pattern)
    assert peaks._tally_in_numpy(raw, pattern) == tally_at(raw.ctypes.data, count, pattern)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("path", [0, 1, 2])
def test_every_path_finds_one_nan_wherever_it_stands(name: str, path: int) -> None:
    functions = peaks._functions()
    if functions is None or path > functions[2]:
        pytest.skip("this machine cannot take the path")
    pattern = PATTERNS[name]
    width = pattern.bits // 8
    nan = 0x80 if pattern.odd_nan else pattern.mask
    for count in (1, 7, 64, 131):
        for at in range(count):
            room = np.zeros(count * width + 1, np.uint8)
            raw = room[1:].view(np.uint8)  # off by one byte: any alignment will do
            raw[at * width : (at + 1) * width] = np.frombuffer(
                int(nan).to_bytes(width, "little"), np.uint8
            )
            found = functions[0](
                raw.ctypes.data, pattern.bits, count, pattern.mask, pattern.odd_nan, path
            )
            assert found > pattern.top


def test_headroom_is_counted_in_powers_of_two() -> None:
    half = PATTERNS["float16"]
    one = np.array([1.0], np.float16)
    room = half.headroom(peak_at(one.ctypes.data, 1, half))
    assert room == pytest.approx(math.log2(65504.0))
    assert half.headroom(half.top) == 0.0
    assert half.headroom(0) == math.inf
    assert PATTERNS["float8_e4m3fn"].headroom(0x7E) == 0.0


def test_complex_numbers_are_two_reals_each() -> None:
    values = np.array([1 + 1j, complex(math.nan, math.inf)], np.complex64)
    assert tally_at(values.ctypes.data, 2, PATTERNS["complex64"])[4:] == (1, 0, 1)
