"""`driftline thresholds`, `calibrate` and `check` as a person meets them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from driftline.cli.main import PIPE_CLOSED

DATA = Path(__file__).parents[1] / "data" / "aiu"
SHAPE = "_max-new-tokens-128_batch-size-1_seq-length-64_dtype-fp16"


@pytest.fixture
def tokens(tmp_path):
    return Path(shutil.copytree(DATA / "get_thresholds" / "model_level_input", tmp_path / "out"))


@pytest.fixture
def layers(tmp_path):
    with tarfile.open(DATA / "layers" / "head_model-forward" / "csv.tar.gz") as archive:
        archive.extractall(tmp_path / "layers", filter="data")
    return tmp_path / "layers"


def metric_file(folder, model, values, metric="ce", layer=""):
    text = "\n".join([metric, *map(str, values)])
    (folder / f"{model}{SHAPE}{layer and '--' + layer}.{metric}.csv").write_text(text + "\n")


def test_the_documented_lines_and_the_file_beside_the_metric_files(driftline, tokens):
    said = driftline(
        "thresholds", "--models", "acme/tiny-v1/", "--metrics", "diff_mean", "ce",
        "--file_base", tokens,
    )  # fmt: skip
    assert (said.code, said.out) == (
        0,
        "found 3 metric files\n"
        "acme--tiny-v1 diff_mean 0.00042272109137617576\n"
        "found 3 metric files\n"
        "acme--tiny-v1 ce 2.6112808652876995\n",
    )
    shown = json.loads((tokens / "acme--tiny-v1-thresholds.json").read_text())
    assert shown.pop("driftline")["thresholds"][1]["samples"] == 400
    assert shown == {
        "model_id": "acme--tiny-v1",
        "diff_mean": 0.00042272109137617576,
        "ce": 2.6112808652876995,
    }
    assert "acme--tiny-v1-thresholds.json" in said.err


def test_a_reader_who_leaves_early_does_not_take_the_file_along(tokens):
    words = ["thresholds", "--models", "acme/tiny-v1", "--metrics", "diff_mean", "ce"]
    child = subprocess.Popen(
        [sys.executable, "-m", "driftline", *words, "--file_base", str(tokens)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.close()
    child.communicate()
    shown = json.loads((tokens / "acme--tiny-v1-thresholds.json").read_text())
    assert {"diff_mean", "ce"} <= shown.keys()
    assert child.returncode == PIPE_CLOSED


def test_every_layer_has_its_line_and_tokens_and_layers_share_the_file(driftline, layers):
    said = driftline(
        "thresholds", "--models", "models/tiny-granite", "--metrics", "abs_diff", "cos_sim",
        "--file_base", layers, "--layer_io",
    )  # fmt: skip
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == lines[29] == "found 28 layers metric files"
    assert lines[1] == "Layer model.base_model.embedding avg abs_diff = 1.5896848594820767e-05"
    assert len(lines) == 58
    metric_file(layers, "models--tiny-granite", [1.0, 2.0])
    said = driftline(
        "thresholds", "--models", "models/tiny-granite", "--metrics", "ce", "--file_base", layers
    )
    assert "beside those of abs_diff, cos_sim that were there" in said.err
    shown = json.loads((layers / "models--tiny-granite-thresholds.json").read_text())
    assert list(shown) == ["model_id", "ce", "abs_diff", "cos_sim", "driftline"]
    assert len(shown["abs_diff"]) == 28
    assert isinstance(shown["abs_diff"]["model.base_model.layers1.ln"], float)


def test_other_statistics_on_request(driftline, tokens):
    words = ("thresholds", "--models=acme/tiny-v1", "--metrics=ce", "--file_base", tokens)
    assert (
        driftline(*words, "--statistic", "max").out.splitlines()[1].startswith("acme--tiny-v1 ce")
    )
    shown = json.loads((tokens / "acme--tiny-v1-thresholds.json").read_text())
    assert shown["driftline"]["thresholds"][0]["statistic"] == "max"
    assert driftline(*words, "--statistic", "p999").code == 2
    first = driftline(*words, "--seed", "1", "-o", tokens / "one").code
    assert first == 0
    assert (tokens / "one" / "acme--tiny-v1-thresholds.json").exists()


def test_nan_is_printed_and_said_and_the_rest_is_kept(driftline, tmp_path):
    metric_file(tmp_path, "m", [0.5, "nan"])
    metric_file(tmp_path, "m", [0.5, 0.5], "diff_mean")
    said = driftline(
        "thresholds", "--models", "m", "--metrics", "ce", "diff_mean", "--file_base", tmp_path
    )
    assert said.code == 2
    assert "m ce nan\n" in said.out
    assert "1 of 2 values are NaN" in said.err
    assert "1 threshold is no number: ce of m" in said.err
    shown = json.loads((tmp_path / "m-thresholds.json").read_text())
    assert (shown["ce"], shown["diff_mean"]) == (None, 0.5)
    assert "NaN" not in (tmp_path / "m-thresholds.json").read_text()


def test_zero_kept_tokens_are_a_sentence_and_leave_no_file(driftline, tmp_path):
    metric_file(tmp_path, "m", [])
    said = driftline("thresholds", "--models", "m", "--metrics", "ce", "--file_base", tmp_path)
    assert said.code == 2
    assert "the ce files of the model 'm' hold no value" in said.err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--metrics", "ce", "--file_base", "."), "needs --models"),
        (("--models", "m", "--file_base", "."), "needs --metrics"),
        (("--models", "m", "--metrics", "ce"), "needs --file_base"),
        (("--models", "m", "--metrics", "ces", "--file_base", "."), "no metric 'ces'"),
        (("--models", "m", "--metrics", "abs_diff", "--file_base", "."), "metric of layers"),
        (("--models", "m", "--metrics", "ce", "--file_base", "."), "no metric files of the model"),
        (("--models", "m", "--metrics", "ce", "--file_base", "nowhere"), "nowhere is not there"),
        (("--models", "m" * 300, "--metrics", "ce", "--file_base", "."), "255 is the most"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(driftline, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    answer = driftline("thresholds", *words)
    assert answer.code == 2
    assert said in answer.err
    assert not answer.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_sentence_after_the_figures(driftline, tokens):
    tokens.chmod(0o555)
    said = driftline(
        "thresholds", "--models", "acme/tiny-v1", "--metrics", "ce", "--file_base", tokens
    )
    tokens.chmod(0o755)
    assert said.code == 2
    assert "cannot be written" in said.err
    assert "acme--tiny-v1 ce" in said.out


def test_an_output_that_cannot_be_is_a_sentence_after_the_figures(driftline, tokens):
    said = driftline(
        "thresholds", "--models", "acme/tiny-v1", "--metrics", "ce", "--file_base", tokens,
        "--output_path", "/proc/none",
    )  # fmt: skip
    assert said.code == 2
    assert "cannot be written" in said.err
    assert "acme--tiny-v1 ce" in said.out


@pytest.fixture
def tables(driftline, tmp_path, make_run):
    """Clean comparisons, one with more noise, and one with a fault."""
    ref = make_run("ref", steps=3)
    for name, options in {
        "clean": {"noise": 1e-6},
        "other": {"noise": 1e-5},
        "bad": {"noise": 1e-6, "fault_at": "model.layers.1.mlp.act"},
    }.items():
        make_run(f"run-{name}", steps=3, **options)
        driftline("compare", ref, tmp_path / f"run-{name}", "-o", tmp_path / name, "-q")
    return tmp_path


def test_calibrate_then_check_names_the_first_layer_beyond_its_limit(driftline, tables):
    said = driftline("calibrate", tables / "clean", "-o", tables / "t.json")
    assert said.code == 0, said.err
    assert (
        "12 limits of relative_l2 for 12 sites, p99 of 3 to 3 values each from 1 table" in said.out
    )
    said = driftline("check", tables / "clean", "--thresholds", tables / "t.json")
    assert said.code == 0
    assert "allowed by its threshold" in said.out
    said = driftline("check", tables / "bad", "--thresholds", tables / "t.json")
    assert said.code == 1
    assert "the drift starts at 'model.layers.1.mlp.act'" in said.out
    assert f"limits: the thresholds of {tables / 't.json'}" in said.out


def test_noise_that_a_format_would_excuse_is_beyond_what_clean_runs_show(driftline, tables):
    driftline("calibrate", tables / "clean", "-o", tables / "t.json")
    flat = ("--max", "relative_l2=1e-4")  # what the number format allows a tensor alone
    assert driftline("compare", tables / "ref", tables / "run-other", *flat, "-q").code == 0
    assert driftline("check", tables / "other", "--thresholds", tables / "t.json", "-q").code == 1
    words = ("compare", tables / "ref", tables / "run-other", "--thresholds", tables / "t.json")
    said = driftline(*words, "-o", tables / "judged")
    assert said.code == 1
    assert "'model.layers.0.norm'" in said.out.splitlines()[0]
    assert json.loads((tables / "judged" / "table.json").read_text())["limits"]["from"] == (
        "thresholds"
    )
    wide = ("check", tables / "judged", "--thresholds", tables / "t.json", "--slack", "40")
    assert driftline(*wide).code == 0


def test_check_takes_limits_instead_of_thresholds(driftline, tables):
    assert driftline("check", tables / "bad", "--max", "relative_l2=3").code == 0
    said = driftline("check", tables / "bad", "--min", "cosine=2", "--format", "json")
    assert said.code == 1
    assert json.loads(said.out)["first_site"] == "model.layers.0.norm"
    assert driftline("check", tables / "bad", "--max", "cosine=0.5").code == 2


def test_layer_files_are_checked_against_layer_thresholds(driftline, layers, tmp_path):
    driftline(
        "thresholds", "--models", "models/tiny-granite", "--metrics", "abs_diff",
        "--file_base", layers, "--layer_io", "-o", tmp_path,
    )  # fmt: skip
    known = tmp_path / "models--tiny-granite-thresholds.json"
    assert driftline("check", layers, "--thresholds", known).code == 0
    broken = next(layers.glob("*layers1.ff_ln.abs_diff.csv"))
    for later in (broken, next(layers.glob("*--model.head.abs_diff.csv"))):
        later.write_text("abs_diff\n9.0\n")
    said = driftline("check", layers, "--thresholds", known)
    assert said.code == 1
    assert "'model.base_model.layers1.ff_ln'" in said.out.splitlines()[0]
    broken.write_text("abs_diff\nnan\n")
    assert driftline("check", layers, "--thresholds", known, "-q").code == 1


def test_what_cannot_be_checked_is_a_sentence(driftline, tables, layers, tokens):
    driftline("calibrate", tables / "clean", "-o", tables / "t.json")
    other = tables / "other.json"
    other.write_text('{"model_id": "acme--large", "abs_diff": {"model.encoder.0": 1.0}}')
    whole = tables / "whole.json"
    whole.write_text('{"model_id": "acme--large", "ce": 1.0}')
    for words, sentence in {
        (layers,): "no limit is given",
        (tables / "clean", "--thresholds", tables / "none.json"): "cannot be read",
        (tables / "clean", "--thresholds", other): "seems to be for another model ('acme--large')",
        (tables / "clean", "--thresholds", whole): "for the model as a whole (ce)",
        (tables / "clean", "--thresholds", other, "--model", "acme/tiny"): "not for 'acme/tiny'",
        (tables / "none", "--thresholds", other): "there is no '",
        (other, "--thresholds", other): "is a file",
        (tokens, "--thresholds", other): "scores of tokens",
        (tables / "clean", "--thresholds", tables / "t.json", "--slack", "0"): "slack",
    }.items():
        said = driftline("check", *words)
        assert said.code == 2, words
        assert sentence in said.err
        assert not said.out
    for words, sentence in {
        (): "needs TABLE",
        (tables / "clean",): "needs -o",
        (tables / "clean", "-o", tables): "is a folder",
        (tables / "clean", "-o", other): "exists",
        (tables / "none", "-o", tables / "n.json"): "holds no table.json",
        (tables / "clean", "-o", "/proc/n.json"): "cannot be written",
        (tables / "clean", "-o", tables / "n.json", "--metric", "kl"): "no metric 'kl'",
    }.items():
        said = driftline("calibrate", *words)
        assert said.code == 2, words
        assert sentence in said.err


def test_a_table_that_did_not_pass_is_named_when_it_is_taken_for_clean(driftline, tables):
    said = driftline("calibrate", tables / "bad", "-o", tables / "t.json")
    assert said.code == 0
    assert "bad did not pass when it was compared" in said.err


def test_show_lists_the_limits_of_a_thresholds_file(driftline, tokens):
    words = ("thresholds", "--models", "acme/tiny-v1", "--metrics", "ce", "--file_base", tokens)
    assert driftline(*words).code == 0
    path = tokens / "acme--tiny-v1-thresholds.json"
    said = driftline("show", path)
    assert said.out.startswith("thresholds of acme--tiny-v1: ce 2.61128\n")
    assert "3 shapes, fp16" in said.out
    assert (
        driftline("show", path, "--format", "csv")
        .out.splitlines()[1]
        .startswith("ce,,,2.6112808652876995,lower,p99,400,")
    )
    assert json.loads(driftline("show", path, "--format", "json").out)["ce"] == 2.6112808652876995
    assert driftline("show", path, "--format", "markdown").code == 0
    (tokens / "other.json").write_text("{}")
    assert "no thresholds file" not in driftline("show", tokens / "other.json").err


def test_what_could_be_had_is_kept_when_another_metric_or_model_cannot(driftline, tmp_path):
    metric_file(tmp_path, "m", [0.5])
    metric_file(tmp_path, "m", ["oops"], "prob_std")
    said = driftline(
        "thresholds", "--models", "n", "m", "--metrics", "diff_mean", "prob_std", "ce",
        "--file_base", tmp_path,
    )  # fmt: skip
    assert said.code == 2
    assert "no files of diff_mean for the model 'm'" in said.err
    assert "line 2 is 'oops'" in said.err
    assert "no metric files of the model 'n'" in said.err
    assert json.loads((tmp_path / "m-thresholds.json").read_text())["ce"] == 0.5


def test_scores_over_the_whole_vocabulary_have_thresholds_too(driftline, tmp_path):
    from driftline.decoding.files import token_table as score_table

    pytest.importorskip("pyarrow")
    prefix = "acme--tiny_max-new-tokens-8_batch-size-1_seq-length-64_dtype-fp16"
    rng = np.random.default_rng(3)
    scores = {name: rng.random(40) for name in ("kl_rc", "kl_cr", "total_variation")}
    scores |= {"top1_agree": np.arange(40) != 7, "rank_of_reference": np.ones(40, np.int64)}
    rows = score_table.rows_of(0, 0, "c1", np.arange(40), scores, 40)
    score_table.write_part(tmp_path / f"{prefix}.tokens.parquet", [rows], {})
    metrics = ["kl_rc", "kl_cr", "total_variation", "top1_agree", "rank_of_reference"]
    words = ["thresholds", "--models", "acme/tiny", "--metrics", *metrics]
    said = driftline(*words, "--file_base", tmp_path)
    assert said.code == 0
    assert f"acme--tiny kl_rc {np.percentile(scores['kl_rc'], 99.0)}" in said.out
    assert "found 1 metric files" in said.out
    assert said.err.count("the p99 of 40 values depends on the worst 1 of them") == 1
    written = json.loads((tmp_path / "acme--tiny-thresholds.json").read_text())
    assert set(metrics) < set(written)
    assert written["top1_agree"] < 1.0


def test_a_table_without_the_score_gives_no_threshold(driftline, tmp_path):
    from driftline.decoding.files import token_table as score_table

    pytest.importorskip("pyarrow")
    prefix = "acme--tiny_max-new-tokens-8_batch-size-1_seq-length-64_dtype-fp16"
    rows = score_table.rows_of(0, 0, "c1", np.arange(4), {"ce": np.ones(4)}, 4)
    score_table.write_part(tmp_path / f"{prefix}.tokens.parquet", [rows], {})
    words = ["thresholds", "--models", "acme/tiny", "--metrics", "kl_rc", "--file_base"]
    said = driftline(*words, tmp_path)
    assert said.code == 2
    assert "4 of 4 values are NaN" in said.err


def test_hashed_names_among_good_ones_are_said(driftline, tmp_path):
    good = "acme--tiny_max-new-tokens-8_batch-size-1_seq-length-64_dtype-fp16.ce.csv"
    (tmp_path / good).write_text("ce\n" + "1.0\n" * 1000)
    for end in ("ce", "diff_mean"):
        (tmp_path / f"{'ab' * 32}_0.9.0.{end}.csv").write_text(f"{end}\n9.0\n")
    words = ["thresholds", "--models", "acme/tiny", "--metrics", "ce", "--file_base"]
    said = driftline(*words, tmp_path)
    assert said.code == 0
    assert "2 files have hashed names" in said.err
    assert "depends on" not in said.err, "1000 values are enough"
