"""Single rules of judging, on rows made by hand: what each decides, and at which figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from driftline.alignment.plan import NO_NODE
from driftline.comparison.evidence.error_stats import Effect
from driftline.comparison.table.row import Row
from driftline.comparison.tolerance.tolerance import AS_GIVEN, BEYOND, HALF, REST
from driftline.comparison.verdict import (
    certain_failures,
    coverage,
    decision,
    growth,
    status,
    zero_gradient,
)
from driftline.comparison.verdict.dataflow import transfers_of
from driftline.comparison.verdict.divergence import find_divergence
from driftline.comparison.verdict.noise import NoiseFloor, margin_of
from driftline.comparison.verdict.own_error import ReplayResult
from driftline.comparison.verdict.sites import (
    Place,
    Site,
    place_of,
    role_of,
    roundoff_of,
    sites_of,
)
from driftline.comparison.verdict.status import SiteStatus
from driftline.comparison.verdict.verdict import RowCounts
from driftline.runs.records import TensorKey


def measured(
    port: str,
    error: float,
    slot: str = "0",
    *,
    site: str = "model.layers.3.mlp",
    dtype: str = "float32",
    phase: str = "forward",
    figures: Mapping[str, float] | None = None,
    **about: Any,
) -> Row:
    """A row that was measured, with a relative error."""
    # Weights were there before the call; what an update made of them is judged otherwise.
    moment = "before" if port == "param" else "after"
    key = TensorKey(site, port, slot, phase=phase, moment=moment)  # type: ignore[arg-type]
    metrics = {"relative_l2": error, "reference_l2": 1.0, "candidate_l2": 1.0, **(figures or {})}
    types = {"reference_dtype": dtype, "candidate_dtype": dtype}
    shapes = {"reference_shape": (2, 3), "candidate_shape": (2, 3)}
    return Row(key, "unjudged", metrics=metrics, basis="values", **{**types, **shapes, **about})


def site_of(*rows: Row) -> Site:
    """The one site that rows are of."""
    (site,) = sites_of(rows).values()
    return site


def suspect(ratio: float, *, leaning: bool = False, **figures: float) -> SiteStatus:
    """A site that growth convicts: its error of 0.4 is so many times its limit."""
    call = site_of(measured("output", 0.4, figures=figures)).calls[0]
    return SiteStatus("introduced", "growth", ratio, 0.1, call, leaning=leaning)


# --- a second look at a suspicion


@pytest.mark.parametrize(
    ("half", "rest", "holds"),
    [
        (0.2, 0.0, True),  # both halves of the tokens are beyond the limit of 0.1
        (0.05, 0.3, False),  # one half only, and not grossly
        (0.05, 0.41, True),  # one half only, four times the limit
        (0.1, 0.4, False),  # at both bounds
    ],
)
def test_a_suspicion_needs_both_halves_of_the_tokens_or_a_gross_error(
    half: float, rest: float, holds: bool
) -> None:
    assert status.is_borne_out(suspect(4.0), half, rest) is holds


def test_a_bias_is_borne_out_by_any_of_it_on_the_better_half() -> None:
    assert status.is_borne_out(suspect(4.0, leaning=True), 1e-9, 0.0)
    assert not status.is_borne_out(suspect(4.0, leaning=True), 0.0, 9.0)
    assert status.is_borne_out(suspect(math.inf), 0.0, 0.0)


@pytest.mark.parametrize(
    ("rest", "stands", "reason"),
    [
        (0.2, "clean", status.ROUTING_NOISE),
        (0.3999, "clean", "seen on one half of the tokens only"),
        (0.0, "unknown", status.ROUTING_REACHES_ALL),
    ],
)
def test_why_a_suspicion_falls_is_said(rest: float, stands: str, reason: str) -> None:
    about = status._confirmed(suspect(4.0, **{HALF: 0.0, REST: rest}))
    assert (about.status, about.reason) == (stands, reason)


def test_a_suspicion_without_a_second_look_stands() -> None:
    assert status._confirmed(suspect(4.0)).status == "introduced"


# --- noise runs


@pytest.mark.parametrize(
    ("out", "before", "stands"),
    [
        (4.0, 1.2, "amplified"),
        (3.75, 1.25, "inherited"),  # no more than three times what came in
        (1.2, 1.0, "inherited"),  # within what is spread between runs
        (1.31, 1.0, "introduced"),
        (1.1, math.nan, "introduced"),  # what came in is not known
        (1.0, 1.1, "masked"),
        (1.0, 1.0, "clean"),
    ],
)
def test_how_far_outside_the_noise_a_result_is_says_how_its_site_stands(
    out: float, before: float, stands: str
) -> None:
    assert status._by_excess(out, before) == stands


def test_of_several_inputs_the_one_that_is_furthest_outside_the_noise_counts() -> None:
    rows = [measured("input", 0.001, "a"), measured("input", 0.5, "b"), measured("output", 0.5)]
    floor = NoiseFloor({row.key: 0.01 for row in rows}, {}, 1.0, ("plain",), (), {})
    assert status._by_noise(site_of(*rows), floor).status == "inherited"


def test_a_trusted_run_is_measured_against_the_widest_of_the_others() -> None:
    # Two of three are four times as far off as the third: neither is beyond the other.
    runs = [{measured("output", 0.0).key: error} for error in (0.01, 0.04, 0.04)]
    assert margin_of(runs) == pytest.approx(1.5)


def test_one_tensor_in_a_thousand_does_not_widen_what_trusted_runs_may_do() -> None:
    keys = [measured("output", 0.0, site=f"layers.{number}").key for number in range(1500)]
    runs = [dict.fromkeys(keys, 0.01), dict.fromkeys(keys, 0.01)]
    usual = margin_of(runs)
    for key in keys[:2]:
        runs[0][key] = 0.03
    assert margin_of(runs) == usual
    for key in keys[:4]:
        runs[0][key] = 0.03
    assert margin_of(runs) == pytest.approx(1.15 * 3.0)


# --- growth


def test_the_more_siblings_there_are_the_closer_to_their_median_a_site_must_stay() -> None:
    few, many = (growth._usual([(place, 0.0) for place in range(n)]) for n in (3, 3000))
    # As measured on clean models: leaves differ less than the own code of attentions.
    assert few.beyond(of_container=True) == pytest.approx(3.0)
    assert many.beyond(of_container=True) == pytest.approx(1.8, rel=1e-2)
    assert few.beyond(of_container=False) == pytest.approx(2.5)
    assert many.beyond(of_container=False) == pytest.approx(1.45, rel=1e-2)


@pytest.mark.parametrize(("given", "hides"), [(0.5, False), (0.49, True)])
def test_no_fault_can_hide_in_a_site_that_gives_the_tensor_it_was_given(
    given: float, hides: bool
) -> None:
    sites = sites_of([measured("input", given), measured("output", 0.5)])
    (grown,) = growth.growths(sites, transfers_of(sites)).values()
    assert grown.excess < 1.0
    assert grown.hides is hides


def test_a_gradient_at_the_output_is_explained_by_an_output_that_was_compared() -> None:
    figures = {"reference_max": 0.5}
    gradient = measured("grad_output", 0.5, figures=figures)
    assert certain_failures.gradient_excess(gradient, None) == 0.0
    assert certain_failures.gradient_excess(gradient, measured("output", 2.0)) < 1.0
    assert certain_failures.gradient_excess(gradient, measured("output", 0.01)) > 1.0


def test_too_noisy_is_said_with_the_sites_at_which_errors_hide_a_fault_and_all_judged() -> None:
    evidence = SimpleNamespace(has_noise=False)
    judgement: Any = SimpleNamespace(
        is_too_noisy=True, hiding=(5, 9), drowning=4, evidence=evidence
    )
    facts: Any = SimpleNamespace(judgement=judgement)
    (sentence,) = decision._too_noisy(facts)
    assert "too noisy to tell from two runs" in sentence
    assert "at 4 of 9 sites" in sentence
    judgement.is_too_noisy = False
    assert not list(decision._too_noisy(facts))


# --- weights


def test_one_wrong_tensor_among_a_module_s_weights_convicts_it() -> None:
    wrong = measured("param", 0.1, "weight", figures={"max_rel_error": 0.5})
    right = measured("param", 0.0, "bias", figures={"max_rel_error": 0.0})
    for rows in ((wrong, right), (right, wrong)):
        assert status._weights(site_of(*rows)).status == "introduced"
    assert status._weights(site_of(right)).status == "clean"


def test_a_few_odd_elements_of_a_weight_are_one_rounding() -> None:
    # Relative L2 beyond one rounding, while no element is off by more than two.
    fine = {"max_rel_error": 2.0**-23}
    assert status._weights(site_of(measured("param", 1e-5, figures=fine))).status == "clean"


# --- sites


def test_a_role_is_a_name_without_the_numbers_of_layers() -> None:
    assert role_of("model.layers.12.mlp.3") == "model.layers.*.mlp.*"


@pytest.mark.parametrize(
    ("port", "phase", "direction"),
    [
        ("output", "forward", "forward"),
        ("output", "backward", "backward"),  # an operator of the backward pass
        ("grad_input", "backward", "backward"),
        ("optimizer_grad", "backward", "optimizer"),
        ("param", "forward", "param"),
    ],
)
def test_the_direction_of_a_tensor(port: str, phase: str, direction: str) -> None:
    row = measured(port, 0.0, phase=phase)
    assert place_of(row) == Place(direction, row.key.site)  # type: ignore[arg-type]


def test_what_is_computed_again_for_the_backward_pass_is_no_evidence() -> None:
    assert place_of(measured("output", 0.0, phase="recompute")) is None


def test_below_its_smallest_normal_number_a_format_rounds_by_a_fixed_step() -> None:
    usual = measured("output", 0.0, dtype="float16")
    tiny = measured("output", 0.0, dtype="float16", figures={"reference_l2": 1e-6})
    gone = measured(
        "output", 0.0, dtype="float16", figures={"reference_l2": 1e-6, "candidate_l2": 0.0}
    )
    assert roundoff_of(usual) == pytest.approx(2.0**-11, rel=1e-4)
    # Half a step of 2^-24 for each of six elements, over the size of all.
    assert roundoff_of(tiny) == pytest.approx(0.5 * 2.0**-24 * math.sqrt(6) / 1e-6, rel=1e-3)
    # A tensor that vanished has lost more than roundings explain.
    assert roundoff_of(gone) == 2.0**-11


def test_several_tensors_of_one_call_are_one_call() -> None:
    site = coverage._Site()
    first, second = (0, 0, 0, 0), (0, 0, 0, 1)
    for call, compared in ((first, True), (first, True), (second, False), (second, True)):
        site.take(0, call, compared)
    assert site.leaf == (2, 2.0)
    site.take(0, (0, 0, 1, 0), False)
    assert site.leaf == (3, 2.0)


@pytest.mark.parametrize("has_modules", [True, False])
def test_operators_beside_a_compiled_model_are_no_part_of_it(has_modules: bool) -> None:
    counts = coverage.CallCounts()
    counts.take(measured("output", 0.0, site="net" if has_modules else "(program)/aten.mul"))
    beside = measured("output", 0.0, site="(program)/aten.add", reason=NO_NODE)
    counts.take(beside._replace(status="missing"))
    counts.finish()
    # A program without modules has nothing else, and there every operator counts.
    assert ("(program)/aten.add" in counts.reference.sites) is not has_modules


def test_a_reference_without_outputs_is_not_said_to_have_lost_them() -> None:
    counts = RowCounts()
    counts.take(measured("input", 0.0)._replace(status="pass"))
    assert not counts.only_inputs
    counts.take(measured("output", 0.0)._replace(status="missing"))
    assert counts.only_inputs
    counts.take(measured("param", 0.0)._replace(status="pass"))
    assert not counts.only_inputs


# --- sentences


def test_inputs_that_differ_are_told_by_count_or_by_error() -> None:
    codes = measured("input", 0.0, "ids", dtype="int64", figures={"different": 2})
    assert "'ids' of the model itself, 2 of 6 elements differ" in (
        certain_failures._of_inputs([codes]).sentence
    )
    values = measured("input", 0.25, "x")
    assert "'x' of the model itself, relative_l2 0.25" in (
        certain_failures._of_inputs([values]).sentence
    )


def test_a_finding_names_class_line_and_fusion_where_they_are_known() -> None:
    bare = measured("output", 0.5, site="gate")._replace(status="fail", reason="too far")
    assert find_divergence([bare]).finding.startswith("the drift starts at 'gate', in its output: ")
    fused = bare._replace(class_name="Gate", fused="mul, sigmoid", line="net.py:8 in forward")
    finding = find_divergence([fused]).finding
    assert "'gate' (Gate)" in finding
    assert "computed at net.py:8 in forward; inside the fusion of mul, sigmoid; --no-fusion" in (
        finding
    )


# --- what a replay says, kept with the table


def test_what_a_replay_says_comes_back_from_a_table_as_it_was() -> None:
    effect = Effect(4, 32, 0.1, 0.05, 0.01, 0.0, 0.01, math.inf, 0, 0.0)
    said = ReplayResult(
        True, "projection", 3.0, (2.5, 3.5), effect, 0.1, 0.2, 0.3, 2.0**-8, "1", True, True
    )
    said = said._replace(reason="it scales", steps=(0, 4), end=(0.5, 0.25))
    assert ReplayResult.from_json(said.as_json()) == said
    unknown = ReplayResult(False, trouble="it draws", low=0.0, high=0.0, noise=0.0)
    assert ReplayResult.from_json(unknown.as_json()) == unknown
    assert unknown.is_open and not unknown._replace(failed=True).is_open


# --- biases whose gradient is rounding


@pytest.mark.parametrize(("left", "outcome"), [(0.1, "pass"), (0.11, "fail")])
def test_a_bias_excuses_an_output_only_where_it_is_half_of_the_error(
    left: float, outcome: str
) -> None:
    row = measured("output", 0.2, figures={BEYOND: left}, limit=1.0, decided_by="relative_l2")
    assert zero_gradient._beyond(row._replace(status="fail")).status == outcome


@pytest.mark.parametrize("outcome", ["pass", "fail"])
def test_what_carries_a_moved_bias_on_is_excused_within_its_limit_as_well(outcome: str) -> None:
    # A sum with a larger tensor: the same difference is a smaller share of it.
    error = {"rmse": 0.01}
    source = measured("output", 0.2, site="mix", figures=error)._replace(
        status="pass", decided_by=BEYOND, limit=0.1, limit_from="default"
    )
    carrier = measured("input", 0.05, site="norm", figures=error, limit=0.1)
    other = measured("input", 0.05, site="far", figures={"rmse": 0.02}, limit=0.1)
    rows = [
        source,
        *(row._replace(status=outcome, decided_by="relative_l2") for row in (carrier, other)),
    ]
    zero_gradient._carriers(rows, [(0, source)])
    assert rows[1].status == "pass" and AS_GIVEN in rows[1].limit_from
    assert "differs as 'mix' does" in rows[1].reason
    assert rows[2].status == outcome and AS_GIVEN not in rows[2].limit_from


@pytest.mark.parametrize(
    ("about_key", "about_output", "outcome"),
    [
        ({}, {}, "pass"),
        ({"site": "other.k_proj"}, {}, "fail"),  # the key of another attention
        ({"step": 1}, {}, "fail"),  # the key of another step
        ({}, {"status": "fail"}, "fail"),  # and what the attention gives does not agree
    ],
)
def test_a_shifted_logarithm_of_attention_is_excused_by_its_own_key(
    about_key: dict[str, Any], about_output: dict[str, Any], outcome: str
) -> None:
    about = {"site": "attn/aten._scaled_dot_product_attention", "decided_by": "relative_l2"}
    about["class_name"] = "aten._scaled_dot_product_flash_attention.default"
    given = measured("output", 0.0, **about)._replace(status="pass", reference_shape=(2, 3, 8))
    logarithms = measured("output", 0.2, "1", **about)._replace(status="fail")
    key = measured("output", 0.1, site="attn.k_proj")
    key = key._replace(key=key.key._replace(**about_key))
    rows = [given._replace(**about_output), logarithms]
    zero_gradient._shifted(rows, [(7, key)])
    assert rows[1].status == outcome
