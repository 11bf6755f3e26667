"""Decoders on a GPU: the same tokens, compiled or not, and a baseline as documented.

Skipped where there is no CUDA device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_decoders import GRANITE, LLAMA, PROMPTS, llama, tokenizer

from driftline.cli.main import main
from driftline.decoding.generation import generate
from driftline.decoding.models.paged_cache import FP8, OF_FMS
from driftline.decoding.models.targets import Target, default_targets, ready
from driftline.decoding.option_reader import validate_options
from driftline.decoding.prompts import PromptPool
from driftline.decoding.scoring import score
from driftline.errors import BadInput

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def test_cuda_is_the_candidate_where_nothing_is_said() -> None:
    assert default_targets("fp16")[1] == Target("cuda", "fp16")
    with pytest.raises(BadInput, match="cannot be used here"):
        ready(Target("cuda:77"))


@pytest.mark.parametrize("backend", ["", "inductor", "aot_eager"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_candidate_on_the_gpu_is_near_the_reference(dtype: str, backend: str) -> None:
    torch._dynamo.reset()
    drawn = PromptPool(PROMPTS, tokenizer()).sample(3, 32)
    reference = generate(llama(), drawn, 8, length=40)
    device = llama(Target("cuda", dtype, backend, bool(backend)))
    assert next(device.module.parameters()).is_cuda
    forced = generate(device, drawn, 8, length=40, forced=reference.tokens)
    assert forced.logits is not None
    assert reference.logits is not None
    assert forced.logits.device.type == "cpu"
    allowed = {"fp16": 0.003, "bf16": 0.03, "fp32": 1e-4}[dtype]
    for at in range(3):
        scores = score(reference.logits[at], forced.logits[at], reference.tokens[at, -8:])
        assert scores.total_variation.max() < allowed
        assert not scores.odd.any()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("attention", OF_FMS)
def test_attention_of_ibm_fms_is_on_the_gpu_what_it_is_on_the_cpu(attention, dtype) -> None:
    pytest.importorskip("fms")
    drawn = PromptPool(PROMPTS, tokenizer()).sample(3, 60)
    ours = llama(Target(attention=attention), library="fms")
    theirs = llama(Target("cuda", dtype, attention=attention), library="fms")
    reference = generate(ours, drawn, 9, length=60)
    forced = generate(theirs, drawn, 9, length=60, forced=reference.tokens)
    assert reference.logits is not None
    assert forced.logits is not None
    # A number on the border of two of fp8 falls either way, and then moves as much as fp8 does.
    allowed = {"fp32": 1e-4, "fp16": 0.003, "bf16": 0.03}[dtype]
    if attention in FP8:
        allowed = 0.03 if dtype == "fp32" else 0.12
    for at in range(3):
        scores = score(reference.logits[at], forced.logits[at], reference.tokens[at, -9:])
        assert scores.total_variation.max() < allowed, float(scores.total_variation.max())


@pytest.mark.parametrize("model", [LLAMA, GRANITE], ids=lambda path: path.name)
def test_a_baseline_is_made_on_the_gpu_by_default(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    code = main(
        [
            *("metrics", f"--model_path={model}", f"--sharegpt_path={PROMPTS}"),
            *("--batch_size=2", "--min_pad_length=32", "--max_new_tokens=8"),
            *("--num_test_tokens_per_sequence=16", f"--output_dir={tmp_path}", "--variant=a/b"),
        ]
    )
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "device=cuda,dtype=fp16" in said.out
    lines = next(tmp_path.glob("*.diff_mean.csv")).read_text().splitlines()
    assert len(lines) == 33
    assert max(map(float, lines[1:])) < 1e-3


@pytest.mark.parametrize("backend", ["", ",compile=inductor"])
def test_validate_passes_on_the_gpu_and_notices_a_changed_one(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    words = [
        *("validate", f"--model_paths={LLAMA}", f"--sharegpt_path={PROMPTS}"),
        *("--batch_sizes=2", "--seq_lengths=32", "--max_new_tokens=8"),
        *("--cumulative_test_tokens_per_sequence=16", "--force_validation_level_1", "--explain"),
        f"--candidate=device=cuda,dtype=fp16{backend}",
    ]
    code = main([*words, "--metrics_threshold=4.0,0.001"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "passed validation level 1" in said.out
    code = main([*words, "--metrics_threshold=4.0,1e-9"])
    said = capsys.readouterr()
    assert code == 1, said.err
    assert "first failing token" in said.out
    assert "layers, on the text before the first failing token" in said.out
    if backend:
        assert "without the compiler" in said.out


def test_the_gpu_is_validated_where_nothing_is_said() -> None:
    said = {"COMMON_MODEL_PATHS": str(LLAMA), "COMMON_BATCH_SIZES": "1", "SHAREGPT_PATH": "x"}
    asks = validate_options(lambda name: said.get(name, ""))
    assert {ask.candidate for ask in asks} == {Target("cuda", "fp16")}
