"""The tiny decoders and prompts of the test data, and small ones made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.loading import ModelSource, load_model, load_tokenizer
from driftline.decoding.models.targets import Target

DATA = Path(__file__).parents[1] / "data" / "aiu"
LLAMA = DATA / "fixtures" / "tiny-llama"
GRANITE = DATA / "fixtures" / "tiny-granite"
PROMPTS = DATA / "fixtures" / "share_gpt_tiny.json"
GOLDEN = DATA / "generate_metrics"
PREFIX = "models--tiny-llama_max-new-tokens-8_batch-size-1_seq-length-{}_dtype-fp16"

FP32 = Target()
FP16 = Target("cpu", "fp16")


def tokenizer() -> Any:
    return load_tokenizer(str(LLAMA))


def llama(target: Target = FP32, **words: Any) -> DecoderModel:
    torch.set_num_threads(1)
    return load_model(ModelSource(str(LLAMA), **words), target)


def golden_logits(side: str, seed: int = 0) -> dict[str, torch.Tensor]:
    place = GOLDEN / f"{PREFIX.format(16)}.{side}_validation_info.{seed}.out" / "0.pt"
    return torch.load(place, weights_only=True)


def golden_metric(name: str, length: int) -> list[float]:
    lines = (GOLDEN / f"{PREFIX.format(length)}.{name}.csv").read_text().splitlines()
    assert lines[0] == name
    return [float(line) for line in lines[1:]]
