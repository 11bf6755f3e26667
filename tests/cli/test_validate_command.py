"""`driftline validate` as a person meets it."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
PROMPTS = FIXTURES / "share_gpt_tiny.json"
SHAPE = (
    "--batch_sizes=2", "--seq_lengths=32", "--max_new_tokens=8",
    "--cumulative_test_tokens_per_sequence=8", "--candidate=device=cpu,dtype=fp16",
    f"--sharegpt_path={PROMPTS}",
)  # fmt: skip
MODEL = f"--model_paths={FIXTURES / 'tiny-llama'}"


def test_equal_tokens_are_exit_code_0(driftline):
    said = driftline("validate", MODEL, *SHAPE)
    assert said.code == 0, said.err
    assert "passed validation level 0" in said.out
    assert f"PASSED {FIXTURES / 'tiny-llama'}-2-32-8 in " in said.out


def test_too_many_failing_tokens_are_exit_code_1_and_explained(driftline):
    said = driftline(
        "validate", MODEL, *SHAPE, "--force-validation-level-1", "--metrics_threshold=9,0.0000001",
        "--explain",
    )  # fmt: skip
    assert said.code == 1, said.err
    assert "FAILED" in said.out
    assert "failure rate for mean diff was too high: 1.0" in said.out
    assert "2 of 2 prompts have failing tokens" in said.out
    assert "reference's likeliest" in said.out
    assert "37 tensors compared" in said.out


def test_ci_gets_one_error_for_the_first_model_that_fails(driftline, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    strict = ("--force-validation-level-1", "--metrics_threshold=9,0.0000001")
    said = driftline("validate", MODEL, *SHAPE, *strict, "--format", "github")
    assert said.code == 1, said.err
    error, notice = said.out.splitlines()
    assert error.startswith("::error title=driftline validate%3A ") and "too high" in error
    assert notice == "::notice title=driftline validate::1 of 1 model and shape fail"
    assert "FAILED" in said.err and "| fail |" in (tmp_path / "summary.md").read_text()
    passed = driftline("validate", MODEL, *SHAPE, "--format", "junit")
    assert passed.code == 0
    (suite,) = ElementTree.fromstring(passed.out)
    assert suite.get("tests") == "2" and suite.get("failures") == "0"


def test_a_threshold_of_another_model_is_exit_code_2(driftline, tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"model_id": "acme--other", "ce": 2.5, "diff_mean": 0.1}')
    said = driftline("validate", MODEL, *SHAPE, f"--thresholds={path}")
    assert said.code == 2
    assert "is for the model 'acme--other'" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model is named"),
        (("--model_paths=/nowhere/m",), "there is no model folder /nowhere/m"),
        ((MODEL, "--sharegpt_path=/nowhere.json"), "there is no prompt file /nowhere.json"),
        ((MODEL, "--tokenizer=/nowhere"), "there is no tokenizer folder /nowhere"),
        ((MODEL, "--candidate=device=cuda,dtype=fp16"), "sees no CUDA device here"),
        ((MODEL, "--candidate=device=aiu"), "needs the package torch_sendnn"),
        ((MODEL, "--candidate=dtype=fp7"), "'fp7' is no number format"),
        ((MODEL, "--batch_sizes=none"), "takes whole numbers from 1"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_2(driftline, words, message):
    if "cuda" in "".join(words):
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    named = {word.partition("=")[0] for word in words}
    shape = [word for word in SHAPE if word.partition("=")[0] not in named]
    said = driftline("validate", *shape, *words)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_told_first(driftline, tmp_path):
    tmp_path.chmod(0o500)
    said = driftline(
        "validate", MODEL, *SHAPE, f"--validation_info_dir={tmp_path / 'x'}",
        "--save_validation_info_outputs",
    )  # fmt: skip
    tmp_path.chmod(0o700)
    assert said.code == 2
    assert "cannot be written" in said.err


def test_a_file_in_place_of_the_folder_is_told_first(driftline, tmp_path):
    (tmp_path / "x").write_text("")
    said = driftline(
        "validate", MODEL, *SHAPE, f"--validation_info_dir={tmp_path / 'x'}",
        "--save_validation_info_outputs",
    )  # fmt: skip
    assert said.code == 2
    assert "cannot be written" in said.err
