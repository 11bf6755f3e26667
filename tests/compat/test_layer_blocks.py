"""The document's blocks that make layer metrics: variables, command, and the names of the files.

Only models, folders and prompts are replaced; names, options and their order are its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).parent / "generate_layers_metrics.py"
FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"

EXPORTS = """
export MODEL_PATHS=ibm-granite/granite-3.2-8b-instruct
export BATCH_SIZES=1
export SEQ_LENGTHS=64
export MAX_NEW_TOKENS=128
export OUTPUT_PATH=output/granite
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model under the documented id, and the prompts at home."""
    assert SCRIPT.exists(), "driftline-compat is not installed: make install"
    shutil.copytree(FIXTURES / "tiny-granite", tmp_path / "ibm-granite" / "granite-3.2-8b-instruct")
    shutil.copy(FIXTURES / "share_gpt_tiny.json", tmp_path / "share_gpt.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(*lines: str) -> str:
    done = subprocess.run(["bash", "-ec", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_documented_command_writes_the_documented_files(place: Path, warm_llama: str) -> None:
    said = shell(EXPORTS, "mkdir output", f"{warm_llama} {SCRIPT} --mode generate")
    start = (
        "ibm-granite--granite-3.2-8b-instruct_max-new-tokens-128_batch-size-1_seq-length-64"
        "_dtype-float16--"
    )
    names = {path.name for path in (place / "output" / "granite").glob("*.csv")}
    for layer in ("model.base_model.layers1.ln", "model.base_model.layers1.attn.dense"):
        for metric in ("abs_diff", "cos_sim"):
            assert f"{start}{layer}.{metric}.csv" in names
    assert all(name.startswith(start) for name in names)
    assert "128 iterations (generate)" in said


def test_one_call_of_the_model_and_several_values(place: Path, warm_llama: str) -> None:
    shell(
        EXPORTS,
        "export BATCH_SIZES=1,2 SEQ_LENGTHS=32,64 MAX_NEW_TOKENS=2",
        f"{warm_llama} {SCRIPT} --mode model-forward",
    )
    for batch in (1, 2):
        for length in (32, 64):
            shape = f"*_batch-size-{batch}_seq-length-{length}_*model.head.abs_diff.csv"
            (file,) = (place / "output" / "granite").glob(shape)
            assert len(file.read_text().splitlines()) > batch * length // 2


def test_a_model_of_nan_fails_in_every_command_of_the_document(
    place: Path, warm_llama: str
) -> None:
    """The script, its thresholds, and `check` and `show` of what the script left."""
    import torch
    from safetensors.torch import load_file, save_file

    weights_file = place / "ibm-granite" / "granite-3.2-8b-instruct" / "model.safetensors"
    weights = {name: torch.full_like(w, torch.nan) for name, w in load_file(weights_file).items()}
    save_file(weights, weights_file, metadata={"format": "pt"})

    def said(*words: object) -> tuple[int, str]:
        exports = EXPORTS.replace("MAX_NEW_TOKENS=128", "MAX_NEW_TOKENS=2")
        line = " ".join(map(str, words))
        done = subprocess.run(["bash", "-c", exports + line], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        assert "PASS" not in done.stdout
        return done.returncode, done.stdout

    code, headline = said(warm_llama, SCRIPT, "--mode model-forward")
    assert code == 1
    assert "FAIL: " in headline
    assert "on one side" not in headline
    out = place / "output" / "granite"
    (table,) = out.glob("*.layers")
    driftline = SCRIPT.with_name("driftline")
    code, text = said(driftline, "check", table)
    assert (code, text.split(":")[0]) == (1, "FAIL")
    assert said(driftline, "show", table)[1].startswith("FAIL")
    code, _ = said(
        *(SCRIPT.with_name("get_thresholds.py"), "--models ibm-granite/granite-3.2-8b-instruct"),
        *("--metrics abs_diff cos_sim --layer_io --file_base", out),
    )
    assert code == 2
    assert not list(out.glob("*thresholds.json")), "not one of the thresholds is a number"
