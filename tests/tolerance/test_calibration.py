"""Thresholds from clean comparisons, and comparisons held to them."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import driftline
from driftline.errors import BadInput
from driftline.testing.runs import run_of

SITES = ("model.layers.0.norm", "model.layers.0.mlp", "model.layers.1.norm", "model.head")


def execution(seed, *, noise=0.0, fault="", dtype=np.float32, size=4, raw=False):
    """A run; a fault is more of the same noise, at one layer and all that follow."""
    values = np.random.default_rng(seed)
    nudge = np.random.default_rng(seed + 1000)
    tensors, times = {}, 1.0
    for site in SITES:
        times = 4.0 if site == fault else times
        x = values.standard_normal((size, 16))
        tensors[site] = (x * (1 + noise * times * nudge.standard_normal(x.shape))).astype(dtype)
    return tensors if raw else run_of(tensors)


def compared(seed, *, noise=1e-3, fault="", **options):
    size = options.pop("size", 4)
    ours = execution(seed, size=size)
    return driftline.compare(ours, execution(seed, noise=noise, fault=fault, size=size), **options)


@pytest.fixture(scope="module")
def clean():
    return [compared(seed) for seed in range(12)]


def test_a_limit_is_the_quantile_of_the_layer_times_the_margin(clean):
    made = driftline.calibrate(clean, quantile=0.9, margin=3.0)
    for site in SITES:
        own = [row.metrics["relative_l2"] for table in clean for row in table if row.site == site]
        assert made.limit("relative_l2", site) == pytest.approx(3.0 * np.percentile(own, 90.0))
        entry = made.find("relative_l2", site)
        assert (entry.samples, entry.statistic) == (12, "p90")
        assert entry.interval[0] <= entry.observed <= entry.interval[1]
        assert entry.dtypes == ("float32 against float32",)
        assert entry.shapes[0].about == {"shape": [4, 16], "dtype": "float32 against float32"}


def test_a_metric_that_is_better_when_higher_gets_its_margin_downwards(clean):
    made = driftline.calibrate(clean, metrics=["cosine", "projection"], quantile=1.0, margin=2.0)
    for site in SITES:
        rows = [row for table in clean for row in table if row.site == site]
        worst = min(row.metrics["cosine"] for row in rows)
        assert made.limit("cosine", site) == pytest.approx(1 - 2 * (1 - worst), abs=1e-12)
        assert made.limit("cosine", site) < worst
        largest = max(abs(row.metrics["projection"]) for row in rows)
        assert made.limit("projection", site) == pytest.approx(2 * largest)


def test_shapes_are_pooled_and_each_is_kept(clean):
    small, large = compared(1, size=4), compared(2, size=64)
    entry = driftline.calibrate([small, large]).find("relative_l2", SITES[0])
    assert [each.about["shape"] for each in entry.shapes] == [[4, 16], [64, 16]]
    assert entry.samples == 2
    limit = driftline.calibrate([small, large]).limit(
        "relative_l2", SITES[0], shape={"shape": [64, 16]}
    )
    assert limit == 2 * large.rows[0].metrics["relative_l2"]


def test_a_clean_run_passes_and_more_of_the_same_noise_is_named_at_its_first_layer(clean):
    made = driftline.calibrate(clean)
    assert driftline.check(compared(77), thresholds=made).verdict == "pass"
    bad = compared(77, fault="model.layers.1.norm")
    # Far too small for the default limits of the format: only the calibrated ones see it.
    assert (
        driftline.compare(
            execution(3), execution(3, noise=1e-5, fault="model.layers.1.norm")
        ).verdict
        == "pass"
    )
    judged = driftline.check(bad, thresholds=made)
    assert judged.verdict == "fail"
    assert judged.first_site == "model.layers.1.norm"
    assert "by its threshold" in judged.finding
    assert judged.first.limit == made.limit("relative_l2", "model.layers.1.norm")
    assert judged.first.limit_from == "thresholds"
    assert [row.status for row in judged] == ["pass", "pass", "fail", "fail"]


def test_slack_allows_a_multiple_of_every_threshold(clean):
    made = driftline.calibrate(clean)
    bad = compared(77, fault="model.layers.1.norm")
    assert driftline.check(bad, thresholds=made, slack=10.0).verdict == "pass"
    with pytest.raises(BadInput, match="slack"):
        driftline.check(bad, thresholds=made, slack=0.0)


def test_compare_takes_thresholds_from_a_file(clean, tmp_path):
    path = driftline.calibrate(clean, model="acme/tiny").write(tmp_path / "t.json")
    table = compared(77, fault="model.head", thresholds=path)
    assert table.verdict == "fail"
    assert table.first_site == "model.head"
    assert table.limits["from"] == "thresholds"
    assert table.limits["thresholds"]["model_id"] == "acme--tiny"
    assert json.loads(json.dumps(table.as_json()))["limits"]["said"].endswith("t.json")


def test_a_table_on_disk_may_be_judged_again_and_again(clean, tmp_path):
    made = driftline.calibrate(clean, sites=["model.layers.*"])
    bad = compared(77, fault="model.head")
    judged = driftline.check(bad, thresholds=made)
    assert judged.verdict == "pass", "nothing is said of the head"
    assert judged.rows[-1].status == "incomparable"
    assert "1 tensors that were compared have none" in judged.notes[-1]
    folder = judged.write(tmp_path / "table")
    again = driftline.check(folder, thresholds=driftline.calibrate(clean))
    assert again.verdict == "fail"
    assert again.first_site == "model.head"
    assert not again.notes
    assert driftline.check(folder, limits={"relative_l2": 0.5}).verdict == "pass"


def test_thresholds_and_limits_of_the_user_both_have_to_hold(clean):
    made = driftline.calibrate(clean)
    judged = driftline.check(clean[0], thresholds=made, limits={"relative_l2": 1e-9})
    assert judged.verdict == "fail"
    assert judged.first.limit_from == "user"


def test_layer_averages_of_the_documented_files_hold_for_a_table(tmp_path):
    table = compared(5)
    mean = table.rows[1].metrics["mean_abs_error"]
    path = tmp_path / "t.json"

    def verdict(**metrics):
        path.write_text(json.dumps({"model_id": "tiny", **metrics}))
        shown = json.loads(path.read_text())
        shown["driftline"] = {"schema": "driftline.thresholds/1", "thresholds": []}
        path.write_text(json.dumps(shown))
        judged = driftline.check(table, thresholds=path)
        return judged.verdict, judged.first_site

    layer = "model.layers0.mlp"
    assert verdict(abs_diff={layer: mean * 1.01}) == ("pass", "")
    assert verdict(abs_diff={layer: mean * 0.99}) == ("fail", "model.layers.0.mlp")
    assert verdict(cos_sim={layer: 0.999}) == ("pass", "")
    assert verdict(cos_sim={layer: 1.0000001}) == ("fail", "model.layers.0.mlp")


def test_another_tools_norm_under_the_word_average_is_taken_for_a_norm(tmp_path):
    table = compared(5)
    row = table.rows[1]
    norm = row.metrics["rmse"] * math.sqrt(64)
    path = tmp_path / "t.json"
    for times, verdict in ((1.01, "pass"), (0.99, "fail")):
        path.write_text(
            json.dumps({"model_id": "t", "abs_diff": [{"model.layers0.mlp": norm * times}]})
        )
        judged = driftline.check(table, thresholds=path)
        assert judged.verdict == verdict
        assert judged.rows[1].decided_by == "rmse"


def test_thresholds_of_another_model_are_refused(clean, tmp_path):
    made = driftline.calibrate(clean, model="acme/tiny")
    other = driftline.compare(run_of({"encoder.0": np.ones(3)}), run_of({"encoder.0": np.ones(3)}))
    said = r"no threshold for a layer .* another model \('acme--tiny'\)"
    with pytest.raises(BadInput, match=said):
        driftline.check(other, thresholds=made)
    with pytest.raises(BadInput, match="for the model 'acme--tiny', not for 'acme/large'"):
        driftline.check(clean[0], thresholds=made, model="acme/large")
    path = tmp_path / "t.json"
    path.write_text('{"model_id": "acme--tiny", "ce": 2.5}')
    with pytest.raises(BadInput, match="for the model as a whole"):
        driftline.check(clean[0], thresholds=path)


def test_layers_that_vanished_are_said(clean):
    made = driftline.calibrate(clean)
    fewer = driftline.check(clean[0].with_rows(clean[0].rows[:3]), thresholds=made)
    assert "1 of 4 layers with a threshold are not in the comparison" in fewer.notes[0]
    judged = driftline.check(clean[0].with_rows(clean[0].rows[:3]), thresholds=made)
    assert judged.verdict == "pass"


def test_a_nan_is_no_clean_value_wherever_it_stands(clean):
    for plant in (("candidate",), ("reference", "candidate")):
        sides = []
        for side in ("reference", "candidate"):
            tensors = execution(1, raw=True)
            if side in plant:
                tensors[SITES[2]][0, 0] = math.nan
            sides.append(run_of(tensors))
        dirty = driftline.compare(*sides)
        with pytest.raises(BadInput, match=r"'model.layers.1.norm' output is not clean .*NaN"):
            driftline.calibrate([*clean, dirty])
        assert driftline.calibrate([*clean, dirty], sites=["model.head"]).limit(
            "relative_l2", "model.head"
        )


def test_a_nan_fails_against_any_threshold(clean):
    made = driftline.calibrate(clean)
    row = clean[0].rows[0]
    broken = row._replace(metrics={**row.metrics, "relative_l2": math.nan})
    table = clean[0].with_rows([broken, *clean[0].rows[1:]])
    assert driftline.check(table, thresholds=made).first_site == SITES[0]


def test_an_infinite_statistic_is_no_threshold(clean):
    rows = [row._replace(metrics={**row.metrics, "relative_l2": math.inf}) for row in clean[0]]
    made = driftline.calibrate([clean[0].with_rows(rows)])
    assert not any(entry.usable for entry in made.entries)
    judged = driftline.check(clean[1], thresholds=made)
    assert "4 thresholds are no number" in judged.notes[0]
    assert judged.verdict == "incomparable", "a limit of infinity would let anything pass"


def test_a_threshold_that_is_no_number_lets_nothing_pass(clean):
    made = driftline.calibrate(clean)
    entries = tuple(
        entry._replace(value=math.nan) if entry.site == SITES[0] else entry
        for entry in made.entries
    )
    broken = dataclasses.replace(made, entries=entries)
    judged = driftline.check(clean[0], thresholds=broken)
    assert judged.rows[0].reason == "the threshold of relative_l2 is no number"
    assert judged.rows[0].status == "incomparable"
    row = clean[0].rows[0]
    nan = row._replace(metrics={**row.metrics, "relative_l2": math.nan})
    table = clean[0].with_rows([nan, *clean[0].rows[1:]])
    assert driftline.check(table, thresholds=broken).first_site == SITES[0]


def test_integers_need_no_threshold_and_stay_exact(clean):
    ids = np.arange(6)
    ours = run_of({"tokens": ids, "model.head": np.ones(4, np.float32)})
    same = driftline.compare(ours, ours)
    made = driftline.calibrate([same])
    assert made.sites == ("model.head",)
    theirs = run_of({"tokens": ids[::-1].copy(), "model.head": np.ones(4, np.float32)})
    judged = driftline.check(driftline.compare(ours, theirs), thresholds=made)
    assert judged.first_site == "tokens"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": ["relativ_l2"]}, "no metric 'relativ_l2'"),
        ({"metrics": ["max_abs_error_at"]}, "describes"),
        ({"metrics": []}, "no metric is named"),
        ({"quantile": 1.5}, "quantile"),
        ({"quantile": math.nan}, "quantile"),
        ({"margin": 0.5}, "margin"),
        ({"margin": math.inf}, "margin"),
        ({"sites": ["nothing.*"]}, "no floating-point tensor"),
    ],
)
def test_a_calibration_that_cannot_mean_anything_is_refused(clean, options, said):
    with pytest.raises(BadInput, match=said):
        driftline.calibrate(clean, **options)


def test_there_must_be_a_table(clean):
    with pytest.raises(BadInput, match="no table"):
        driftline.calibrate([])
    made = driftline.calibrate(clean[0:1])
    assert made.find("relative_l2", SITES[0]).interval is None, "one value has no interval"
    assert dataclasses.is_dataclass(made)
    assert made.provenance["driftline"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 1e3]), st.integers(1, 4))
def test_clean_runs_keep_the_limits_that_were_made_of_them(seed, noise, count):
    tables = [compared(seed + at, noise=noise) for at in range(count)]
    names = ["relative_l2", "cosine", "projection", "max_abs_error", "rmse"]
    made = driftline.calibrate(tables, metrics=names, quantile=1.0, margin=1.0)
    for table in tables:
        assert driftline.check(table, thresholds=made).verdict == "pass"
