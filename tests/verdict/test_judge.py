"""Judging: statuses, the verdict, the exit code, and where the drift starts."""

import math

import ml_dtypes
import numpy as np
import pytest

import driftline
from driftline.comparison.pipeline import align, compare
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import Limit, Tolerance
from driftline.comparison.verdict.judge import exit_code, judge
from driftline.errors import BadInput
from driftline.runs.records import TensorKey
from driftline.testing.runs import run_of

RNG = np.random.default_rng(3)


def noise(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def table_of(ours, theirs, **options):
    return driftline.compare(run_of(ours), run_of(theirs), **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_non_finite_element_on_one_side_fails_whatever_the_metrics_say(value, side):
    sides = [noise(3, 4), None]
    sides[1] = sides[0].copy()
    sides[side][1, 2] = value
    for limits in (None, {"relative_l2": math.inf}, {"cosine": -1.0}):
        table = table_of({"a": sides[0]}, {"a": sides[1]}, limits=limits)
        assert table.verdict == "fail"
        assert "NaN or Inf on one side only: 1 elements, first at (1, 2)" in table.rows[0].reason
        assert table.rows[0].severity == math.inf


def test_the_same_infinities_on_both_sides_pass():
    x = noise(4)
    x[1], x[2] = np.inf, np.nan
    assert table_of({"a": x}, {"a": x.astype(np.float16)}).verdict == "pass"
    y = x.copy()
    y[1] = -np.inf
    assert table_of({"a": x}, {"a": y}).verdict == "fail"


@pytest.mark.filterwarnings("error::RuntimeWarning")  # squares of float64's lowest value
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_a_mask_of_lowest_values_passes_in_every_float_format(dtype):
    def mask(kind):
        return np.triu(np.full((8, 8), ml_dtypes.finfo(kind).min), 1).astype(kind)

    table = table_of({"mask": mask(np.float32)}, {"mask": mask(dtype)})
    assert table.verdict == "pass"
    broken = mask(dtype)
    broken[0, 1] = 0
    assert table_of({"mask": mask(np.float32)}, {"mask": broken}).verdict == "fail"


def test_the_limit_is_that_of_the_coarser_dtype():
    x = noise(1000)
    for dtype, name in ((ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float16")):
        for a, b in ((x, x.astype(dtype)), (x.astype(dtype), x)):
            row = table_of({"a": a}, {"a": b}).rows[0]
            assert (row.status, row.limit_from) == ("pass", name)
    assert table_of({"a": x}, {"a": x * np.float32(1.01)}).rows[0].status == "fail"


def test_rounding_upstream_is_inherited_by_what_was_cast_up_again():
    x = noise(1000)
    low = x.astype(ml_dtypes.bfloat16)
    table = table_of({"a": x, "logits": x}, {"a": low, "logits": low.astype(np.float32)})
    assert [row.status for row in table] == ["pass", "pass"]
    assert [row.limit_from for row in table] == ["bfloat16", "bfloat16 upstream"]
    # A parameter was never rounded by what ran before it.
    params = table_of(
        {"a": x, "a/param/weight": x}, {"a": low, "a/param/weight": x * np.float32(1.01)}
    )
    assert params.rows[1].status == "fail"


def test_values_near_the_smallest_step_of_a_format_may_be_rounded_to_it():
    small = noise(1000) * np.float32(1e-6)
    row = table_of({"a": small}, {"a": small.astype(np.float16)}).rows[0]
    assert row.metrics["relative_l2"] > 0.015
    tiny = noise(1000) * np.float32(3e-7)
    row = table_of({"a": tiny}, {"a": tiny.astype(np.float16)}).rows[0]
    assert row.metrics["relative_l2"] > 0.02
    assert (row.status, row.limit_from) == ("pass", "float16, near its smallest step")
    # Not an excuse for a fault, nor for gradients that vanish altogether.
    assert table_of({"a": tiny}, {"a": (-tiny).astype(np.float16)}).verdict == "fail"
    gone = noise(1000) * np.float32(1e-9)
    assert table_of({"a": gone}, {"a": gone.astype(np.float16)}).verdict == "fail"


def test_the_gradient_of_a_bias_whose_sum_cancels_is_measured_against_what_was_summed():
    # The bias of an attention key has no gradient but rounding: its sum over the tokens is zero.
    arrived = noise(64, 8)
    arrived -= arrived.mean(axis=0)
    low = arrived.astype(ml_dtypes.bfloat16)
    left, rounded = (each.astype(np.float32).sum(axis=0) for each in (arrived, low))

    def verdict_of(bias):
        return table_of(
            {"key/grad_output": arrived, "key/param_grad/bias": left},
            {"key/grad_output": low, "key/param_grad/bias": bias.astype(ml_dtypes.bfloat16)},
        )

    table = verdict_of(rounded)
    assert table.rows[1].metrics["relative_l2"] > 100
    assert table.rows[1].limit_from == "bfloat16, of the gradients it sums"
    assert table.verdict == "pass"
    assert verdict_of(np.zeros(8)).verdict == "pass"
    assert verdict_of(rounded + 1).verdict == "fail"


def test_a_sum_that_does_not_cancel_must_be_right():
    arrived = noise(64, 8)
    bias = arrived.sum(axis=0)
    ours = {"a/grad_output": arrived, "a/param_grad/bias": bias}
    assert table_of(ours, {**ours, "a/param_grad/bias": bias * np.float32(1.01)}).verdict == "fail"


def test_the_gradient_of_a_parameter_inherits_what_the_smallest_step_took_from_its_factors():
    arrived, inputs = noise(64, 8) * np.float32(6e-7), noise(64, 4)
    low = arrived.astype(np.float16)
    weight = arrived.T @ inputs
    lost = (low.astype(np.float32).T @ inputs).astype(np.float16)
    ours = {"a/grad_output": arrived, "a/param_grad/weight": weight}
    table = table_of(ours, {"a/grad_output": low, "a/param_grad/weight": lost})
    assert table.rows[1].metrics["relative_l2"] > 0.02
    assert table.verdict == "pass"
    doubled = (2 * weight).astype(np.float16)
    assert table_of(ours, {"a/grad_output": low, "a/param_grad/weight": doubled}).verdict == "fail"


def test_a_zero_reference_against_anything_else_fails():
    row = table_of({"a": np.zeros(4, np.float32)}, {"a": np.full(4, 1e-30, np.float32)}).rows[0]
    assert row.status == "fail"
    assert row.metrics["relative_l2"] == math.inf


def test_booleans_compare_exactly_unless_an_element_wise_test_is_asked_for():
    x = np.array([True, False, True])
    y = np.array([True, True, True])
    assert table_of({"a": x}, {"a": y}).rows[0].status == "fail"
    codes, shifted = np.arange(10, dtype=np.int8), np.arange(10, dtype=np.int8) + np.int8(1)
    assert table_of({"a": codes}, {"a": shifted}).verdict == "fail"
    assert table_of({"a": codes}, {"a": shifted}, limits={"cosine": 0.0}).verdict == "fail"
    assert table_of({"a": codes}, {"a": shifted}, atol=1.0).verdict == "pass"


def test_rtol_and_atol_fail_the_row_with_one_element_outside():
    x = np.ones(1000, np.float32)
    y = x.copy()
    y[7] = 1.5
    row = table_of({"a": x}, {"a": y}, rtol=0.1).rows[0]
    assert row.status == "fail"
    assert row.metrics["outside_share"] == 0.001
    assert row.decided_by == "outside_share"
    assert table_of({"a": x}, {"a": y}, rtol=0.5).rows[0].status == "pass"
    assert table_of({"a": x}, {"a": y}, rtol=0.1, atol=0.4).rows[0].status == "pass"


def test_limits_pass_from_the_side_their_direction_says():
    x = noise(100)
    y = x + np.float32(0.1) * noise(100)
    cosine = table_of({"a": x}, {"a": y}).rows[0].metrics["cosine"]
    assert table_of({"a": x}, {"a": y}, limits={"cosine": cosine}).verdict == "pass"
    assert table_of({"a": x}, {"a": y}, limits={"cosine": cosine + 1e-9}).verdict == "fail"
    scaled = {"a": x * np.float32(0.9)}
    assert table_of({"a": x}, scaled, limits={"projection": 0.11}).verdict == "pass"
    assert table_of({"a": x}, scaled, limits={"projection": 0.05}).verdict == "fail"


def test_every_one_of_several_limits_must_hold():
    x = noise(100)
    y = x * np.float32(2)
    limits = {"cosine": 0.99, "relative_l2": 0.5}
    row = table_of({"a": x}, {"a": y}, limits=limits).rows[0]
    assert (row.status, row.decided_by) == ("fail", "relative_l2")


def test_a_nan_measurement_never_passes():
    row = Row(
        TensorKey.of("a", "output"),
        "unjudged",
        reference_dtype="float32",
        candidate_dtype="float32",
        basis="values",
        metrics={"relative_l2": math.nan, "cosine": math.nan, "one_sided": 0},
    )
    for tolerance in (
        None,
        Tolerance((Limit("relative_l2", math.inf),)),
        Tolerance((Limit("cosine", -math.inf),)),
    ):
        judged = judge(Table((row,)), tolerance)
        assert judged.rows[0].status == "fail"
        assert judged.rows[0].severity == math.inf


def test_a_limit_on_what_was_not_measured_is_incomparable_not_passed():
    x = noise(100)
    ours, theirs = run_of({"a": x}, keep="summary"), run_of({"a": x + 1}, keep="summary")
    table = driftline.compare(ours, theirs, limits={"max_ulp": 1e9})
    assert table.rows[0].status == "incomparable"
    assert table.verdict == "incomparable"
    assert exit_code(table) == 2


def test_who_asks_is_shown_the_plan_before_anything_is_measured():
    events = []
    x = noise(4)
    table = compare(
        run_of({"a": x, "b": x}),
        run_of({"a": x}),
        planned=lambda plan: events.append((len(plan.pairs), len(plan.missing))),
        progress=lambda done, total: events.append("measured"),
    )
    assert events == [(1, 1), "measured"]
    assert table.coverage.missing == 1


@pytest.mark.parametrize("kept", ["relative_l2", "cosine", "max_ulp"])
def test_of_several_limits_one_that_was_not_measured_leaves_its_row_open(kept):
    """That the others hold does not make up for it; that one is broken is enough."""
    x = noise(100)
    ours, theirs = run_of({"a": x}, keep="summary"), run_of({"a": x * 1.01}, keep="summary")
    limits = {"relative_l2": 0.5, "cosine": 0.5, "max_ulp": 1e9}
    order = {kept: limits.pop(kept), **limits}
    row = driftline.compare(ours, theirs, limits=order).rows[0]
    assert row.status == "incomparable"
    assert row.reason == "max_ulp needs the values; only the summary was kept"
    far = run_of({"a": -x}, keep="summary")
    row = driftline.compare(ours, far, limits=order).rows[0]
    assert row.status == "fail"
    assert row.decided_by in ("relative_l2", "cosine")


def test_missing_and_extra_rows_are_enough_to_be_incomplete_below_the_minimal_coverage():
    x = noise(4)
    ours, theirs = {"a": x, "b": x, "only_here": x}, {"a": x, "b": x, "only_there": x}
    table = table_of(ours, theirs)
    assert [row.status for row in table] == ["pass", "pass", "missing", "extra"]
    assert (table.verdict, exit_code(table)) == ("incomplete", 2)
    assert "only 66.7% of the 3 calls of leaf modules" in table.finding
    assert table_of(ours, theirs, min_coverage=0.5).verdict == "pass"
    strict = table_of(ours, theirs, min_coverage=0.51)
    assert (strict.verdict, exit_code(strict)) == ("incomplete", 2)
    assert "only 50.0% of the tensors were compared" in strict.finding
    with pytest.raises(BadInput, match="between 0 and 1"):
        table_of(ours, theirs, min_coverage=95)


def test_missing_rows_stand_where_the_reference_ran_them():
    x = noise(4)
    table = table_of({"a": x, "b": x, "c": x}, {"a": x, "c": x})
    assert [row.site for row in table] == ["a", "b", "c"]


def test_exit_codes_say_pass_fail_and_nothing_comparable():
    x = noise(4)
    assert exit_code(table_of({"a": x}, {"a": x})) == 0
    assert exit_code(table_of({"a": x}, {"a": -x})) == 1
    nothing = table_of({"a": x}, {"a": noise(5)})
    assert exit_code(nothing) == 2
    assert "nothing could be compared" in nothing.finding


def test_the_first_failing_output_in_execution_order_is_named():
    x = noise(8)
    order = (
        "m/input/x",
        "m.a/input/x",
        "m.a/output/0",
        "m.b/input/x",
        "m.b/output/0",
        "m/output/0",
    )
    ours = dict.fromkeys(order, x)
    theirs = {**ours, "m.a/output/0": -x, "m.b/input/x": -x, "m.b/output/0": -x}
    table = driftline.compare(run_of(ours, classes={"m.a": "Linear"}), run_of(theirs))
    assert table.first_site == "m.a"
    assert table.finding.startswith(
        "the drift starts at 'm.a' (Linear), in its output: relative_l2 2"
    )
    assert table.finding.endswith("3 of 6 compared tensors fail")


def test_a_failing_input_without_a_failing_output_before_it_blames_the_nearest_entered_parent():
    x = noise(8)
    order = ("m/input/x", "m.layers.0.a/output/0", "m.layers.0.b/input/x", "m.layers.0.b/output/0")
    ours = dict.fromkeys(order, x)
    theirs = {**ours, order[2]: -x, order[3]: -x}
    table = table_of(ours, theirs)
    assert table.first_site == "m"
    assert table.finding.startswith(
        "the drift starts inside 'm', in its own code before it calls 'm.layers.0.b': input 'x'"
    )


def test_a_failing_input_of_the_outermost_module_is_said_to_be_an_input():
    x = noise(8)
    for root in ("m", "(root)"):
        table = table_of({f"{root}/input/x": x}, {f"{root}/input/x": -x})
        assert table.first_site == root
        assert table.finding.startswith("the inputs differ already: 'x' of")


def test_an_output_that_hands_on_what_it_was_given_is_not_where_the_drift_starts():
    x = noise(1000)
    inside, outside = (x * np.float32(1 + share * 1e-4) for share in (0.95, 1.05))
    order = ("m/input/x", "m.a/input/x", "m.a/output/0", "m.b/input/x", "m.b/output/0")
    ours = dict.fromkeys(order, x)
    # What b gets was made by a ...
    theirs = {**ours, "m.a/output/0": inside, "m.b/input/x": inside, "m.b/output/0": outside}
    assert table_of(ours, theirs).verdict == "pass"  # neither adds more than its format allows
    flat = {"limits": {"relative_l2": 1e-4}}
    table = table_of(ours, theirs, **flat)
    assert table.first.site == "m.b"
    assert table.first_site == "m.a"
    assert "at 'm.a', in its output, only just inside its limit; the first outside is 'm.b'" in (
        table.finding
    )
    # ... or between a and b ...
    table = table_of(ours, {**theirs, "m.a/output/0": x}, **flat)
    assert table.first_site == "m"
    assert "inside 'm', in its own code before it calls 'm.b': input 'x' is only just inside" in (
        table.finding
    )
    # ... and here by b itself.
    half = x * np.float32(1 + 0.5e-4)
    table = table_of(ours, {**theirs, "m.a/output/0": half, "m.b/input/x": half}, **flat)
    assert table.first_site == "m.b"


def test_a_failing_input_of_an_operator_is_blamed_on_the_module_it_ran_in():
    x = noise(8)
    for module, said in (("m.a", "'m.a'"), ("(program)", "the program itself")):
        before = TensorKey.of(f"{module}/aten.mm", "output")
        key = TensorKey.of(f"{module}/aten.exp", "input")
        classes = {key.site: "aten.exp.default"}
        ours = run_of({before: x, key: x}, classes=classes)
        table = driftline.compare(ours, run_of({before: x, key: -x}))
        assert table.first_site == module
        assert f"the drift starts inside {said}, in its own code before it calls" in table.finding
        table = driftline.compare(run_of({key: x}, classes=classes), run_of({key: -x}))
        assert table.finding.startswith("the inputs differ already")


def test_the_root_encloses_what_has_no_dot_in_its_name():
    x = noise(8)
    ours = {"(root)/input/x": x, "head/input/x": x}
    table = table_of(ours, {**ours, "head/input/x": -x})
    assert table.first_site == "(root)"


def test_a_parameter_that_differs_is_called_a_parameter():
    x = noise(8)
    ours = {"m/param/weight": x, "m/output/0": x}
    table = table_of(ours, {"m/param/weight": -x, "m/output/0": -x})
    assert table.first_site == "m"
    assert "the parameter 'weight' of 'm' differs already" in table.finding


def test_the_first_divergence_is_in_the_earliest_step():
    x = noise(8)
    keys = [TensorKey.of("m", "output", step=step) for step in (0, 1, 2)]
    ours = dict.fromkeys(keys, x)
    theirs = {keys[0]: x, keys[1]: -x, keys[2]: -x}
    table = table_of(ours, theirs)
    assert table.first.step == 1
    assert "in step 1" in table.finding


def test_a_table_can_be_judged_again_with_another_tolerance():
    x = noise(100)
    table = table_of({"a": x}, {"a": x * np.float32(1.01)})
    assert table.verdict == "fail"
    kinder = judge(table, Tolerance((Limit("relative_l2", 0.1),)))
    assert kinder.verdict == "pass"
    assert kinder.rows[0].reason == ""
    assert kinder.rows[0].limit_from == "user"
    assert judge(kinder).verdict == "fail"


def test_two_runs_without_a_common_name_are_an_error():
    with pytest.raises(BadInput, match="share no tensor"):
        table_of({"a": noise(2)}, {"b": noise(2)})


def test_an_empty_run_is_an_error():
    with pytest.raises(BadInput, match="holds no tensor"):
        driftline.compare(run_of({}, name="empty"), run_of({"a": noise(2)}))


def test_globs_choose_what_is_compared():
    x = noise(4)
    ours = {"m.a": x, "m.b": x, "n/input/x": x}
    plan = align(run_of(ours), run_of(ours), sites=["m.*"])
    assert [pair.reference.key.site for pair in plan.pairs] == ["m.a", "m.b"]
    table = table_of(ours, ours, ports=["input"])
    assert [row.site for row in table] == ["n"]
    with pytest.raises(BadInput, match="no site matches"):
        table_of(ours, ours, sites=["q*"])


def test_paths_are_opened(tmp_path):
    np.save(tmp_path / "a.npy", noise(4))
    table = driftline.compare(tmp_path / "a.npy", str(tmp_path / "a.npy"))
    assert table.verdict == "pass"
    assert table.reference.path.endswith("a.npy")


def test_tensors_of_a_file_are_judged_by_their_own_formats_whatever_lies_before_them(tmp_path):
    x = noise(1000)
    half = x.astype(np.float16)
    np.savez(tmp_path / "ours.npz", a=half, b=x)
    np.savez(tmp_path / "theirs.npz", a=half, b=x * np.float32(1.01))
    table = driftline.compare(tmp_path / "ours.npz", tmp_path / "theirs.npz")
    assert [row.status for row in table] == ["pass", "fail"]
    assert table.rows[1].limit_from == "float32"
    assert table.finding.startswith("'b' is the first in the file that differs: relative_l2 0.01")
    assert [row.status for row in judge(table)] == ["pass", "fail"]


def test_a_value_just_outside_its_limit_does_not_read_as_the_limit():
    ours = noise(1000)
    theirs = ours + noise(1000) * np.float32(1e-3)
    (row,) = table_of({"a": ours}, {"a": theirs}, limits={"cosine": 1.0})
    assert "cosine 0.999999" in row.reason


def test_a_port_nobody_has_heard_of_is_named_as_it_is():
    table = table_of({"a/cotangent": noise(3)}, {"a/cotangent": noise(3)})
    assert table.finding.startswith("the drift starts at 'a', in its cotangent: ")


def test_a_module_of_another_class_in_the_candidate_is_said():
    x = noise(8)
    ours = run_of({"act": x}, classes={"act": "SiLU"})
    table = driftline.compare(ours, run_of({"act": -x}, classes={"act": "GELU"}))
    assert table.finding.startswith("the drift starts at 'act' (SiLU, in the candidate GELU), in")
    assert table.rows[0].candidate_class == "GELU"
    assert driftline.compare(ours, ours).rows[0].candidate_class == ""


def test_a_pass_says_how_much_of_the_two_runs_it_rests_on():
    x = noise(4)
    assert table_of({"a": x}, {"a": x}).finding == "1 tensor compared, none differs"
    sides = {"a": x, "b": x, "c": x}, {"a": x, "b": x[:2], "d": x}
    assert "(1 of 4 tensors compared, 1 missing, 1 extra, 1 inc" in table_of(*sides).finding
    most = table_of(*sides, min_coverage=0.0)
    assert most.finding == "1 of 4 tensors compared, none differs"


def test_when_nothing_could_be_compared_a_reason_is_in_the_finding():
    table = table_of({"a": noise(4)}, {"a": noise(5)})
    assert table.finding.endswith("; 'a' output, for one: the shapes differ: 4 against 5")


def test_without_outputs_nobody_is_blamed_for_code_of_their_own():
    x = noise(8)
    ours = {"m/input/x": x, "m.a/input/x": x, "m.b/input/x": x}
    table = table_of(ours, {**ours, "m.b/input/x": -x})
    assert table.first_site == "m"
    assert table.finding.startswith("the drift starts inside 'm', before it calls 'm.b'")


def test_a_traceback_shows_the_hint_too():
    with pytest.raises(BadInput) as caught:
        table_of({"a": noise(4)}, {"a": noise(4)}, sites=["b"])
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]
