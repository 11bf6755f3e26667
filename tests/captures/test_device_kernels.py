"""The kernels of devices, in Triton's interpreter: their figures are those of the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import needs_interpreter

from driftline.captures.torch.device import summaries
from driftline.captures.torch.device.places import HostPlace
from driftline.captures.torch.device.summaries import SummaryBatch, Tables, kind_of
from driftline.numerics import definitions
from driftline.numerics import definitions as digests
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments, Summary
from driftline.numerics.gpu.pairs import EXACT, moments_of, pair_on_device

pytestmark = needs_interpreter
summaries._FIRST_TABLE = 1024  # the interpreter takes seconds for the usual one
COUNT = 2113  # a tile of 2048, a group, and one element


@pytest.fixture(scope="module")
def batch() -> SummaryBatch:
    place = HostPlace()
    return SummaryBatch(place, Tables(place))


def raw(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def taken(batch: SummaryBatch, tensor: torch.Tensor) -> tuple[str, Summary]:
    name = str(tensor.dtype).removeprefix("torch.")
    kind = kind_of(name)
    assert kind is not None
    count = tensor.numel() * kind.reals
    transfer, slot = batch.take(tensor, kind, count)
    batch.send()
    return transfer.result(slot, count, kind.width)


def assert_defined(found: Summary, tensor: torch.Tensor) -> None:
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    wanted = definitions.summarize(raw(tensor), dtype, count=tensor.numel())
    assert found.count == wanted.count
    assert found[6:10] == wanted[6:10]
    if not np.isnan(wanted.min):
        assert (found.min, found.max) == (wanted.min, wanted.max)
    scale = wanted.l2 / max(1, wanted.count) ** 0.5
    assert np.allclose(found[3:6], wanted[3:6], rtol=1e-9, atol=1e-12 * scale, equal_nan=True)
    assert np.allclose(found.sketch, wanted.sketch, rtol=0, atol=1e-12 * wanted.l2)


def numbers(dtype: torch.dtype, count: int = COUNT, *, dirty: bool = True) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(7)) * 5
    if not dtype.is_floating_point:
        return (made * 10).to(dtype)
    if dirty:
        made[1], made[64], made[count // 2], made[-1] = np.nan, 0.0, -np.inf, np.inf
    made = made.to(dtype)
    if dirty and dtype.itemsize > 1:
        made[5] = torch.finfo(dtype).min
    return made


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OTHERS = (torch.int64, torch.int16, torch.uint8, torch.bool)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS, *EIGHTS])
def test_a_summary_is_what_the_definition_says(batch: SummaryBatch, dtype: torch.dtype) -> None:
    tensor = numbers(dtype)
    digest, found = taken(batch, tensor)
    assert_defined(found, tensor)
    assert digest == digests.digest_of(raw(tensor), dtype.itemsize)


def test_whole_tiles_are_read_fast_and_mean_the_same(batch: SummaryBatch) -> None:
    for dtype, far in ((torch.bfloat16, 100.0), (torch.float32, 1000.0)):
        tensor = (numbers(torch.float32, 4096, dirty=False) * 1e-3 + far).to(dtype)
        tensor[7] = 0.0
        _, found = taken(batch, tensor)
        assert_defined(found, tensor)


def test_a_complex_number_is_two_reals(batch: SummaryBatch) -> None:
    tensor = torch.view_as_complex(numbers(torch.float32, 200).reshape(100, 2))
    _, found = taken(batch, tensor)
    assert_defined(found, tensor)


def test_a_digest_notices_order_and_length_and_nothing_else() -> None:
    values = np.arange(70000, dtype=np.uint16)
    plain = digests.digest_of(values, 2)
    assert plain == digests.digest_of(values.copy(), 2)
    swapped = values.copy()
    swapped[[3, 40000]] = swapped[[40000, 3]]
    shifted = np.roll(values, 1)
    seen = {plain, digests.digest_of(swapped, 2), digests.digest_of(shifted, 2)}
    seen |= {digests.digest_of(values[:-1], 2), digests.digest_of(values, 4)}
    assert len(seen) == 5
    zeros = {digests.digest_of(np.zeros(n, np.uint16), 2) for n in (1, 2, 63, 64, 65, 4096)}
    assert len(zeros) == 6


def raw_moments(r: torch.Tensor, c: torch.Tensor) -> PairMoments:
    dtypes = [DTYPES[str(t.dtype).removeprefix("torch.")] for t in (r, c)]
    return definitions.pair_moments(
        raw(r), dtypes[0], raw(c), dtypes[1], count=r.numel(), rtol=0.01, atol=1e-4
    )


def assert_same_moments(r: torch.Tensor, c: torch.Tensor) -> None:
    row = pair_on_device(r, c, rtol=0.01, atol=1e-4)
    found, wanted = moments_of(row, r.numel()), raw_moments(r, c)
    norms = (wanted.r_l2 + wanted.c_l2) / max(r.numel(), 1) ** 0.5
    for name, mine, theirs in zip(PairMoments._fields, found, wanted, strict=True):
        scale = norms if name in ("r_mean", "c_mean") else abs(theirs)
        scale = (wanted.sum_rr * wanted.sum_cc) ** 0.5 if name == "sum_rc" else scale
        same = mine == theirs or (mine != mine and theirs != theirs)
        assert same or abs(mine - theirs) <= 2e-6 * scale, (name, mine, theirs)


PAIRS = [(FLOATS[2], FLOATS[0]), (FLOATS[0], FLOATS[0]), (FLOATS[1], FLOATS[2])]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_pair_s_moments_are_what_the_definition_says(
    ours: torch.dtype, theirs: torch.dtype
) -> None:
    r = torch.randn(2200, generator=torch.Generator().manual_seed(1))
    c = r * (1 + 0.01 * torch.randn(2200, generator=torch.Generator().manual_seed(2)))
    c[0] = r[0]
    r[3] = 0.0
    assert_same_moments(r.to(ours), c.to(theirs))


@pytest.mark.parametrize("dtype", [*EXACT, *EIGHTS], ids=str)
def test_pairs_of_eight_bits_are_compared_on_the_device(
    dtype: torch.dtype,
) -> None:
    codes = torch.arange(2200, dtype=torch.int32) % 256
    other = codes.roll(3)
    if dtype is torch.bool:
        codes, other = codes % 3 == 0, other % 2 == 0
    elif dtype is torch.int16:
        codes, other = (codes - 128) * 250, (other - 128) * 250
    else:  # every pattern, with its infinities and NaN
        codes, other = codes.to(torch.uint8), other.to(torch.uint8)
    same_size = codes.dtype.itemsize == dtype.itemsize
    r, c = (t.view(dtype) if same_size else t.to(dtype) for t in (codes, other))
    assert_same_moments(r, c)
    assert_same_moments(r, r.clone())


@pytest.mark.parametrize("dtype", EIGHTS, ids=str)
def test_of_8_bit_floats_every_pair_has_the_distance_of_the_definition(dtype: torch.dtype) -> None:
    from pair_distances import distances_of_pairs

    described = DTYPES[str(dtype).removeprefix("torch.")]
    codes = np.arange(256, dtype=np.uint8)
    values = np.array([described.value(int(code)) for code in codes])
    ours, theirs = (side.reshape(-1) for side in np.meshgrid(codes, codes, indexing="ij"))
    found = distances_of_pairs(ours, theirs, described.triton)
    for side, numbers_of in ((ours, found.reference), (theirs, found.candidate)):
        np.testing.assert_array_equal(numbers_of, values[side])
    both = np.isfinite(values[ours]) & np.isfinite(values[theirs])
    wanted = definitions.ulp_distances(values[ours[both]], values[theirs[both]], described)
    for distances in (found.by_numbers, found.by_patterns):
        np.testing.assert_array_equal(distances[both], wanted)
    # The kernel itself, where all is finite and where it is not: of some pairs with every pattern
    # on both sides, because the interpreter takes a second for ten thousand.
    for chosen in (both, np.ones_like(both)):
        r, c = (torch.from_numpy(side[chosen][::13]).view(dtype) for side in (ours, theirs))
        assert_same_moments(r, c)


def test_what_is_not_finite_is_counted_and_located() -> None:
    r, c = numbers(torch.bfloat16, 2200), numbers(torch.float32, 2200)
    c[9], r[2100] = np.nan, np.inf
    assert_same_moments(r, c)
    assert_same_moments(torch.full((70,), np.nan), torch.full((70,), np.nan))


def test_very_large_and_very_small_numbers_are_carried() -> None:
    some = torch.randn(2048, generator=torch.Generator().manual_seed(3))
    for scale in (1e-25, 1e30):
        assert_same_moments((some * scale).bfloat16(), (some * 1.1 * scale).bfloat16())
