"""Float against quantised: by the scales that are in the run, or not at all."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from driftline.comparison.pipeline import compare
from driftline.comparison.table.table import Table
from driftline.testing.runs import run_of

RNG = np.random.default_rng(0)


def quantised(w: np.ndarray[Any, Any], axis: int = 1) -> tuple[Any, Any]:
    """int8 codes and one float32 scale per row (axis 1) or column (axis 0)."""
    scale = (np.abs(w).max(axis=axis, keepdims=True) / 127).astype(np.float32)
    return np.round(w / scale).astype(np.int8), scale


def only_pairs(table: Table) -> dict[str, Any]:
    return {f"{row.site}/{row.slot}": row for row in table.rows if row.status != "extra"}


@pytest.mark.parametrize("name", ["weight_scale", "scales", "scale", "weight_scale_inv"])
def test_an_int8_weight_is_compared_through_the_scale_beside_it(name: str) -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    exact = codes.astype(np.float32) * scale
    reference = run_of({"fc/param/weight": exact})
    candidate = run_of({"fc/param/weight": codes, f"fc/param/{name}": scale.reshape(-1)})
    row = only_pairs(compare(reference, candidate))["fc/weight"]
    assert row.metrics["relative_l2"] == 0.0
    assert row.candidate_recipe.startswith("dequantise(axis 0)")
    assert (row.candidate_dtype, row.limit_from) == ("int8", "int8 with scales")


def test_rounding_to_int8_passes_and_a_wrong_scale_does_not() -> None:
    w = RNG.standard_normal((64, 256)).astype(np.float32)
    codes, scale = quantised(w)
    reference = run_of({"fc/param/weight": w})
    good = {"fc/param/weight": codes, "fc/param/weight_scale": scale}
    row = only_pairs(compare(reference, run_of(good)))["fc/weight"]
    assert row.status == "pass"
    assert 0.001 < row.metrics["relative_l2"] < 0.02
    bad = {**good, "fc/param/weight_scale": scale * 1.25}
    assert only_pairs(compare(reference, run_of(bad)))["fc/weight"].status == "fail"


def test_a_wrong_code_is_found_where_it_is() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    exact = codes.astype(np.float32) * scale
    wrong = codes.copy()
    wrong[4, 7] = -wrong[4, 7] - 90 if wrong[4, 7] > 0 else 120
    candidate = run_of({"fc/param/weight": wrong, "fc/param/weight_scale": scale})
    row = only_pairs(compare(run_of({"fc/param/weight": exact}), candidate))["fc/weight"]
    assert row.status == "fail"
    assert row.metrics["max_abs_error_at"] == 4 * 32 + 7


def test_a_zero_point_is_subtracted() -> None:
    codes = RNG.integers(0, 256, (4, 8)).astype(np.uint8)
    scale, zero = np.float32(0.25), np.int32(128)
    exact = (codes.astype(np.float32) - 128) * np.float32(0.25)
    candidate = run_of(
        {
            "fc/param/weight": codes,
            "fc/param/weight_scale": np.asarray(scale),
            "fc/param/weight_zero_point": np.asarray(zero),
        }
    )
    row = only_pairs(compare(run_of({"fc/param/weight": exact}), candidate))["fc/weight"]
    assert row.metrics["different"] == 0


def test_scales_of_groups_fit_by_their_shape() -> None:
    codes = RNG.integers(-127, 128, (4, 16)).astype(np.int8)
    scale = RNG.uniform(0.1, 1, (4, 2)).astype(np.float32)
    exact = codes.astype(np.float32) * np.repeat(scale, 8, axis=1)
    candidate = run_of({"fc/param/weight": codes, "fc/param/scales": scale})
    row = only_pairs(compare(run_of({"fc/param/weight": exact}), candidate))["fc/weight"]
    assert row.metrics["different"] == 0


def test_an_int8_weight_that_lies_transposed_is_dequantised_and_turned() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)), axis=0)  # one scale per column
    exact = (codes.astype(np.float32) * scale).T.copy()
    candidate = run_of({"fc/param/weight": codes, "fc/param/weight_scale": scale})
    row = only_pairs(compare(run_of({"fc/param/weight": exact}), candidate))["fc/weight"]
    assert row.metrics["different"] == 0
    assert "dequantise(axis 0) then transpose(1,0)" in row.candidate_recipe


def test_an_int32_result_is_scaled_by_column() -> None:
    sums = RNG.integers(-9999, 9999, (3, 8)).astype(np.int32)
    scale = RNG.uniform(1e-3, 1e-2, 8).astype(np.float32)
    reference = run_of({"mm": sums.astype(np.float32) * scale})
    row = only_pairs(compare(reference, run_of({"mm": sums, "mm/input/deq_scale": scale})))["mm/0"]
    assert row.metrics["different"] == 0


def test_inputs_that_are_known_by_number_find_scales_by_their_other_names() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    exact = codes.astype(np.float32) * scale
    names = {"op/input/1": "weight", "op/input/2": "weightScale"}
    candidate = run_of({"op/input/1": codes, "op/input/2": scale.reshape(-1)}, aliases=names)
    row = only_pairs(compare(run_of({"op/input/1": exact}), candidate))["op/1"]
    assert row.metrics["different"] == 0


def test_a_quantised_reference_works_as_well() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    exact = codes.astype(np.float32) * scale
    reference = run_of({"fc/param/weight": codes, "fc/param/weight_scale": scale})
    table = compare(reference, run_of({"fc/param/weight": exact}))
    row = next(row for row in table.rows if row.slot == "weight")
    assert row.metrics["different"] == 0
    assert row.reference_recipe.startswith("dequantise")


def test_weights_in_files_find_their_scales_by_name() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    exact = codes.astype(np.float32) * scale
    candidate = run_of({"a.fc.weight": codes, "a.fc.weight_scale": scale})
    row = only_pairs(compare(run_of({"a.fc.weight": exact}), candidate))["a.fc.weight/0"]
    assert row.metrics["different"] == 0


def test_eight_bit_floats_with_a_scale_are_scaled() -> None:
    codes = RNG.standard_normal((6, 32)).astype(ml_dtypes.float8_e4m3fn)
    exact = codes.astype(np.float32) * np.float32(0.5)
    candidate = run_of({"fc/param/weight": codes, "fc/param/weight_scale": np.float32([0.5])})
    row = only_pairs(compare(run_of({"fc/param/weight": exact}), candidate))["fc/weight"]
    assert row.metrics["different"] == 0


def test_without_a_scale_there_is_a_reason_and_no_number() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    reference = run_of({"fc/param/weight": codes.astype(np.float32) * scale})
    row = only_pairs(compare(reference, run_of({"fc/param/weight": codes})))["fc/weight"]
    assert row.status == "incomparable"
    assert not row.metrics
    assert "int8 against float32, and the candidate has no scale" in row.reason
    assert "weight_scale" in row.reason


def test_a_scale_that_does_not_fit_is_no_scale() -> None:
    codes, scale = quantised(RNG.standard_normal((6, 32)))
    reference = run_of({"fc/param/weight": codes.astype(np.float32) * scale})
    candidate = run_of({"fc/param/weight": codes, "fc/param/weight_scale": scale.reshape(-1)[:5]})
    assert only_pairs(compare(reference, candidate))["fc/weight"].status == "incomparable"


def test_integers_that_are_numbers_stay_numbers() -> None:
    ids = RNG.integers(0, 99, (2, 5))
    row = only_pairs(compare(run_of({"a": ids}), run_of({"a": ids.astype(np.float32)})))["a/0"]
    assert row.status == "pass"
    assert row.candidate_recipe == ""
