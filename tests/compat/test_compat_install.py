"""`driftline compat install DIR`: the documents' own command lines run in that folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.cli.main import main
from driftline.decoding.files.names import hashed_prefixes
from support import aiu

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "aiu"
FIXTURES = DATA / "fixtures"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert main(["compat", "install", str(tmp_path / "utils")]) == 0
    monkeypatch.chdir(tmp_path / "utils")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SHARE_GPT_DATASET_PATH", str(FIXTURES / "share_gpt_tiny.json"))
    return tmp_path / "utils"


def run(*words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *words], capture_output=True, text=True)


def test_the_files_are_where_the_documents_start_them(desk: Path) -> None:
    for name in (
        *("generate_metrics.py", "scripts/generate_metrics.py", "hook_result_checker.py"),
        *("scripts/generate_layers_metrics.py", "generate_layers_metrics.py"),
        *("tests/resources/get_thresholds.py", "get_thresholds.py"),
        *("tests/models/test_decoders.py", "tests/models/test_model_expectations.py"),
    ):
        assert (desk / name).is_file()
    assert main(["compat", "install", "."]) == 0, "the same files once more"
    (desk / "generate_metrics.py").write_text("mine")
    assert main(["compat", "install", "."]) == 2
    assert (desk / "generate_metrics.py").read_text() == "mine"
    assert main(["compat", "install", ".", "--force"]) == 0


def test_thresholds_and_the_hook_checker_answer_under_their_names(desk: Path) -> None:
    source = DATA / "get_thresholds" / "model_level_input"
    done = run(
        *("tests/resources/get_thresholds.py", "--models", "acme/tiny-v1"),
        *("--metrics", "diff_mean", "ce", "--file_base", str(shutil.copytree(source, "files"))),
    )
    assert done.returncode == 0, done.stderr
    assert "acme--tiny-v1 ce" in done.stdout
    done = run("hook_result_checker.py", "--pathA", "a", "--pathB", "b")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_the_layers_script_gives_the_documented_names(desk: Path, warm_llama: str) -> None:
    pytest.importorskip("fms", reason="ibm-fms is not installed")
    shutil.copytree(FIXTURES / "tiny-granite", desk / "granite")
    os.environ.update(MODEL_PATHS="granite", BATCH_SIZES="1", SEQ_LENGTHS="24", MAX_NEW_TOKENS="2")
    os.environ["OUTPUT_PATH"] = "output"
    try:
        done = run("scripts/generate_layers_metrics.py", "--mode", "generate", python=warm_llama)
    finally:
        for name in ("MODEL_PATHS", "BATCH_SIZES", "SEQ_LENGTHS", "MAX_NEW_TOKENS", "OUTPUT_PATH"):
            os.environ.pop(name, None)
    assert done.returncode == 0, done.stderr
    names = {path.name.partition("--")[2] for path in (desk / "output").glob("*.csv")}
    assert {"model.base_model.layers1.ln.abs_diff.csv", "model.head.cos_sim.csv"} <= names
    assert "reference: cpu in fp32" in done.stdout.splitlines()[0]


OURS = (
    *("--batch-sizes", "1", "--seq-lengths", "16", "--max-new-tokens", "8"),
    *("--cumulative-test-tokens-per-sequence", "8"),
)
"""The shapes of the next test, as options of `driftline validate`."""


def test_outputs_under_hashed_names_are_found(
    desk: Path,
    warm_llama: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As newer versions of the documented suite save them; by the suite and by `validate`."""
    model = str(FIXTURES / "tiny-llama")
    words = {
        "COMMON_MODEL_PATHS": model,
        "COMMON_BATCH_SIZES": "1",
        "COMMON_SEQ_LENGTHS": "16",
        "COMMON_MAX_NEW_TOKENS": "8",
        "USE_MICRO_MODELS": "0",
        "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "8",
        "VALIDATION_INFO_DIR": "saved",
        "SAVE_VALIDATION_INFO_OUTPUTS": "1",
    }
    for name, value in words.items():
        monkeypatch.setenv(f"FMS_TEST_SHAPES_{name}", value)
    command = ("-m", "pytest", "tests/models/test_decoders.py", "-s", "-p", "no:cacheprovider")
    done = run(*command, python=warm_llama)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "driftline: reference: cpu in fp32, not compiled; candidate: cpu in fp16" in done.stdout
    (plain,) = (desk / "saved").glob("*.cpu_validation_info.0.out")
    digest = hashed_prefixes(model, 8, 1, 16)[0]
    plain.rename(desk / "saved" / f"{digest}_0.4.2.cpu_validation_info.0.out")
    monkeypatch.delenv("FMS_TEST_SHAPES_SAVE_VALIDATION_INFO_OUTPUTS")
    done = run(*command, python=warm_llama)
    assert done.returncode == 0, done.stdout + done.stderr
    found = "cpu validation info found for seed=0 -- loading it"
    assert found in done.stdout
    assert main(["validate", *OURS, "--model-paths", model, "--validation-info-dir", "saved"]) == 0
    assert found in capsys.readouterr().out


def test_the_digest_is_that_of_the_documented_text() -> None:
    import hashlib

    text = (
        "attn-type-sdpa_batch-size-4_dtype-fp16_max-new-tokens-128"
        "_model-id-ibm-granite--granite-3.3-8b-instruct_seq-length-64"
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest in hashed_prefixes("ibm-granite/granite-3.3-8b-instruct", 128, 4, 64)


def test_doctor_walks_through_the_hardware_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATB_HOME_PATH", raising=False)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert main(["doctor", "--ascend"]) == 2
    out = capsys.readouterr().out
    assert "ok      toolkit" in out and "FAILED  ATB library: ATB_HOME_PATH is not set" in out
    assert "next: source the ATB library's set_env.sh" in out and "-       torchair" in out
    report = json.loads(Path("driftline_ascend_report.json").read_text())
    assert [step["fine"] for step in report["steps"]] == [True, False, None, None, None]
    assert report["steps"][0]["text"] == f"…/{tmp_path.name}", "the report names no folder of mine"
    assert main(["doctor", "--aiu", "-o", "mine.json"]) == 2
    assert "needs the package torch_sendnn" in capsys.readouterr().out
    with aiu.installed(tmp_path / "packages"):
        code = main(["doctor", "--aiu"])
        out = capsys.readouterr().out
    assert "ok      a first graph: a linear layer was compiled and agrees" in out
    assert code == 0 or "ibm-fms" in out
    with aiu.installed(tmp_path / "packages", linear=1.5):
        assert main(["doctor", "--aiu"]) == 2
    assert "a linear layer on the AIU is off by 0.5" in capsys.readouterr().out
