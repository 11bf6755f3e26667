"""Validation of decoders: the documented flow and messages, and faults that were planted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tiny_decoders import DATA, GRANITE, LLAMA, PROMPTS

from driftline.comparison.verdict.judge import judge
from driftline.decoding.explain import explain
from driftline.decoding.failures import Rate
from driftline.decoding.known_limits import DOCUMENTED, look_up, read_list, read_table
from driftline.decoding.option_reader import validate_options
from driftline.decoding.options import ValidateOptions
from driftline.decoding.pipeline import Session
from driftline.decoding.validate import Verdict, layer_lines, lines_of, validate
from driftline.errors import BadFile, BadInput, DriftlineError

BASE = {
    "COMMON_MODEL_PATHS": str(LLAMA),
    "COMMON_BATCH_SIZES": "2",
    "COMMON_SEQ_LENGTHS": "32",
    "COMMON_MAX_NEW_TOKENS": "8",
    "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "16",
    "USE_MICRO_MODELS": "0",
    "SHAREGPT_PATH": str(PROMPTS),
    "REFERENCE": "device=cpu,dtype=fp32",
    "CANDIDATE": "device=cpu,dtype=fp16",
}


@pytest.fixture(scope="module")
def session() -> Session:
    torch.set_num_threads(1)
    return Session()


def ask(**words: str) -> ValidateOptions:
    said = BASE | words
    (only,) = validate_options(lambda name: said.get(name, ""))
    return only


def run(session: Session, **words: str) -> tuple[Verdict, list[str]]:
    lines: list[str] = []
    return validate(ask(**words), report=lines.append, session=session), lines


def damaged(session: Session, layer: str, scale: float) -> Session:
    """The same models, one weight of the candidate changed."""
    own = Session()
    own.model(ask(), "candidate").module.get_submodule(layer).weight.data.mul_(scale)
    return own


def shape_of(line: str) -> str:
    """A message without what differs between machines and runs."""
    line = re.sub(r"took [\d.]+s", "took Ns", line)
    line = re.sub(r"validation info to .*/.*\.(cpu|aiu)_", r"validation info to \1_", line)
    return re.sub(r"rate: [\d.e-]+", "rate: N", line)


@pytest.mark.parametrize("log", ["run1_force_l1_fail", "run2_force_l1_pass_reuse"])
def test_the_messages_are_those_of_the_recorded_runs(stand_in, tmp_path, log):
    torch.set_num_threads(1)
    session = Session()
    words = {
        "CANDIDATE": "device=aiu",
        "FORCE_VALIDATION_LEVEL_1": "1",
        "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "32",
        "VALIDATION_INFO_DIR": str(tmp_path),
        "SAVE_VALIDATION_INFO_OUTPUTS": "1",
        "METRICS_THRESHOLD": "2.96,0.0000001" if "fail" in log else "3.5,0.9",
    }
    if "reuse" in log:
        run(session, **words)
    _, lines = run(session, **words)
    recorded = (DATA / "test_decoders" / f"{log}.log").read_text().splitlines()
    wanted = [shape_of(line) for line in recorded if line[:1] == "[" and "Sentient" not in line]
    assert lines[0].endswith("candidate: aiu in fp16, compiled by sendnn")
    assert lines[1].startswith("[ 0/ 1]: testing model=")
    (graphs,) = [line for line in lines if "sendnn compiled" in line]
    found = [shape_of(line) for line in lines[2:] if line != graphs]
    assert found[: len(wanted)] == wanted
    passed = ["[ 0/ 1]: passed validation level 1"]  # one recorded line lacks its mark
    assert found[len(wanted) :] == ([] if "fail" in log else passed)


def test_equal_tokens_pass_level_0_and_nothing_more_is_run(session):
    verdict, lines = run(session)
    assert verdict.passed
    assert verdict.tokens_equal
    assert verdict.rates == ()
    assert lines[-1] == "[ 0/ 1]: passed validation level 0"


def test_equal_tokens_of_logits_that_are_no_numbers_do_not_pass():
    own = Session()
    for model in (own.model(ask(), "reference"), own.model(ask(), "candidate")):
        model.module.get_submodule("lm_head").weight.data[5, 3] = torch.nan
    with pytest.raises(DriftlineError, match="prompt 0: 8 logits of the reference are NaN or inf"):
        run(own)
    own = Session()
    # Never the largest, so that both sides say the same tokens.
    own.model(ask(), "candidate").module.get_submodule("lm_head").register_forward_hook(
        lambda _module, _inputs, output: output.index_fill(-1, torch.tensor([5]), -torch.inf)
    )
    # Minus infinity on both sides would be equal; here only the candidate never says token 5.
    said = (
        "prompt 0: at token 0, 0 logits of the reference are minus infinity, and 1 of the candidate"
    )
    with pytest.raises(DriftlineError, match=said):
        run(own)


def test_a_damaged_layer_fails_and_is_named_with_prompt_and_token(session):
    own = damaged(session, "model.layers.1.mlp.down_proj", 1.5)
    verdict, lines = run(own, METRICS_THRESHOLD="3.5,0.0005")
    assert not verdict.passed
    assert any("failed validation level 0" in line for line in lines)
    assert verdict.complaint.startswith("failure rate for mean diff was too high: ")
    told = list(lines_of(verdict, own.tokenizer(verdict.options)))
    assert any(re.match(r"first failing token: iter=0, prompt 0 \(c34\), token 0", t) for t in told)
    assert any("reference's likeliest: 68 'b' 0.0499" in line for line in told)
    assert any("95 % interval" in line for line in told)
    assert verdict.first is not None
    table = judge(explain(verdict.options, verdict.first, own))
    assert table.first_site == "model.layers.1.mlp.down_proj"
    assert "model.layers.1.mlp.down_proj" in "\n".join(layer_lines(table))


def test_one_bad_prompt_is_told_from_many(session, tmp_path):
    words = {
        "FORCE_VALIDATION_LEVEL_1": "1",
        "VALIDATION_INFO_DIR": str(tmp_path),
        "METRICS_THRESHOLD": "9,0.01",
    }
    run(session, SAVE_VALIDATION_INFO_OUTPUTS="1", **words)
    (saved,) = tmp_path.glob("*.cpu_validation_info.1.out")
    kept = torch.load(saved / "1.pt", weights_only=True)
    kept["logits"] = kept["logits"] * 2
    torch.save(kept, saved / "1.pt")
    verdict, _ = run(session, **words)
    told = "\n".join(lines_of(verdict))
    assert "1 of 4 prompts has failing tokens:\n  iter=1 prompt 1 (c116): mean diff 8," in told


def test_what_metrics_wrote_is_used_as_it_is(session, tmp_path, driftline_metrics):
    driftline_metrics(tmp_path)
    verdict, lines = run(session, VALIDATION_INFO_DIR=str(tmp_path), FORCE_VALIDATION_LEVEL_1="1")
    assert verdict.passed
    found = [line for line in lines if "-- loading it" in line]
    assert [f"seed={n} " in line for n, line in enumerate(found)] == [True, True]


@pytest.fixture
def driftline_metrics():
    from driftline.decoding.metrics import run_metrics
    from driftline.decoding.models.targets import Target
    from driftline.decoding.options import MetricsOptions

    def make(folder: Path) -> None:
        run_metrics(
            MetricsOptions(
                model_path=str(LLAMA),
                tokenizer="",
                prompts=PROMPTS,
                output_dir=folder,
                batch_size=2,
                length=32,
                new_tokens=8,
                tokens_per_sequence=16,
                reference=Target(),
                candidate=Target("cpu", "fp16"),
            ),
            report=lambda line: None,
        )

    return make


def test_micro_models_have_the_candidates_own_weights_on_both_sides(session, tmp_path):
    words = {"USE_MICRO_MODELS": "1", "MICRO_LAYERS": "1", "COMMON_MODEL_PATHS": str(GRANITE)}
    drawn = ask(**words)
    assert (drawn.micro_layers, drawn.random_weights) == (1, True)
    verdict, lines = run(Session(), FORCE_VALIDATION_LEVEL_1="1", **words)
    assert "[ 0/ 1]: using randomly initialized model" in lines
    assert {rate.check: rate.rate for rate in verdict.rates}["mean_diff"] == 0.0
    own = Session()
    reference, candidate = (own.model(drawn, side) for side in ("reference", "candidate"))
    for ours, theirs in zip(
        reference.module.parameters(), candidate.module.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs.float())
    assert len(reference.module.model.layers) == 1
    local = ask(MICRO_WEIGHTS="local", **words)
    assert not local.random_weights
    whole = own.model(ask(COMMON_MODEL_PATHS=str(GRANITE)), "candidate").module
    part = Session().model(local, "candidate").module
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(part.get_submodule(name).weight, whole.get_submodule(name).weight)
    shutil.copytree(GRANITE, tmp_path / "tiny-granite")
    home = ask(MICRO_MODELS_HOME=str(tmp_path), **words)
    assert home.source == str(tmp_path / "tiny-granite")
    assert home.out("cpu", 0) is None
    assert ask(VALIDATION_INFO_DIR="x", **words).out("cpu", 0).parent == Path("x/tiny_models")


def test_who_says_the_limits():
    model = "ibm-granite/granite-3.2-8b-instruct"
    words = {"COMMON_MODEL_PATHS": model}
    assert ask(**words).limits[:2] == (2.3919514417648315, 0.0005767398688476533)
    assert ask(METRICS_THRESHOLD="1.5,0.25", **words).limits[:2] == (1.5, 0.25)
    assert ask().limits[:2] == (3.0, 0.001)
    drawn = ask(USE_MICRO_MODELS="1", **words).limits
    assert drawn == (3.0, 0.001, "default: weights are drawn")
    assert look_up(DOCUMENTED, model, micro=True).ce == 2.996668996810913
    assert look_up(DOCUMENTED, "ibm-granite/granite-3.3-8b-instruct", micro=True).micro is False


def test_limits_from_the_thresholds_file_and_never_from_another_models(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"model_id": "x--tiny-llama", "ce": 2.5, "diff_mean": 0.125}))
    assert ask(THRESHOLDS=str(path)).limits == (2.5, 0.125, str(path))
    with pytest.raises(BadInput, match="is for the model 'x--tiny-llama', not for"):
        ask(THRESHOLDS=str(path), COMMON_MODEL_PATHS=str(GRANITE))


def test_a_table_of_limits_is_made_once_and_then_the_users(tmp_path):
    path, told = tmp_path / "own" / "limits.json", []
    said = BASE | {"THRESHOLD_TABLE": str(path)}
    validate_options(lambda name: said.get(name, ""), report=told.append)
    assert told == [f"made {path} with the documented limits; it is yours to edit"]
    assert read_table(path) == DOCUMENTED
    shown = json.loads(path.read_text())
    shown.append({"model_id": str(LLAMA), "ce": 1.0, "mean_diff": 0.5})
    path.write_text(json.dumps(shown))
    assert ask(THRESHOLD_TABLE=str(path)).limits == (1.0, 0.5, "table of limits")
    path.write_text('[{"model_id": "x", "ce": "much"}]')
    with pytest.raises(BadFile, match="entry 0: ce and mean_diff of 'x' must be numbers"):
        ask(THRESHOLD_TABLE=str(path))


def test_a_list_of_models_replaces_the_names_and_says_which_lines_are_none(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(
        '{"model_id": "a/b", "ce": 2.0, "mean_diff": 0.5, "frequency": 0}\n'
        '{"model_id": "a/c", "ce": 2.0, "mean_diff": 0.5, "frequency": 2}\n{"model_id": "a/d",}\n'
    )
    told: list[str] = []
    said = BASE | {"FROM_MODEL_CONFIGURATION": str(path), "USE_MICRO_MODELS": "1"}
    (only,) = validate_options(lambda name: said.get(name, ""), report=told.append)
    assert (only.model, only.limits.ce, only.micro) == ("a/b", 2.0, False)
    assert told == ['config contained an improper json line: {"model_id": "a/d",}']
    assert len(read_list(path, 2).models) == 2
    with pytest.raises(BadFile, match="names no model"):
        (tmp_path / "empty").write_text("{}\n")
        read_list(tmp_path / "empty", 0)


def test_shapes_are_the_full_product_with_the_documented_ids():
    said = BASE | {"COMMON_BATCH_SIZES": "1,8", "COMMON_SEQ_LENGTHS": "64,2048"}
    ids = [each.id for each in validate_options(lambda name: said.get(name, ""))]
    assert ids == [f"{LLAMA}-{b}-{s}-8" for b in (1, 8) for s in (64, 2048)]


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        ("COMMON_BATCH_SIZES", "two", "BATCH_SIZES .* takes whole numbers from 1 .* not 'two'"),
        ("COMMON_SEQ_LENGTHS", "0", "SEQ_LENGTHS .* takes whole numbers"),
        ("USE_MICRO_MODELS", "maybe", "takes 1 or 0, not 'maybe'"),
        ("FAILURE_THRESHOLD", "2", "takes a share from 0 to 1, not '2'"),
        ("SKIP_ASSERTIONS", "cee", "takes ce and mean_diff, not 'cee'"),
        ("METRICS_THRESHOLD", "3", "takes two numbers, ce and mean diff, not '3'"),
        ("ATTN_TYPE", "pagd", "can be sdpa, math, paged, math_fp8, paged_fp8, not 'pagd'"),
        ("TIMING", "all", "takes e2e or per-token"),
        ("CANDIDATE", "device=cuda,dtype=fp99", "'fp99' is no number format"),
        ("SAVE_VALIDATION_INFO_OUTPUTS", "1", "no folder is named"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_a_sentence(word, value, message):
    with pytest.raises(BadInput, match=message):
        ask(**{word: value})


def test_attention_of_ibm_fms_has_it_load_the_models_and_is_refused_of_another_library():
    paged, fp8 = ask(ATTN_TYPE="paged"), ask(ATTN_TYPE="math_fp8")
    assert (paged.library, paged.candidate.attention, paged.reference.attention) == (
        *("fms", "paged", ""),
    )
    # fp8 rounds a lot: on one side only it would be found instead of what the device does.
    assert (fp8.library, fp8.candidate.attention, fp8.reference.attention) == (
        *("fms", "math_fp8", "math_fp8"),
    )
    assert fp8.prefix == f"{ask().prefix}_attn-type-math_fp8"
    assert paged.prefix == ask().prefix
    said = ask(ATTN_TYPE="paged_fp8", REFERENCE="attention=eager")
    assert (said.candidate.attention, said.reference.attention) == ("paged_fp8", "eager")
    with pytest.raises(BadInput, match=r"is an attention of ibm-fms, and .*LIBRARY.* says trans"):
        ask(ATTN_TYPE="paged_fp8", LIBRARY="transformers")


def test_a_name_that_no_file_can_have_is_refused_where_files_are_named():
    long = {"COMMON_MODEL_PATHS": "x" * 300}
    assert ask(**long).model == "x" * 300
    with pytest.raises(BadInput, match="would have 381 bytes; 255 is the most"):
        ask(VALIDATION_INFO_DIR="somewhere", **long)


def test_what_is_missing_is_said_before_anything_is_computed(tmp_path):
    for words, message in (
        ({"COMMON_MODEL_PATHS": str(tmp_path / "none")}, "there is no model folder"),
        ({"SHAREGPT_PATH": str(tmp_path / "none.json")}, "there is no prompt file"),
        ({"TOKENIZER": str(tmp_path / "none")}, "there is no tokenizer folder"),
        ({"COMMON_BATCH_SIZES": "4000"}, "4000 are needed"),
    ):
        with pytest.raises(DriftlineError, match=message):
            run(Session(), **words)


def test_saved_outputs_that_do_not_fit_are_refused(session, tmp_path):
    words = {"VALIDATION_INFO_DIR": str(tmp_path), "FORCE_VALIDATION_LEVEL_1": "1"}
    run(session, SAVE_VALIDATION_INFO_OUTPUTS="1", **words)
    (saved,) = tmp_path.glob("*.cpu_validation_info.0.out")
    good = torch.load(saved / "0.pt", weights_only=True)
    smaller = good | {"logits": good["logits"][:, :-1].clone()}
    not_numbers = good | {
        "logits": good["logits"].clone().index_fill_(1, torch.tensor([3]), torch.nan)
    }
    others = good | {"tokens": good["tokens"].flip(0)}
    for kept, message in (
        (smaller, "vocabulary has 383 tokens, the candidate's 384"),
        (not_numbers, "prompt 0: 8 logits of the reference are NaN"),
        (others, "was made from other prompts"),
        (good["tokens"], "logits for some prompts and none for others|keeps no logits"),
    ):
        torch.save(kept, saved / "0.pt")
        with pytest.raises(DriftlineError, match=message):
            run(session, **words)
    (saved / "0.pt").write_bytes(b"damaged")
    with pytest.raises(BadFile, match="cannot be loaded: it is damaged"):
        run(session, **words)


def test_a_saved_reference_of_other_weights_is_refused(session, tmp_path):
    shutil.copytree(LLAMA, tmp_path / "mine")
    words = {
        "COMMON_MODEL_PATHS": str(tmp_path / "mine"),
        "VALIDATION_INFO_DIR": str(tmp_path / "kept"),
    }
    run(session, SAVE_VALIDATION_INFO_OUTPUTS="1", **words)
    run(session, **words)
    weights = tmp_path / "mine" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BadInput, match="made by a model with other weights or another config"):
        run(session, **words)


def test_texts_that_end_at_once_leave_nothing_to_judge(session, monkeypatch):
    every = tuple(range(384))
    monkeypatch.setattr("driftline.decoding.validate.end_ids", lambda *_: every)
    with pytest.raises(BadInput, match="no token was kept: all 4 texts end at once"):
        run(session, FORCE_VALIDATION_LEVEL_1="1")


def test_a_skipped_check_is_told_and_not_judged(session):
    words = {"FORCE_VALIDATION_LEVEL_1": "1", "METRICS_THRESHOLD": "0.1,0.9"}
    assert not run(session, **words)[0].passed
    verdict, lines = run(session, SKIP_ASSERTIONS="ce", **words)
    assert verdict.passed
    assert "[ 0/ 1]: cross entropy loss failure rate: 1.0" in lines
    assert "[ 0/ 1]: passed validation level 1" in lines


def test_the_rate_must_stay_below_what_is_allowed_and_has_an_interval():
    rate = Rate("ce", 1, 100, 3.0, 0.01)
    assert not rate.passed
    assert rate._replace(kept=101).passed
    low, high = rate.interval
    assert (round(low, 4), round(high, 4)) == (0.0018, 0.0545)
    assert rate._replace(failing=0).interval[0] == 0.0
    assert rate._replace(failing=100).interval[1] == 1.0


def test_a_rate_near_the_edge_says_that_a_percentile_does_that_to_its_own_baseline():
    rate = Rate("ce", 11, 1024, 3.0, 0.01)
    for failing, told in ((11, 1), (30, 1), (500, 0), (10, 0)):
        rates = (rate._replace(failing=failing), rate._replace(failing=0))
        lines = list(lines_of(Verdict(ask(), tokens_equal=True, rates=rates)))
        assert sum("near the edge" in line for line in lines) == told, failing


def test_a_compiled_candidate_is_validated_and_its_layers_are_shown_without_its_compiler():
    own = Session()
    verdict, lines = run(
        own,
        CANDIDATE="device=cpu,dtype=fp16,compile=aot_eager",
        FORCE_VALIDATION_LEVEL_1="1",
        COMMON_MAX_NEW_TOKENS="2",
        CUMULATIVE_TEST_TOKENS_PER_SEQUENCE="2",
        METRICS_THRESHOLD="4.0,1e-9",
        TIMING="e2e",
    )
    assert verdict.tokens_equal
    assert 0 < verdict.variation < 0.003, "it is near, and not the same computation"
    assert any(re.search(r"the candidate \(cpu\) generation took [\d.]+s", line) for line in lines)
    assert verdict.first is not None
    table = judge(explain(verdict.options, verdict.first, own))
    assert any(row.site == "model.layers.1.mlp.down_proj" for row in table.rows)
    (note,) = table.notes
    figures = re.search(r"logits is ([\d.e-]+) compiled and ([\d.e-]+) so", note)
    assert figures, note
    assert 0 < float(figures[1]) < 0.01
    assert 0 < float(figures[2]) < 0.01


def test_the_device_of_the_documents_goes_by_its_backend_and_shows_its_blocks(stand_in):
    own = Session()
    verdict, _ = run(
        own,
        CANDIDATE="device=aiu,dtype=fp16",
        FORCE_VALIDATION_LEVEL_1="1",
        COMMON_MAX_NEW_TOKENS="2",
        CUMULATIVE_TEST_TOKENS_PER_SEQUENCE="2",
        METRICS_THRESHOLD="4.0,1e-9",
    )
    assert verdict.tokens_equal
    assert stand_in
    assert verdict.first is not None
    before = len(stand_in)
    table = judge(explain(verdict.options, verdict.first, own))
    seen = {row.site for row in table.rows if row.status == "pass"}
    assert {"model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"} <= seen
    assert "compiled block by block" in table.notes[0]
    assert len(stand_in) > before + 2, "each block is a graph of its own"
