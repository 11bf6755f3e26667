"""Decoder commands on a stand-in for the AIU: every part reaches its backend, or is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import aiu

FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
PROMPTS = FIXTURES / "share_gpt_tiny.json"
TABLE = "out/tiny_max-new-tokens-2_batch-size-1_seq-length-24_dtype-float16.layers"

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FIXTURES / "tiny-llama", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


@pytest.fixture
def device(place: Path) -> Iterator[None]:
    with aiu.installed(place / "packages"):
        yield


@pytest.fixture
def layers(driftline: Command) -> Command:
    def call(*words: object, mode: str = "model-forward") -> Any:
        return driftline(
            *("layer-metrics", "--mode", mode, "--model_paths", "tiny", "--seq_lengths", 24),
            *("--sharegpt_path", PROMPTS, "--max_new_tokens", 2, "--output_path", "out"),
            *("--candidate", "device=aiu", *words),
        )

    return call


@pytest.fixture
def validated(driftline: Command) -> Command:
    def call(*words: object, tokens: int = 4) -> Any:
        return driftline(
            *("validate", "--model_paths", "tiny", "--sharegpt_path", PROMPTS),
            *("--batch_sizes", 1, "--seq_lengths", 24, "--max_new_tokens", tokens),
            *("--cumulative_test_tokens_per_sequence", tokens, *words),
        )

    return call


@pytest.mark.parametrize(("unit", "parts"), [("leaf", 24), ("block", 6)])
def test_every_part_reaches_the_backend_and_agrees(
    layers: Command, driftline: Command, device: None, unit: str, parts: int
) -> None:
    said = layers("--compile_unit", unit)
    assert said.code == 0, said.err
    first = said.out.splitlines()[0]
    assert first == (
        "reference: cpu in fp32, not compiled; candidate: aiu in fp16, compiled by sendnn"
    )
    assert f"of {parts} of {parts} parts" in said.out
    facts = json.loads(Path(f"{TABLE}.json").read_text())
    assert facts["graphs"]["candidate"]["graphs"] >= parts
    assert driftline("check", TABLE, "--max", "relative_l2=0.05").code == 0


@pytest.mark.parametrize(
    ("fault", "site", "unit"),
    [
        ({"linear": 1.5}, "lm_head", "leaf"),
        ({"embedding": 1.5}, "model.embed_tokens", "block"),
        pytest.param({"linear": 1.5}, "lm_head", "block", marks=pytest.mark.slow),
        pytest.param({"embedding": 1.5}, "model.embed_tokens", "leaf", marks=pytest.mark.slow),
    ],
)
def test_a_backend_that_computes_wrongly_is_found_in_its_layer(
    layers: Command, driftline: Command, place: Path, unit: str, fault: dict[str, float], site: str
) -> None:
    with aiu.installed(place / "packages", **fault):
        said = layers("--compile_unit", unit)
    assert said.code == 0, said.err
    checked = driftline("check", TABLE, "--max", "relative_l2=0.05")
    assert checked.code == 1
    rows = json.loads(driftline("show", TABLE, "--format", "json").out)
    statuses = {row["site"]: row["status"] for row in rows["rows"]}
    assert statuses[site] == "fail"


def test_a_part_that_never_reaches_the_backend_is_refused(
    layers: Command, driftline: Command, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(LlamaRMSNorm, "forward", torch.compiler.disable(LlamaRMSNorm.forward))
    said = layers("--compile_unit", "leaf", mode="generate")
    assert said.code == 2
    assert "INCOMPLETE: 5 parts never reached the backend" in said.out
    assert "19 of 24 parts" in said.out
    assert not list(Path("out").glob("*model.norm*"))
    checked = driftline("check", TABLE, "--max", "relative_l2=0.05")
    assert checked.code == 2
    assert "not run by the backend of the candidate" in checked.out


def test_a_backend_that_is_switched_off_is_no_pass(validated: Command, device: None) -> None:
    with torch._dynamo.config.patch(disable=True):
        said = validated()
    assert said.code == 2
    assert "reached the backend sendnn" in said.err
    assert "PASSED" not in said.out


def test_validate_takes_the_device_and_says_so(validated: Command, device: None) -> None:
    said = validated()
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0].endswith("candidate: aiu in fp16, compiled by sendnn")
    assert "[ 0/ 1]: AIU warmup" in lines
    assert any("sendnn compiled" in line for line in lines)


def test_without_the_device_nothing_is_called_one(validated: Command) -> None:
    said = validated()
    assert said.code == 0, said.err
    assert said.out.splitlines()[0].endswith(
        "reference: cpu in fp32, not compiled; candidate: cpu in fp16, not compiled "
        "(no AIU is involved)"
    )
    assert "AIU warmup" not in said.out and "aiu validation" not in said.out
    refused = validated("--candidate", "device=aiu")
    assert refused.code == 2
    assert "needs the package torch_sendnn" in refused.err


def test_explain_says_what_reached_the_backend(
    validated: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = place / "tiny" / "config.json"
    text = config.read_text()  # each layer is compiled, so there is one
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    forward = LlamaRMSNorm.forward
    with aiu.installed(place / "packages", linear=1.5):
        said = validated("--explain", "--metrics_threshold", "0.1,0.00001", tokens=1)
        assert said.code == 1
        assert "compiled block by block" in said.out and "of 5 of 5 parts" in said.out
        monkeypatch.setattr(LlamaRMSNorm, "forward", torch.compiler.disable(forward))
        said = validated("--explain", "--metrics_threshold", "0.1,0.00001", tokens=1)
    assert "nothing is concluded from them" in said.out


@pytest.mark.parametrize(
    ("model", "words", "parts", "site"),
    [
        ("tiny-llama", ["--library", "transformers"], 24, "model.layers.0.self_attn.q_proj"),
        ("tiny-granite", [], 23, "base_model.layers.0.attn.in_proj.query"),
    ],
)
def test_the_seeds_own_command_on_the_device(
    place: Path, model: str, words: list[str], parts: int, site: str, warm_llama: str
) -> None:
    """`generate_layers_metrics.py` with its variables; the device by an option of ours.

    By itself it loads models through ibm-fms.
    """
    if not words:
        pytest.importorskip("fms", reason="ibm-fms is not installed")
    script = Path(sys.executable).parent / "generate_layers_metrics.py"
    packages = aiu.write_package(place / "packages", linear=1.5)
    env = os.environ | {
        "MODEL_PATHS": str(FIXTURES / model),
        "BATCH_SIZES": "1",
        "SEQ_LENGTHS": "24",
        "MAX_NEW_TOKENS": "2",
        "OUTPUT_PATH": "out",
        "SHARE_GPT_DATASET_PATH": str(PROMPTS),
        "PYTHONPATH": str(packages),
        "OMP_NUM_THREADS": "1",
    }
    command = [warm_llama, str(script), "--mode", "model-forward", *words]
    command += ["--candidate", "device=aiu", "--compile_unit", "leaf"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{parts} of {parts} parts" in done.stdout
    assert f"the drift starts at '{site}'" in done.stdout
