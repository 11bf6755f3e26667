"""Two executions on disk, made in this process: a model, and its copy in another number format."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import driftline

Fault = Callable[[nn.Module], None]


def decoder(
    name: str,
    layers: int,
    *,
    width: int = 128,
    seed: int = 0,
    gain: float = 0.0,
    sharpness: float = 2.0,
) -> Any:
    """A decoder of transformers, at its default weights or with a gain: a standard deviation of so
    much over the root of the fan-in, for queries and keys times the sharpness."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=256,
        use_cache=False,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if gain:
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear):
                sharper = sharpness if path.endswith(("q_proj", "k_proj")) else 1.0
                nn.init.normal_(module.weight, 0.0, sharper * gain / math.sqrt(module.in_features))
    return model


def runs_of(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fault: Fault | None = None,
    tokens: int = 32,
    levels: tuple[str, ...] = ("modules",),
) -> tuple[Path, Path]:
    """A run of the model in float32, and one of its copy in a format, with a fault or without."""
    ids = torch.randint(3, 256, (2, tokens), generator=torch.Generator().manual_seed(1))
    other = copy.deepcopy(model)
    if fault is not None:
        fault(other)
    for name, side in (("ref", model), ("cand", _lowered(other, dtype))):
        with torch.no_grad(), driftline.capture(side, folder / name, levels=levels):
            side(input_ids=ids)
    return folder / "ref", folder / "cand"


def _lowered(model: Any, dtype: torch.dtype) -> nn.Module:
    # Loaders keep rotary frequencies in float32; a plain `.to` makes a fault of its own.
    rotary = model.model.rotary_emb
    kept = rotary.inv_freq.clone()
    model.to(dtype)
    rotary.inv_freq = kept
    return model
