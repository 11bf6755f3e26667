"""Rows of logits: the kernel on every path against the float64 definition, faults planted."""

from __future__ import annotations

import numpy as np
import pytest

from driftline.errors import BadInput
from driftline.numerics import kernel, token_scores
from driftline.numerics.dtypes import DTYPES

PATHS = [path for path in kernel.available() if path != "numpy"]
FLOATS = ("reference_lse", "candidate_lse", "kl_rc", "kl_cr", "total_variation")
DRAW = np.random.default_rng(11)

needs_kernel = pytest.mark.skipif(not PATHS, reason="the C kernel was not built on this machine")


def stored(values: np.ndarray, name: str) -> np.ndarray:
    if name == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(name)


def check(
    reference: np.ndarray,
    candidate: np.ndarray,
    names: tuple[str, str] = ("float32", "float32"),
    *,
    k: int = 20,
    rtol: float = 2e-5,
    atol: float = 1e-12,
) -> token_scores.RowScores:
    r, c = stored(reference, names[0]), stored(candidate, names[1])
    types = DTYPES[names[0]], DTYPES[names[1]]
    tokens = DRAW.integers(0, reference.shape[1], len(reference))
    ask = (r, types[0], c, types[1], tokens)
    wanted = token_scores.score_rows(*ask, k=k, path="numpy")
    for path in PATHS:
        got = token_scores.score_rows(*ask, k=k, path=path)
        for field in token_scores.RowScores._fields:
            a, b = getattr(wanted, field), getattr(got, field)
            if field in FLOATS:
                np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=f"{field} {path}")
            else:
                np.testing.assert_array_equal(b, a, err_msg=f"{field} {path}")
    return wanted


@needs_kernel
@pytest.mark.parametrize(
    "names",
    [
        (r, c)
        for r in ("float32", "float16", "bfloat16")
        for c in ("float32", "float16", "bfloat16")
    ],
)
@pytest.mark.parametrize("size", [1, 2, 31, 1023, 1024, 1025, 5000])
def test_every_pair_of_types_and_every_size_gives_what_the_definition_gives(names, size):
    reference = DRAW.standard_normal((5, size)) * 3
    candidate = reference + DRAW.standard_normal(reference.shape) * 0.02
    check(reference, candidate, names, k=min(20, size))


@needs_kernel
@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-3, 0.2, 3.0])
def test_divergences_keep_their_digits_however_small_the_difference_is(noise):
    reference = DRAW.standard_normal((4, 9000)) * 3
    found = check(reference, reference + DRAW.standard_normal(reference.shape) * noise)
    assert (found.kl_rc > 0).all() == (noise > 0)


@needs_kernel
def test_a_peaked_row_against_a_flat_one_is_measured_from_either_side():
    flat = DRAW.standard_normal((3, 9000)) * 0.01
    peaked = np.zeros_like(flat)
    peaked[:, [5, 4000, 8999]] = np.eye(3) * 40
    check(flat, peaked)
    check(peaked, flat)
    check(flat * 100, DRAW.standard_normal(flat.shape) * 6)


@needs_kernel
def test_a_shifted_row_is_the_same_distribution():
    reference = (DRAW.standard_normal((3, 5000)) * 3).astype(np.float16).astype(np.float64)
    found = check(reference, reference + 64.0, atol=1e-10)
    assert found.total_variation.max() < 1e-9
    rising = np.linspace(-30, 30, 5000)[None, :]
    check(rising, rising - 20.0, atol=1e-6)  # a shift of 20 rounds what is smaller
    check(rising, rising[:, ::-1].copy())


@needs_kernel
def test_masked_entries_of_a_great_negative_number_carry_no_probability():
    reference = DRAW.standard_normal((3, 3000)) * 3
    reference[:, 100:900] = -3.0e38
    candidate = reference + DRAW.standard_normal(reference.shape) * 0.01
    candidate[:, 100:900] = -65504.0
    check(reference, candidate, ("float32", "float16"))


@needs_kernel
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_what_is_no_number_is_counted_on_its_side_and_measured_nowhere(side, value, place):
    rows = [DRAW.standard_normal((3, 3000)) * 3 for _ in range(2)]
    rows[side][1, place] = value
    found = check(rows[0], rows[1])
    counts = [
        [found.reference_nan, found.reference_inf],
        [found.candidate_nan, found.candidate_inf],
    ]
    assert counts[side][int(not np.isnan(value))].tolist() == [0, 1, 0]
    assert sum(int(count.sum()) for both in counts for count in both) == 1
    assert np.isnan(found.kl_rc).tolist() == [False, True, False]
    assert np.isnan(found.total_variation).tolist() == [False, True, False]


@needs_kernel
def test_equal_logits_are_listed_in_the_order_of_their_places():
    reference = np.zeros((2, 2500))
    reference[1, ::7] = 1.0
    found = check(reference, reference.copy(), k=30)
    assert found.top[0].tolist() == list(range(30))
    assert found.top[1].tolist() == [7 * i for i in range(30)]
    assert found.candidate_choice.tolist() == [0, 0]


def test_a_token_of_another_vocabulary_is_refused():
    rows = np.zeros((2, 10), np.float32)
    with pytest.raises(BadInput, match="a token is 10, the vocabulary has 10 entries"):
        token_scores.score_rows(
            rows, DTYPES["float32"], rows, DTYPES["float32"], np.array([0, 10]), k=2
        )


@needs_kernel
def test_many_threads_and_one_give_the_same_numbers():
    reference = DRAW.standard_normal((70, 2000)).astype(np.float32)
    candidate = (reference + 0.01 * DRAW.standard_normal(reference.shape)).astype(np.float16)
    tokens = np.zeros(70, np.int64)
    types = DTYPES["float32"], DTYPES["float16"]
    one, five = (
        token_scores.score_rows(reference, types[0], candidate, types[1], tokens, k=20, threads=n)
        for n in (1, 5)
    )
    for a, b in zip(one, five, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_kernel
def test_the_greatest_are_found_where_few_strips_hold_them_all() -> None:
    """Equal ones are named in order of place; a strip of nothing but NaN or -inf holds none."""
    reference = DRAW.normal(size=(4, 40 * 1024 + 17)).astype(np.float32)
    reference[0, 5000:5030] = 9.0
    reference[1, -30:] = np.linspace(5.0, 6.0, 30, dtype=np.float32)
    reference[2] = -50.0
    reference[2, ::2048] = -49.0
    check(reference, reference + 0.1 * DRAW.normal(size=reference.shape), k=20)
    reference[1, 1024:3072] = np.nan
    reference[3, : 30 * 1024] = -np.inf
    check(reference, reference.copy(), k=20)
