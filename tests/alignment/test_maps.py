"""What the user says about names, and names that differ by habit only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import driftline
from driftline.alignment.plan import Plan
from driftline.alignment.rules.maps import link_sites, parse_map, read_mapping
from driftline.alignment.rules.names import headless, plain
from driftline.errors import BadFile, BadInput
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.runs import record_into


def run_of(**classes: str) -> Run:
    """One output per site, `__` for a dot; the value is the class."""
    sink = MemorySink()
    for order, (name, class_name) in enumerate(classes.items()):
        data = np.full((2, 3), order, np.float32)
        record_into(sink, name.replace("__", "."), data, class_name=class_name)
    return sink.run()


def partners(plan: Plan) -> dict[str, str]:
    return {pair.reference.key.site: pair.candidate.key.site for pair in plan.pairs}


def test_stars_of_a_map_stand_for_the_same_text_on_both_sides():
    ours = ["model.layers.0.q", "model.layers.1.q", "head"]
    theirs = ["blocks.0.query", "blocks.1.query", "head"]
    links = link_sites([parse_map("model.layers.*.q=blocks.*.query")], ours, theirs)
    assert links == {"model.layers.0.q": "blocks.0.query", "model.layers.1.q": "blocks.1.query"}


def test_a_map_wins_over_equal_names():
    ours, theirs = run_of(a="Linear", b="Linear"), run_of(a="Linear", b="Linear")
    plan = driftline.align(ours, theirs, maps=["a=b"])
    assert partners(plan)["a"] == "b"
    assert {pair.by for pair in plan.pairs} == {"map"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "does not name two sites"),
        ("=b", "does not name two sites"),
        ("a.*=b", "1 stars on the left and 0 on the right"),
        ("a=b.*", "0 stars on the left and 1 on the right"),
    ],
)
def test_a_map_that_means_nothing_is_refused(text: str, says: str):
    with pytest.raises(BadInput, match=says):
        parse_map(text)


def test_a_map_that_fits_nothing_names_the_nearest_site():
    with pytest.raises(BadInput, match="no site of the reference matches 'embd'") as trouble:
        link_sites([("embd", "words")], ["embed"], ["words"])
    assert "embed" in trouble.value.hint
    with pytest.raises(BadInput, match="the candidate has no site 'wrds'") as trouble:
        link_sites([("embed", "wrds")], ["embed"], ["words"])
    assert "words" in trouble.value.hint
    with pytest.raises(BadInput, match="gives 'words' to 'a' and to 'b'"):
        link_sites([("a", "words"), ("b", "words")], ["a", "b"], ["words"])


def test_a_mapping_file_pairs_sites(tmp_path: Path):
    ours, theirs = run_of(enc__x="Linear"), run_of(y="Linear")
    toml = tmp_path / "map.toml"
    toml.write_text('"enc.x" = "y"\n')
    assert partners(driftline.align(ours, theirs, mapping=toml)) == {"enc.x": "y"}
    plain_json = tmp_path / "map.json"
    plain_json.write_text('{"enc.*": "*"}')
    with pytest.raises(BadInput, match="the candidate has no site 'x'"):
        driftline.align(ours, theirs, mapping=plain_json)


@pytest.mark.parametrize("value", ["GLMBlock_output_0", ["Nothing", "GLMBlock_output_0"]])
def test_the_seed_s_op_mapping_file_maps_classes_from_its_folder_or_itself(
    tmp_path: Path, value: object
):
    ours = run_of(l__0="GLMBlock", l__1="GLMBlock", odd="Other")
    theirs = run_of(**{"1_Common": "CommonLayer", "2_Common": "CommonLayer"})
    file = tmp_path / "op_mapping_file.json"
    file.write_text(json.dumps({"CommonLayer_outtensor0": value}))
    for place in (file, tmp_path):
        plan = driftline.align(ours, theirs, mapping=place, structural=False)
        assert partners(plan) == {"l.0": "1_Common", "l.1": "2_Common"}
        assert {pair.by for pair in plan.pairs} == {"map"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("op_mapping_file.json", "[1]", "is no mapping"),
        ("op_mapping_file.json", '{"A": 3}', "'A' needs a class name"),
        ("op_mapping_file.json", '{"A": ["b/c"]}', "'b/c' is no class name"),
        ("op_mapping_file.json", "{", "cannot be read"),
        ("m.toml", "a.b = 3", "not to a site"),
        ("m.toml", "= 3", "cannot be read.*line 1"),
    ],
)
def test_a_mapping_that_cannot_be_read_says_why(tmp_path: Path, name: str, text: str, says: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadFile, match=says):
        read_mapping(tmp_path / name)
    with pytest.raises(BadFile, match="No such file"):
        read_mapping(tmp_path / "none")


@pytest.mark.parametrize(
    ("site", "other"),
    [
        ("module.layers.3.ln", "layers.3.ln"),
        ("_orig_mod.h.3.ln", "layers[3].ln"),
        ("a._fsdp_wrapped_module.blocks.0.x", "a.layers.0._checkpoint_wrapped_module.x"),
        ("base_model.layers7.ln", "base_model.layers.7.ln"),
        ("(root)", "module"),
    ],
)
def test_wrappers_and_spellings_leave_one_plain_name(site: str, other: str):
    assert plain(site) == plain(other)


def test_a_head_is_taken_off_only_where_that_leaves_one_name():
    assert headless("transformer.h.0.ln") == headless("model.layers.0.ln") == "layers.0.ln"
    ours = run_of(model__norm="LayerNorm", module__x="Linear")
    theirs = run_of(norm="LayerNorm", x="Linear")
    plan = driftline.align(ours, theirs, structural=False)
    assert partners(plan) == {"model.norm": "norm", "module.x": "x"}
    assert {pair.by for pair in plan.pairs} == {"normalised"}
    twice = run_of(model__norm="LayerNorm", base_model__norm="LayerNorm")
    with pytest.raises(BadInput, match="share no tensor"):
        driftline.align(twice, theirs, structural=False)


def test_a_mapped_class_pairs_inside_its_layers_where_the_numbers_of_them_differ(tmp_path: Path):
    ours = run_of(l__0__a="Linear", l__0__z="Zap", l__1__a="Linear", l__1__z="Zap", tail="Zap")
    theirs = run_of(
        **{"1_L__0_LinearOperation": "LinearOperation", "1_L__1_Other": "Other"},
        **{"2_L__0_LinearOperation": "LinearOperation", "2_L__1_Other": "Other"},
        **{"3_LinearOperation": "LinearOperation"},
    )
    file = tmp_path / "op_mapping_file.json"
    file.write_text('{"Other": ["Zap"]}')
    found = partners(driftline.align(ours, theirs, mapping=file))
    assert found["l.0.z"] == "1_L.1_Other"
    assert found["l.0.a"] == "1_L.0_LinearOperation"
    assert "l.0.z" not in partners(driftline.align(ours, theirs))


def test_a_map_of_classes_takes_nothing_away_from_what_structure_finds(tmp_path: Path) -> None:
    from support.atb_twins import atb_twin, torch_twin, toy_decoder

    model, prompt = toy_decoder(layers=2), np.array([[3, 1, 4]])
    torch_twin(tmp_path / "torch", model, prompt)
    atb_twin(tmp_path / "atb", model, prompt)
    said = {"LinearOperation_outtensor0": ["Linear_output"], "RmsNormOperation": ["RMSNorm"]}
    (tmp_path / "op_mapping_file.json").write_text(json.dumps(said))
    plain = driftline.align(tmp_path / "torch", tmp_path / "atb")
    plan = driftline.align(tmp_path / "torch", tmp_path / "atb", mapping=tmp_path)
    found = [{str(pair.reference.key) for pair in each.pairs} for each in (plain, plan)]
    assert found[0] == found[1]
    assert {pair.by for pair in plan.pairs} == {"structure"}, "classes that are known need no map"


def test_an_entry_that_matches_nothing_is_told(tmp_path: Path) -> None:
    from support.atb_twins import atb_twin, torch_twin, toy_decoder

    model, prompt = toy_decoder(layers=2), np.array([[3, 1, 4]])
    torch_twin(tmp_path / "torch", model, prompt)
    atb_twin(tmp_path / "atb", model, prompt)
    said = {"RmsNormOperatoin": ["RMSNorm"], "ActivationOperation": ["SiLU"]}
    (tmp_path / "op_mapping_file.json").write_text(json.dumps(said))
    plan = driftline.align(tmp_path / "torch", tmp_path / "atb", mapping=tmp_path)
    (note,) = [note for note in plan.notes if "changes nothing" in note]
    assert "'RmsNormOperatoin' for 'RMSNorm'" in note
    assert "did you mean 'RmsNormOperation'?" in note
