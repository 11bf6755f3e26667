"""Metric files: whose they are, their values, and thresholds made of them."""

import json
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.comparison.tolerance.statistics import parse_statistic
from driftline.comparison.tolerance.thresholds import load_thresholds
from driftline.decoding.files.layer_files import layer_table
from driftline.decoding.files.metric_files import (
    by_layer,
    find_metric_files,
    metric_name,
    read_values,
)
from driftline.decoding.thresholds import Lines, make_thresholds
from driftline.errors import BadFile, BadInput

DATA = Path(__file__).parents[1] / "data" / "aiu"
TOKENS = DATA / "get_thresholds" / "model_level_input"
SHAPE = "_max-new-tokens-128_batch-size-1_seq-length-64_dtype-fp16"


def write(folder, name, values, heading):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("\n".join([heading, *(repr(float(v)) for v in values)]) + "\n")
    return path


def thresholds(folder, model, metrics, **options):
    lines, troubles = [], []
    say = Lines(lines.append, troubles.append)
    found = find_metric_files(folder)
    made = make_thresholds(found, model, metrics, say, folder=folder, **options)
    assert not made.refused
    return made.thresholds, lines, troubles


@pytest.fixture(params=["docera", "head"])
def era(request, tmp_path):
    """What another tool wrote for a tiny model, in its two eras; and what it said of it."""
    home = DATA / "layers" / f"{request.param}_model-forward"
    with tarfile.open(home / "csv.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path, home


def test_the_percentile_is_pooled_over_both_file_name_grammars():
    made, lines, troubles = thresholds(TOKENS, "acme/tiny-v1", ["diff_mean", "ce"])
    every = [np.loadtxt(path, skiprows=1) for path in TOKENS.glob("*.ce.csv")]
    assert len(every) == 3
    p99 = float(np.percentile(np.concatenate(every), 99.0))
    assert lines[2:] == ["found 3 metric files", f"acme--tiny-v1 ce {p99}"]
    assert f"{p99:.2f}" == "2.61", "9.0 in the tool's own log, which took another model's file too"
    entry = made.find("ce")
    assert (entry.samples, entry.value, entry.dtypes) == (400, p99, ("fp16",))
    assert entry.interval[0] <= p99 <= entry.interval[1]
    shapes = {(each.about["batch_size"], each.about["seq_length"]) for each in entry.shapes}
    assert shapes == {(1, 64), (1, 2048), (8, 64)}
    assert sum(each.samples for each in entry.shapes) == 400
    assert troubles == [
        "diff_mean, ce: the p99 of 400 values depends on the worst 4 of them; 1000 or more are "
        "needed for a limit"
    ]
    assert made.sources[0].endswith(".diff_mean.csv")
    assert made.provenance["created"]


def test_a_model_does_not_swallow_the_files_of_one_whose_name_begins_the_same(tmp_path):
    write(tmp_path, f"acme--tiny-v1{SHAPE}.ce.csv", [1.0, 1.0], "ce")
    write(tmp_path, f"acme--tiny-v1-instruct{SHAPE}.ce.csv", [9.0], "ce")
    assert thresholds(tmp_path, "acme/tiny-v1", ["ce"])[0].limit("ce") == 1.0
    assert thresholds(tmp_path, "acme/tiny-v1-instruct/", ["ce"])[0].limit("ce") == 9.0
    with pytest.raises(BadInput, match="no metric files of the model 'acme/tiny'"):
        thresholds(tmp_path, "acme/tiny", ["ce"])


def test_names_with_the_kind_of_attention_and_subfolders_are_found(tmp_path):
    write(tmp_path / "a" / "b", f"m{SHAPE}_attn-type-sdpa.0.2.1.ce.csv", [1.0], "ce")
    write(tmp_path, f"m{SHAPE}.ce.csv", [3.0], "ce")
    (tmp_path / "loop").symlink_to(tmp_path)
    made, lines, _ = thresholds(tmp_path, "m", ["ce"], statistic=parse_statistic("max"))
    assert lines == ["found 2 metric files", "m ce 3.0"]
    assert made.find("ce").samples == 2


def test_an_absolute_path_names_its_files_with_leading_dashes(tmp_path):
    write(tmp_path, f"--tmp--models--tiny{SHAPE}.ce.csv", [2.0], "ce")
    write(tmp_path, f"--tmp--models--tiny{SHAPE}--model.head.abs_diff.csv", [4.0], "abs_diff")
    assert thresholds(tmp_path, "/tmp/models/tiny", ["ce"])[0].limit("ce") == 2.0
    layers = thresholds(tmp_path, "/tmp/models/tiny/", ["abs_diff"], layers=True)[0]
    assert layers.limit("abs_diff", "head") == 4.0


def test_layers_come_in_the_order_they_run_and_average_what_another_tool_took_the_norm_of(era):
    folder, home = era
    made, lines, _ = thresholds(folder, "models/tiny-granite", ["abs_diff"], layers=True)
    assert lines[0] == "found 28 layers metric files"
    assert [line.split()[1] for line in lines[1:5]] == [
        "model.base_model.embedding",
        "model.base_model.layers0.ln",
        "model.base_model.layers0.attn.in_proj.query",
        "model.base_model.layers0.attn.in_proj.key",
    ]
    assert [line.split()[1] for line in lines[-3:]] == [
        "model.base_model.dec_norm",
        "model.base_model",
        "model.head",
    ]
    entry = made.find("abs_diff", "model.head")
    assert lines[-1] == f"Layer model.head avg abs_diff = {entry.value}"
    norms = thresholds(
        folder, "models/tiny-granite", ["abs_diff"], layers=True, statistic=parse_statistic("l2")
    )[0]
    theirs = load_thresholds(home / "models--tiny-granite-thresholds.json")
    assert len(theirs.entries) >= 25
    for their in theirs.entries:
        if their.metric == "abs_diff":
            ours = norms.find("abs_diff", their.site)
            assert ours.value == pytest.approx(their.value, rel=1e-12)
            assert ours.value == pytest.approx(
                math.sqrt(ours.samples) * _rms(folder, their.site), rel=1e-9
            )


def _rms(folder, layer):
    (path,) = folder.glob(f"*--{layer}.abs_diff.csv")
    return float(np.sqrt(np.mean(np.square(read_values(path, "abs_diff")))))


def test_nan_is_reported_and_never_averaged_away(tmp_path):
    write(tmp_path, f"m{SHAPE}--model.a.cos_sim.csv", [1.0, math.nan, 1.0], "cos_sim")
    write(tmp_path, f"m{SHAPE}--model.b.cos_sim.csv", [0.5, 1.0], "cos_sim")
    made, lines, troubles = thresholds(tmp_path, "m", ["cos_sim"], layers=True)
    assert lines[1:] == ["Layer model.a avg cos_sim = nan", "Layer model.b avg cos_sim = 0.75"]
    assert len(troubles) == 1
    assert "1 of 3 values are NaN" in troubles[0]
    assert made.find("cos_sim", "a").nan == 1
    with pytest.raises(BadInput, match="is nan"):
        made.limit("cos_sim", "a")
    assert made.as_json()["cos_sim"] == {"model.a": None, "model.b": 0.75}


def test_a_percentile_of_a_cosine_is_counted_towards_the_bad_side(tmp_path):
    write(tmp_path, f"m{SHAPE}--model.a.cos_sim.csv", np.linspace(0, 1, 101), "cos_sim")
    made, lines, _ = thresholds(
        tmp_path, "m", ["cos_sim_avg"], layers=True, statistic=parse_statistic("p99")
    )
    assert made.limit("cos_sim", "a") == pytest.approx(0.01)
    assert lines[1].startswith("Layer model.a p99 cos_sim = 0.01")


def test_iterations_of_a_layer_are_pooled_whatever_the_order_they_are_read_in(tmp_path):
    write(tmp_path, f"m{SHAPE}--model.a.iter-57.abs_diff.csv", [4.0], "abs_diff")
    write(tmp_path, f"m{SHAPE}--model.a.abs_diff.csv", [1.0], "abs_diff")
    write(tmp_path, f"m{SHAPE}--model.a.iter-8.abs_diff.csv", [1.0], "abs_diff")
    made = thresholds(tmp_path, "m", ["abs_diff"], layers=True)[0]
    assert made.limit("abs_diff", "a") == 2.0
    assert made.find("abs_diff", "a").samples == 3


def test_zero_kept_tokens_are_said_and_give_no_threshold(tmp_path):
    write(tmp_path, f"m{SHAPE}.ce.csv", [], "ce")
    made, _, troubles = thresholds(tmp_path, "m", ["ce"])
    assert math.isnan(made.entries[0].value)
    assert made.entries[0].samples == 0
    assert any("hold no value" in line for line in troubles)


@pytest.mark.parametrize(
    ("metric", "layers", "said"),
    [
        ("cross", False, "no metric 'cross'"),
        ("c", False, "no metric 'c'"),
        ("cos_sim_men", True, "no metric 'cos_sim_men'"),
        ("abs_diff", False, "a metric of layers"),
        ("ce", True, "a metric of tokens"),
    ],
)
def test_an_unknown_metric_is_an_error(metric, layers, said):
    with pytest.raises(BadInput, match=said):
        metric_name(metric, layers=layers)


def test_hashed_names_are_said_not_to_name_their_model(tmp_path):
    write(tmp_path, f"{'a1' * 32}_0.9.0.ce.csv", [1.0], "ce")
    with pytest.raises(BadInput, match="no metric files") as refusal:
        thresholds(tmp_path, "m", ["ce"])
    assert "1 file has a hashed name" in refusal.value.hint


@given(st.lists(st.floats(width=64), max_size=200), st.booleans(), st.booleans())
def test_values_are_read_to_the_last_bit(tmp_path_factory, values, heading, last_newline):
    path = tmp_path_factory.mktemp("values") / "x.csv"
    lines = ["abs_diff"]
    if heading:
        lines += ["GPU shape torch.Size([1, 8, 64]) CPU shape torch.Size([1, 8, 64])"]
        lines += ["Metric shape torch.Size([8])"]
    text = "\n".join([*lines, *map(repr, values)])
    path.write_text(text + "\n" * last_newline)
    np.testing.assert_array_equal(read_values(path, "abs_diff"), np.array(values, np.float64))


@pytest.mark.parametrize("line", ["1.0 2.0", "one", "1.0,2.0", "1.0\t2", "0x1p3", "1.0abc"])
def test_a_line_that_is_no_number_is_named(tmp_path, line):
    path = tmp_path / "x.csv"
    path.write_text(f"ce\n1.0\n{line}\n\n2.0\n")
    with pytest.raises(BadFile, match=r"x\.csv: line 3 is"):
        read_values(path, "ce")


def test_a_file_of_another_metric_is_refused(tmp_path):
    path = write(tmp_path, "x.csv", [1.0], "diff_mean")
    with pytest.raises(BadFile, match="begins with 'diff_mean'"):
        read_values(path, "ce")
    path.write_bytes(b"\x00\xff" * 10_000)
    with pytest.raises(BadFile, match="begins with"):
        read_values(path, "ce")


def test_long_files_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("driftline.decoding.files.metric_files._BLOCK", 64)
    values = np.random.default_rng(0).random(1000)
    path = write(tmp_path, "x.csv", values, "ce")
    np.testing.assert_array_equal(read_values(path, "ce"), values)
    path.write_text(path.read_text() + "oops\n")
    with pytest.raises(BadFile, match="line 1002 is 'oops'"):
        read_values(path, "ce")


def test_layer_files_are_a_table_whose_rows_are_layers_in_order(era):
    folder, _ = era
    known = thresholds(folder, "models/tiny-granite", ["abs_diff"], layers=True)[0]
    table = layer_table(find_metric_files(folder), str(folder), known)
    assert len(table) == 28
    assert table.rows[1].site == "model.base_model.layers0.ln"
    assert table.rows[1].metrics["abs_diff"] == known.limit("abs_diff", "base_model.layers.0.ln")


def test_layer_files_of_another_model_are_not_taken_for_this_one(tmp_path):
    write(tmp_path, f"acme--large{SHAPE}--model.a.abs_diff.csv", [1.0], "abs_diff")
    known = load_thresholds(
        DATA / "layers/docera_model-forward/models--tiny-granite-thresholds.json"
    )
    with pytest.raises(BadInput, match="is for the model 'models--tiny-granite'"):
        layer_table(find_metric_files(tmp_path), "here", known)
    write(tmp_path, f"acme--huge{SHAPE}--model.a.abs_diff.csv", [1.0], "abs_diff")
    with pytest.raises(BadInput, match="several models"):
        layer_table(find_metric_files(tmp_path), "here")


def test_children_come_before_the_module_they_are_part_of(tmp_path):
    names = ("lm_head", "model.layers.10.mlp", "model.layers.9.mlp", "model.layers.9.mlp.up_proj")
    for name in (*names, "model.embed_tokens", "model.layers.9", "model.norm", "(root)"):
        write(tmp_path, f"m{SHAPE}--{name}.abs_diff.csv", [1.0], "abs_diff")
    order = list(by_layer(find_metric_files(tmp_path).files))
    assert order.index("model.layers.9.mlp.up_proj") < order.index("model.layers.9.mlp")
    assert order.index("model.layers.9.mlp") < order.index("model.layers.9")
    assert order.index("model.layers.9") < order.index("model.layers.10.mlp")
    assert order[0] == "model.embed_tokens"
    assert order.index("model.norm") < order.index("lm_head")


def test_what_lies_beside_the_files_gives_the_targets_and_the_order_of_layers(tmp_path):
    layers = ("model.zeta", "model.alpha", "model.head")
    for name in layers:
        write(tmp_path, f"m{SHAPE}--{name}.abs_diff.csv", [1.0], "abs_diff")
    settings = {"reference": "device=cpu,dtype=fp32", "candidate": "device=cuda,dtype=fp16"}
    beside = {"settings": settings, "layers": {name: {} for name in layers}}
    (tmp_path / f"m{SHAPE}.layers.json").write_text(json.dumps(beside))
    made, lines, troubles = thresholds(tmp_path, "m", ["abs_diff"], layers=True)
    assert [line.split()[1] for line in lines[1:]] == list(layers)
    assert made.settings["targets"] == [settings]
    assert not troubles
    table = layer_table(find_metric_files(tmp_path), "here")
    assert [row.site for row in table] == list(layers)


@pytest.mark.parametrize("other", ["device=cuda,dtype=bf16", "device=npu,dtype=fp16"])
def test_files_of_several_devices_are_pooled_and_it_is_said(tmp_path, other):
    for length, candidate in ((64, "device=cuda,dtype=fp16"), (128, other)):
        start = SHAPE.replace("length-64", f"length-{length}")
        write(tmp_path, f"m{start}.ce.csv", [1.0], "ce")
        text = json.dumps({"settings": {"candidate": candidate}})
        (tmp_path / f"m{start}.provenance.json").write_text(text)
    made, _, troubles = thresholds(tmp_path, "m", ["ce"])
    assert len(made.settings["targets"]) == 2
    pooled = any("more than one candidate; all are pooled" in line for line in troubles)
    assert pooled == other.startswith("device=npu")


@pytest.mark.parametrize("text", ["", "[]", '{"settings": 3, "layers": []}', "[" * 100_000])
def test_a_damaged_file_beside_the_files_is_as_good_as_none(tmp_path, text):
    write(tmp_path, f"m{SHAPE}.ce.csv", [1.0], "ce")
    (tmp_path / f"m{SHAPE}.provenance.json").write_text(text)
    assert thresholds(tmp_path, "m", ["ce"])[0].limit("ce") == 1.0


def test_a_pipe_that_is_called_like_a_metric_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / f"m{SHAPE}.ce.csv")
    with pytest.raises(BadInput, match="no metric files"):
        thresholds(tmp_path, "m", ["ce"])
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(BadFile, match="is no file"):
        load_thresholds(tmp_path / "t.json")
