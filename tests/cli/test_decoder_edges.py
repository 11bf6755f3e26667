"""Decoder commands at their edges: no decoder, too many logits or tokens, tokens never said.

As `driftline metrics`, and as `python generate_metrics.py` after `driftline compat install`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline.cli.main import main
from support.commands import Said

FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
PROMPTS = FIXTURES / "share_gpt_tiny.json"
Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FIXTURES / "tiny-llama", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


@pytest.fixture(params=["ours", "theirs"])
def metrics(request: pytest.FixtureRequest, driftline: Command, warm_llama: str) -> Command:
    def script(*words: object) -> Said:
        assert main(["compat", "install", "."]) == 0
        line = [warm_llama, "generate_metrics.py", "--architecture=hf_pretrained", *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=110)
        assert "Traceback" not in done.stderr
        return Said(done.returncode, done.stdout, done.stderr)

    def call(*words: object, model: object = "tiny", out: str = "out", length: int = 16) -> Any:
        words = (
            *(f"--model_path={model}", "--tokenizer=tiny", f"--output_dir={out}"),
            *(f"--sharegpt_path={PROMPTS}", f"--min_pad_length={length}", "--max_new_tokens=2"),
            *words,
        )
        return driftline("metrics", *words) if request.param == "ours" else script(*words)

    return call


def figures(folder: str, metric: str) -> list[float]:
    (path,) = Path(folder).glob(f"*.{metric}.csv")
    return [float(line) for line in path.read_text().splitlines()[1:]]


def test_an_encoder_is_no_decoder(metrics: Command, driftline: Command) -> None:
    roberta = FIXTURES / "tiny-roberta-qa"
    said = metrics(model=roberta)
    assert said.code == 2
    assert "is no decoder: a RobertaForQuestionAnswering sees all of its input" in said.err
    assert "TestAIUModelsTupleOutput" in said.err
    said = driftline(
        *("layer-metrics", "--mode", "model-forward", "--model_paths", roberta, "--seq_lengths"),
        *(16, "--max_new_tokens", 2, "--sharegpt_path", PROMPTS, "--output_path", "layers"),
        *("--tokenizer", "tiny"),
    )
    assert said.code == 2 and "is no decoder" in said.err


@pytest.mark.parametrize("logits", ["full", "topk"])
def test_more_logits_than_there_are_tokens_are_all_of_them(metrics: Command, logits: str) -> None:
    assert metrics("--topk_per_token=384", "--logits", logits, out="all").code == 0
    said = metrics("--topk_per_token=1000", "--logits", logits, out="more")
    assert said.code == 0, said.err
    for metric in ("ce", "diff_mean", "prob_mean", "prob_std"):
        np.testing.assert_array_equal(figures("all", metric), figures("more", metric))


def test_a_text_beyond_the_positions_of_a_model_is_refused(metrics: Command, place: Path) -> None:
    config = place / "tiny" / "config.json"
    text = config.read_text()
    start = text.index('"max_position_embeddings"')
    end = text.index(",", start)
    config.write_text(text[:start] + '"max_position_embeddings": 17' + text[end:])
    said = metrics()
    assert said.code == 2
    assert "16 tokens of a prompt and 2 new ones are 18" in said.err
    assert "has 17 positions" in said.err


def test_compile_dynamic_says_where_it_changes_nothing(metrics: Command) -> None:
    said = metrics("--compile_dynamic")
    assert said.code == 0
    assert said.err.splitlines()[:2] == [
        "reference: cpu in fp32, not compiled; candidate: cpu in fp16, not compiled",
        "--compile_dynamic changes nothing: neither side is compiled",
    ]


@pytest.mark.parametrize("metrics", ["ours"], indirect=True)
def test_compile_dynamic_is_not_remarked_on_where_a_side_is_compiled(
    metrics: Command, place: Path
) -> None:
    config = place / "tiny" / "config.json"
    text = config.read_text()  # each layer is compiled, so there is one
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    torch._dynamo.reset()
    compiled = metrics(
        "--compile_dynamic",
        "--candidate",
        "device=cpu,dtype=fp16,compile=aot_eager",
        out="compiled",
    )
    assert compiled.code == 0, compiled.err
    assert "changes nothing" not in compiled.err


@pytest.fixture
def silent_token(place: Path) -> Path:
    """A model that never says two of its tokens: their logits are minus infinity."""
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    config = PhiConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=384,
        max_position_embeddings=64,
    )
    model = PhiForCausalLM(config)
    model.lm_head.bias.data[[5, 7]] = -torch.inf
    model.save_pretrained(place / "silent")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(place / "tiny" / name, place / "silent" / name)
    return place / "silent"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_minus_infinity_on_both_sides_is_equal(
    metrics: Command, driftline: Command, silent_token: Path, dtype: str
) -> None:
    said = metrics(f"--default_dtype={dtype}", model=silent_token)
    assert said.code == 0, said.err
    for metric in ("ce", "diff_mean", "prob_mean", "prob_std"):
        assert np.isfinite(figures("out", metric)).all()
    said = driftline(
        *("validate", "--model_paths", silent_token, "--sharegpt_path", PROMPTS, "--batch_sizes"),
        *(1, "--seq_lengths", 16, "--max_new_tokens", 2, "--force_validation_level_1"),
        *("--cumulative_test_tokens_per_sequence", 2, "--metrics_threshold", "9,0.5"),
        *("--candidate", f"device=cpu,dtype={dtype}"),
    )
    assert said.code == 0, said.err
    assert "PASSED" in said.out
