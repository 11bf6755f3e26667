"""The suite of decoders as pytest shows it: ids, skips, assertion texts, properties."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import torch

from driftline.decoding.models.loading import ModelSource, load_model
from driftline.decoding.models.targets import Target
from support import aiu

pytest_plugins = ("pytester",)

FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
PLUGIN = ("-p", "driftline.testing.expectations.pytest_plugin")
SUITE = (*PLUGIN, "-p", "no:cacheprovider", "--pyargs", "driftline.suites.test_decoders", "-vv")
WORDS = {
    "COMMON_MODEL_PATHS": "acme/tiny-llama",
    "COMMON_BATCH_SIZES": "1",
    "COMMON_SEQ_LENGTHS": "32",
    "COMMON_MAX_NEW_TOKENS": "8",
    "USE_MICRO_MODELS": "0",
    "CANDIDATE": "device=cpu,dtype=fp16",
    "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "8",
}


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """pytester forgets what a run imports; transformers and the compiler must not load twice."""
    importlib.import_module("torch._dynamo.repro.after_dynamo")
    torch.set_num_threads(1)
    load_model(ModelSource(str(FIXTURES / "tiny-llama")), Target())


@pytest.fixture
def desk(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("SHARE_GPT_DATASET_PATH", str(FIXTURES / "share_gpt_tiny.json"))
    shutil.copytree(FIXTURES / "tiny-llama", pytester.path / "acme" / "tiny-llama")
    return pytester


def say(monkeypatch: pytest.MonkeyPatch, prefix: str = "FMS", **words: str) -> None:
    for name, value in (WORDS | words).items():
        monkeypatch.setenv(f"{prefix}_TEST_SHAPES_{name}", value)


def test_no_model_named_is_a_skip_with_a_sentence(desk, monkeypatch):
    result = desk.runpytest_inprocess(*SUITE, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no model is named: set FMS_TEST_SHAPES_COMMON_MODEL_PATHS*"])


def test_a_model_passes_under_its_documented_id(desk, monkeypatch):
    say(monkeypatch)
    result = desk.runpytest_inprocess(*SUITE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "driftline: reference: cpu in fp32, not compiled; candidate: cpu in fp16, not compiled "
            "(no AIU is involved)",
            "*::test_common_shapes[[]acme/tiny-llama-1-32-8[]] *PASSED*",
        ]
    )


def test_the_device_is_used_where_it_is_and_refused_where_it_is_not(desk, monkeypatch):
    say(monkeypatch, CANDIDATE="")
    with aiu.installed(desk.path / "packages"):
        result = desk.runpytest_inprocess(*SUITE)
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["driftline: *candidate: aiu in fp16, compiled by sendnn"])
    say(monkeypatch, CANDIDATE="device=aiu")
    result = desk.runpytest_inprocess(*SUITE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*device=aiu needs the package torch_sendnn*"])


def test_a_failure_on_the_device_is_not_hidden_by_the_compilers_trace(desk, monkeypatch):
    say(monkeypatch, CANDIDATE="", FORCE_VALIDATION_LEVEL_1="1")
    with aiu.installed(desk.path / "packages", linear=1.5):
        result = desk.runpytest_inprocess(*SUITE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*failure rate for mean diff was too high*", "*AIU warmup*"])
    result.stdout.no_fnmatch_line("*torch.__trace*")


def test_a_failure_reads_as_documented_and_says_where(desk, monkeypatch):
    say(
        monkeypatch,
        prefix="DRIFTLINE",
        FORCE_VALIDATION_LEVEL_1="1",
        METRICS_THRESHOLD="9,0.0000001",
        EXPLAIN="1",
    )
    say(monkeypatch, METRICS_THRESHOLD="9,9")  # the other spelling wins
    result = desk.runpytest_inprocess(*SUITE, "--junitxml=report.xml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "[[] 0/ 1[]]: testing model=acme/tiny-llama, batch_size=1, seq_length=32, "
            "max_new_tokens=8, micro_model=False",
            "[[] 0/ 1[]]: passed validation level 0, testing validation level 1",
            "[[] 0/ 1[]]: mean diff failure rate: 1.0",
            "[[] 0/ 1[]]: cross entropy loss failure rate: 0.0",
            "first failing token: iter=0, prompt 0 (c34), token 0*",
            "layers, on the text before that token: *",
            "FAILED *::test_common_shapes[[]acme/tiny-llama-1-32-8[]] - AssertionError: failure "
            "rate for mean diff was too high: 1.0",
            "assert 1.0 < 0.01",
        ]
    )
    report = (desk.path / "report.xml").read_text()
    assert 'name="mean_diff_failure_rate" value="1.0"' in report
    assert 'name="cross_entropy_loss_failure_rate" value="0.0"' in report


def test_a_word_that_means_nothing_ends_the_run_with_a_sentence(desk, monkeypatch):
    say(monkeypatch, SKIP_ASSERTIONS="cee")
    result = desk.runpytest_inprocess(*SUITE)
    assert result.ret != 0
    assert "takes ce and mean_diff, not 'cee'" in result.stdout.str() + result.stderr.str()


def test_a_missing_model_fails_with_a_sentence_and_no_traceback(desk, monkeypatch):
    say(monkeypatch, COMMON_MODEL_PATHS="./nowhere")
    result = desk.runpytest_inprocess(*SUITE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["there is no model folder*"])
    assert "Traceback" not in result.stdout.str()


def test_a_test_file_of_ones_own_may_hold_the_suite(desk, monkeypatch):
    say(monkeypatch)
    folder = desk.path / "tests" / "models"
    folder.mkdir(parents=True)
    (folder / "test_decoders.py").write_text("from driftline.suites.test_decoders import *\n")
    result = desk.runpytest_inprocess("-p", "no:cacheprovider", "tests/models/test_decoders.py")
    result.assert_outcomes(passed=1)
