"""The thresholds artefact: ours, other tools' two forms, damaged ones, and names of layers."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline import load_thresholds
from driftline.comparison.tolerance.thresholds import LayerNames, PerShape, Threshold, Thresholds
from driftline.comparison.tolerance.thresholds import thresholds_from_json as from_json
from driftline.errors import BadFile, BadInput, DriftlineError

DATA = Path(__file__).parents[1] / "data" / "aiu" / "layers"
FILE = "models--tiny-granite-thresholds.json"
SHAPES = (
    PerShape({"batch_size": 1, "seq_length": 64, "dtype": "fp16"}, 1.5, 128),
    PerShape({"batch_size": 8, "seq_length": 64, "dtype": "fp16"}, 2.5, 1024),
    PerShape({"batch_size": 8, "seq_length": 2048, "dtype": "fp16"}, 2.0, 1024),
)
OURS = Thresholds(
    "acme--tiny",
    (
        Threshold("ce", 2.25, statistic="p99", samples=9, interval=(2.0, 2.5), shapes=SHAPES),
        Threshold("abs_diff", 0.5, "model.layers3.ln", "output", "average", observed=0.5),
        Threshold("abs_diff", math.nan, "model.layers4.ln", "output", "average", nan=3),
        Threshold("cos_sim", 0.99, "model.layers3.ln", "output", "average", "higher"),
        Threshold("abs_diff", 0.75, "model.layers3.ln", "input", "average"),
    ),
    settings={"seed": 0},
    sources=("a.csv",),
    provenance={"created": "now"},
)


def test_what_is_written_is_read_back_and_the_plain_part_is_what_other_tools_read(tmp_path):
    path = OURS.write(tmp_path / "new" / "t.json")
    shown = json.loads(path.read_text())
    assert list(shown) == ["model_id", "ce", "abs_diff", "cos_sim", "driftline"]
    assert shown["ce"] == 2.25
    assert shown["abs_diff"] == {"model.layers3.ln": 0.5, "model.layers4.ln": None}
    again = load_thresholds(path)
    assert again.entries[0] == OURS.entries[0]
    assert [repr(e) for e in again.entries] == [repr(e) for e in OURS.entries]
    assert (again.settings, again.sources) == ({"seed": 0}, ("a.csv",))
    assert again.provenance == {"created": "now"}


def test_a_value_edited_by_hand_wins_over_what_was_measured(tmp_path):
    path = OURS.write(tmp_path / "t.json")
    shown = json.loads(path.read_text())
    shown["ce"] = 3.0
    shown["abs_diff"]["model.layers9.ln"] = 0.125
    path.write_text(json.dumps(shown))
    again = load_thresholds(path)
    assert again.limit("ce") == 3.0
    assert again.limit("abs_diff", "layers.9.ln") == 0.125
    assert again.find("ce").samples == 9


def test_a_shape_has_its_own_limit_and_an_unknown_one_the_pooled():
    assert OURS.limit("ce") == 2.25
    assert OURS.limit("ce", shape={"batch_size": 1}) == 1.5
    assert OURS.limit("ce", shape={"batch_size": 8}) == 2.5, "the most lenient that fits"
    assert OURS.limit("ce", shape={"batch_size": 4}) == 2.25


def test_a_layer_is_found_in_every_spelling():
    for spelling in ("model.layers3.ln", "layers.3.ln", "model.layers.3.ln", "layers[3].ln"):
        assert OURS.limit("abs_diff", spelling) == 0.5, spelling
    assert OURS.limit("abs_diff", "layers.3.ln", port="input") == 0.75
    assert OURS.limit("abs_diff", "layers.5.ln") is None
    documented = LayerNames(["model.base_model.layers7.ln", "model"])
    assert documented.find("base_model.layers.7.ln") == "model.base_model.layers7.ln"
    assert documented.find("(root)") == "model"


def test_an_exact_spelling_is_preferred_and_a_doubtful_one_is_not_guessed():
    names = LayerNames(["model.layers.0", "layers.0", "model.h.1", "model.blocks.1"])
    assert names.find("layers.0") == "layers.0"
    assert names.find("model.layers.0") == "model.layers.0"
    assert names.find("model.layers.1") is None


def test_thresholds_that_are_not_there_or_nan_are_refused_in_words():
    with pytest.raises(BadInput, match="no threshold of kl"):
        OURS.limit("kl")
    with pytest.raises(BadInput, match="for layers, none for the whole model"):
        OURS.limit("cos_sim")
    with pytest.raises(BadInput, match=r"of 'model.layers4.ln' .* is nan"):
        OURS.limit("abs_diff", "layers.4.ln")


def test_the_older_form_with_lists_is_read_and_its_zeros_are_no_thresholds():
    old = load_thresholds(DATA / "docera_model-forward" / FILE)
    assert old.model_id == "models--tiny-granite"
    assert old.limit("abs_diff", "base_model.layers.1.ff_sub_layer.w1") == 0.021244868292653554
    assert old.find("abs_diff", "base_model.layers.1.ff_sub_layer.w1").statistic == "l2"
    assert old.limit("abs_diff", "base_model.layers.1.attn.in_proj") is None
    assert "31 values are 0" in old.notes[0]


def test_the_newer_form_of_another_tool_is_read_under_its_metrics_usual_names():
    new = load_thresholds(DATA / "head_model-forward" / FILE)
    assert new.metrics == ("abs_diff", "cos_sim")
    assert new.find("cos_sim_avg", "head").direction == "higher"
    assert not new.notes


def test_a_line_of_a_model_configuration_is_a_thresholds_file(tmp_path):
    path = tmp_path / "line.json"
    path.write_text('{"model_id": "acme/tiny", "ce": 2.5, "mean_diff": 0.001, "frequency": 1}')
    read = load_thresholds(path, model="acme/tiny")
    assert (read.limit("ce"), read.limit("diff_mean"), read.limit("mean_diff")) == (2.5, 1e-3, 1e-3)


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ("acme/tiny-v1", True),
        ("/models/acme/tiny-v1/", True),
        ("tiny-v1", True),
        ("acme/tiny-v1-instruct", False),
        ("other/tiny-v1", False),
        ("acme/tiny", False),
    ],
)
def test_thresholds_know_whose_they_are(theirs, same):
    thresholds = Thresholds("acme--tiny-v1", ())
    assert thresholds.belongs_to(theirs) is same
    if not same:
        with pytest.raises(BadInput, match=f"for the model 'acme--tiny-v1', not for '{theirs}'"):
            thresholds.require_model(theirs)


def test_a_baseline_made_from_a_local_copy_serves_the_model_of_that_name():
    local = Thresholds("--tmp--models--Mistral-7B-Instruct-v0.3", ())
    assert local.belongs_to("mistralai/Mistral-7B-Instruct-v0.3")
    assert not local.belongs_to("mistralai/Mistral-7B-Instruct-v0.2")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "3",
        '{"model_id": 3}',
        '{"model_id": "m", "ce": "high"}',
        '{"model_id": "m", "ce": true}',
        '{"model_id": "m", "ce": [3]}',
        '{"model_id": "m", "driftline": {"schema": "driftline.thresholds/9"}}',
        '{"model_id": "m", "driftline": {"schema": "driftline.thresholds/1"}}',
        '{"model_id": "m", "driftline": {"schema": "driftline.thresholds/1", "thresholds": [3]}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_thresholds_file_is_refused_in_a_sentence(text, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(BadFile, match=r"t\.json"):
        load_thresholds(path)


def test_a_thresholds_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(BadFile, match=r"t\.json cannot be read: No such file"):
        load_thresholds(tmp_path / "t.json")


JSONS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["model_id", "ce", "abs_diff", "driftline", "schema", "thresholds"]), JSONS
    )
)
def test_whatever_the_json_holds_there_are_thresholds_or_a_sentence(shown):
    try:
        assert isinstance(from_json(shown), Thresholds)
    except DriftlineError as refusal:
        assert "thresholds file" in str(refusal) or "schema" in str(refusal)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        OURS.write(tmp_path / "file" / "t.json")
