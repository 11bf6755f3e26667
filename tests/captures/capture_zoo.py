"""Eight small architectures with random weights, and the ways to run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 64


class Convolutions(nn.Module):
    """Batch norm keeps running statistics: a second forward of the capture would move them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(pixels).mean((2, 3))))


class InPlaceAndShared(nn.Module):
    """One block used three times, tensors changed in place right after the hooks saw them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
        self.again = self.block
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, *, scale: float = 0.5) -> dict[str, Any]:
        h = self.block(x).clone()
        h.mul_(scale)
        h = self.again(h) + h
        seen = self.norm(h)
        seen = seen.clone().add_(1.0)
        return {"last": self.block(seen), "parts": (h, [seen, None])}


@dataclass(frozen=True)
class Specimen:
    """A model and how to feed it."""

    build: Callable[[], nn.Module]
    feed: Callable[[], dict[str, Any]]
    checkpointing: bool = False


def _tokens(*, labels: bool = True) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (2, 9))
    return {"input_ids": ids, "labels": ids.clone()} if labels else {"input_ids": ids}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        )
    )


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            num_local_experts=4,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=8,
            num_labels=5,
        )
    )


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}


ZOO: dict[str, Specimen] = {
    "llama": Specimen(_llama, _tokens, checkpointing=True),
    "gpt2": Specimen(_gpt2, _tokens, checkpointing=True),
    "bert": Specimen(_bert, _tokens, checkpointing=True),
    "t5": Specimen(t5, _tokens, checkpointing=True),
    "mixtral": Specimen(_mixtral, _tokens, checkpointing=True),
    "vit": Specimen(_vit, _pixels, checkpointing=True),
    "cnn": Specimen(Convolutions, lambda: {"pixels": torch.randn(2, 3, 12, 12)}),
    "inplace_shared": Specimen(InPlaceAndShared, lambda: {"x": torch.randn(3, 16)}),
}


def build(name: str, *, train: bool = False) -> nn.Module:
    torch.manual_seed(11)
    return ZOO[name].build().train(train)


def feed(name: str) -> dict[str, Any]:
    torch.manual_seed(12)
    return ZOO[name].feed()


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on everything a model returned."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensors: list[torch.Tensor] = []
    collect(output, tensors)
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            collect(item, found)
    elif isinstance(value, tuple | list):
        for item in value:
            collect(item, found)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
