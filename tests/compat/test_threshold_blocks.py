"""The documents' blocks that make thresholds: `get_thresholds.py`, per model and per layer.

Only folders and values are replaced; names, options and their order are the documents' own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).parent / "get_thresholds.py"
MISTRAL = "--tmp--aiu-fms-testing-utils--models--Mistral-7B-Instruct-v0.3"
GRANITE = "ibm-granite--granite-3.2-8b-instruct"


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert SCRIPT.exists(), "driftline-compat is not installed: make install"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def script(*words: str) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def values(path: Path, metric: str, numbers: list[float]) -> None:
    path.write_text("\n".join([metric, *map(repr, numbers)]) + "\n")


def test_the_thresholds_of_a_model_come_out_as_documented(output: Path) -> None:
    shapes = [(batch, length) for batch in (1, 8) for length in (64, 128, 2048)]
    names = [f"batch-size-{batch}_seq-length-{length}" for batch, length in shapes]
    for name in [*names, "batch-size-8_seq-length64"]:
        start = f"{MISTRAL}_max-new-tokens-128_{name}_dtype-fp16"
        values(output / f"{start}.diff_mean.csv", "diff_mean", [0.0007839603102183846] * 3)
        values(output / f"{start}.ce.csv", "ce", [2.8364005851745624] * 3)
    said = script(
        *("--models", "/tmp/aiu-fms-testing-utils/models/Mistral-7B-Instruct-v0.3"),
        *("--metrics", "diff_mean", "ce", "--file_base", "output"),
    )
    assert said == (
        "found 7 metric files\n"
        "--tmp--aiu-fms-testing-utils--models--Mistral-7B-Instruct-v0.3"
        " diff_mean 0.0007839603102183846\n"
        "found 7 metric files\n"
        "--tmp--aiu-fms-testing-utils--models--Mistral-7B-Instruct-v0.3 ce 2.8364005851745624\n"
    )
    assert json.loads((output / f"{MISTRAL}-thresholds.json").read_text())["ce"] == (
        2.8364005851745624
    )


def test_the_metric_of_each_layer_is_printed_as_documented(output: Path) -> None:
    start = f"{GRANITE}_max-new-tokens-128_batch-size-1_seq-length-0_dtype-float16"
    for layer, average in {
        "model.base_model.layers25.attn.in_proj.query": 2.079996666484281,
        "model.base_model.layers25.attn.in_proj.key": 1.2256532914682756,
        "model.base_model.layers26.ln": 0.04852477119171675,
    }.items():
        values(output / f"{start}--{layer}.abs_diff.csv", "abs_diff", [average, average])
        values(output / f"{start}--{layer}.cos_sim.csv", "cos_sim", [0.5, 1.0])
    said = script(
        *("--models", "ibm-granite/granite-3.2-8b-instruct", "--metrics", "abs_diff", "cos_sim"),
        *("--file_base", "output", "--layer_io"),
    )
    lines = [line for line in said.splitlines() if line.startswith("Layer")]
    assert lines[:3] == [
        "Layer model.base_model.layers25.attn.in_proj.query avg abs_diff = 2.079996666484281",
        "Layer model.base_model.layers25.attn.in_proj.key avg abs_diff = 1.2256532914682756",
        "Layer model.base_model.layers26.ln avg abs_diff = 0.04852477119171675",
    ]
    assert lines[3] == "Layer model.base_model.layers25.attn.in_proj.query avg cos_sim = 0.75"
    shown = json.loads((output / f"{GRANITE}-thresholds.json").read_text())
    assert shown["model_id"] == GRANITE
    assert shown["cos_sim"]["model.base_model.layers26.ln"] == 0.75
