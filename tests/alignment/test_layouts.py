"""Layouts: transposed weights, shapes that only look different, tiles. And what must not align."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from driftline.alignment.reconcile.layout import merges
from driftline.comparison.pipeline import compare
from driftline.comparison.table.row import Row
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.runs import record_into, run_of

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def run(
    tensors: dict[str, np.ndarray[Any, Any]], framework: str = "", klass: str = "Linear"
) -> Run:
    sink = MemorySink()
    if framework:
        sink.describe(framework=framework)
    for name, values in tensors.items():
        record_into(sink, name, values, class_name=klass)
    return sink.run()


def only(reference: Run, candidate: Run) -> Row:
    table = compare(reference, candidate)
    assert len(table.rows) == 1
    return table.rows[0]


@pytest.mark.parametrize("port", ["param", "param_grad", "optimizer_grad"])
def test_a_weight_of_paddle_is_turned(port: str) -> None:
    w = noise(8, 4)
    row = only(
        run({f"fc/{port}/weight": w}, "torch"), run({f"fc/{port}/weight": w.T.copy()}, "paddle")
    )
    assert row.metrics["different"] == 0
    assert row.candidate_recipe == "transpose(1,0) of 4x8"


def test_a_fault_in_a_turned_weight_is_found_where_it_is() -> None:
    w = noise(8, 4)
    spoilt = w.T.copy()
    spoilt[2, 5] += 1.0
    row = only(run({"fc/param/weight": w}, "torch"), run({"fc/param/weight": spoilt}, "paddle"))
    assert row.status == "fail"
    assert row.metrics["max_abs_error_at"] == 5 * 4 + 2


def test_a_square_weight_is_turned_when_the_frameworks_say_so() -> None:
    w = noise(6, 6)
    row = only(run({"fc/param/weight": w}, "torch"), run({"fc/param/weight": w.T.copy()}, "paddle"))
    assert row.status == "pass"
    assert row.candidate_recipe == "transpose(1,0) of 6x6"


def test_a_square_weight_is_turned_when_all_others_of_its_class_are() -> None:
    w, v = noise(6, 6), noise(6, 9)
    ours = run({"a/param/weight": w, "b/param/weight": v}, klass="MyLinear")
    theirs = run({"a/param/weight": w.T.copy(), "b/param/weight": v.T.copy()}, klass="Dense")
    table = compare(ours, theirs)
    assert [row.status for row in table.rows] == ["pass", "pass"]


def test_a_square_weight_nobody_speaks_for_is_not_turned_but_the_row_says_it_would_agree() -> None:
    w = noise(6, 6)
    row = only(run({"a/param/weight": w}, klass=""), run({"a/param/weight": w.T.copy()}, klass=""))
    assert row.status == "fail"
    assert "transposed" in row.reason
    assert "ambiguous" in row.reason


def test_a_wrong_square_weight_is_not_said_to_be_transposed() -> None:
    row = only(
        run({"a/param/weight": noise(6, 6)}, klass=""),
        run({"a/param/weight": noise(6, 6)}, klass=""),
    )
    assert row.status == "fail"
    assert "transposed" not in row.reason


def test_two_linears_of_one_framework_that_lie_across_do_not_align() -> None:
    w = noise(8, 4)
    row = only(run({"fc/param/weight": w}, "torch"), run({"fc/param/weight": w.T.copy()}, "torch"))
    assert row.status == "incomparable"
    assert "8x4 against 4x8" in row.reason


def test_the_matrix_of_a_conv1d_is_turned_against_a_linear() -> None:
    w = noise(5, 5)
    row = only(
        run({"fc/param/weight": w}, "torch", "Linear"),
        run({"fc/param/weight": w.T.copy()}, "torch", "Conv1D"),
    )
    assert row.status == "pass"


def test_weights_in_files_are_known_by_their_names() -> None:
    w = noise(8, 4)
    row = only(run_of({"fc.weight": w}), run_of({"fc.weight": w.T.copy()}))
    assert row.metrics["different"] == 0


def test_an_activation_is_never_turned() -> None:
    x = noise(8, 4)
    row = only(run({"fc": x}, "torch"), run({"fc": x.T.copy()}, "paddle"))
    assert row.status == "incomparable"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((2, 3, 4), (6, 4)),
        ((6, 4), (2, 3, 4)),
        ((1, 6, 4), (6, 4)),
        ((6, 4), (6, 1, 4)),
        ((2, 3, 4, 5), (2, 3, 20)),
        ((), (1,)),
        ((24,), (4, 6)),
    ],
)
def test_a_shape_that_only_looks_different_is_compared(
    ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    x = noise(*ours)
    row = only(run({"a": x}), run({"a": x.reshape(theirs)}))
    assert row.metrics["different"] == 0
    assert row.candidate_recipe.startswith("reshape(")
    y = x.copy().reshape(theirs)
    y.reshape(-1)[-1] += 1
    wrong = only(run({"a": x}), run({"a": y}))
    assert wrong.status == "fail"


@pytest.mark.parametrize(
    ("ours", "theirs"), [((4, 6), (6, 4)), ((2, 3, 4), (4, 6)), ((2, 3, 4), (3, 8)), ((3,), (4,))]
)
def test_a_shape_that_is_another_stays_apart(
    ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    row = only(run({"a": noise(*ours)}), run({"a": noise(*theirs)}))
    assert row.status == "incomparable"


def test_merging_is_of_neighbours_only() -> None:
    assert merges((2, 3, 4), (2, 12))
    assert not merges((2, 3, 4), (8, 3))
    assert merges((0, 4), (0, 1, 4)) and merges((0, 1, 4), (0, 4))
    assert not merges((0, 4), (0,))


@pytest.mark.parametrize(
    ("true", "padded"), [((10, 20), (16, 32)), ((10, 32), (16, 32)), ((1, 10, 32), (16, 32))]
)
def test_tiles_of_a_private_format_are_cut_off(
    true: tuple[int, ...], padded: tuple[int, ...]
) -> None:
    x = noise(*true)
    y = np.zeros(padded, np.float32)
    y[: true[-2], : true[-1]] = x.reshape(true[-2:])
    row = only(run({"a/param": x}), device_run({"a/param": y}))
    assert row.metrics["different"] == 0
    assert "trim(" in row.candidate_recipe
    y[true[-2] - 1, 0] += 1
    assert only(run({"a/param": x}), device_run({"a/param": y})).status == "fail"


def device_run(tensors: dict[str, np.ndarray[Any, Any]]) -> Run:
    """A run that was converted from a dump of a device."""
    sink = MemorySink()
    sink.describe(converted_from={"format": "atb", "path": "dump"})
    for name, values in tensors.items():
        record_into(sink, name, values, class_name="Linear")
    return sink.run()


def test_sizes_that_only_look_like_tiles_stay_apart() -> None:
    """10 tokens against 16, hidden size 24 against 32: no device wrote these, nothing is cut."""
    x, y = noise(1, 10, 32), noise(1, 16, 32)
    y[:, :10] = x
    assert only(run({"a": x}), run({"a": y})).status == "incomparable"
    y = noise(1, 10, 24)
    assert only(run({"a": x}), run({"a": y})).status == "incomparable"


def test_more_tokens_on_a_device_are_no_tiles() -> None:
    x, y = noise(10, 32), noise(16, 32)
    y[:10] = x
    table = compare(run({"a/input": x, "a": x}), device_run({"a/input": y, "a": y}))
    assert {row.status for row in table.rows} == {"incomparable"}


def test_a_size_that_no_tile_explains_stays_apart() -> None:
    row = only(run({"a": noise(10, 20)}), run({"a": noise(17, 20)}))
    assert row.status == "incomparable"
