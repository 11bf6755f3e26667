"""Attention: grouping, windows, masks, the order of heads, and the factors around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.museum.networks import (
    Language,
    Mixer,
    Rotation,
    Variant,
    case,
    read_once,
    run_case,
    trained,
    words_of,
)


class Grouped(Mixer):
    tiled = False

    def spread(self, x: Tensor) -> Tensor:
        times = self.heads // self.groups
        return x.repeat(1, times, 1, 1) if self.tiled else super().spread(x)


@case(
    "https://github.com/onnx/onnx/pull/7274",
    "heads of keys and values are tiled instead of repeated next to each other",
    "stack.0.mixer",
    causes="permutation",
    formats="float32 bfloat16",
)
def tiled_groups(variant: Variant) -> None:
    Grouped.tiled = variant.bad
    read_once(trained(Language(Grouped, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


class Windowed(Mixer):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def bias(self, queries: int, keys: int) -> Tensor:
        near = torch.ones(queries, keys).triu(keys - queries - self.window + 1).bool()
        return super().bias(queries, keys).masked_fill(~near, -torch.inf)


@case(
    "https://github.com/huggingface/transformers/issues/39408",
    "the window of local attention holds one token too many",
    "stack.0.mixer",
    causes="mask",
    differences="window",
    formats="float32 bfloat16",
)
def window_one_too_wide(variant: Variant) -> None:
    window = 9 if variant.bad else 8
    model = Language(lambda: Windowed(window), rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 48))


class Cornered(Mixer):
    """Where queries are fewer than keys, the first query must still see all keys before it."""

    upper_left = False

    def bias(self, queries: int, keys: int) -> Tensor:
        if not self.upper_left:
            return super().bias(queries, keys)
        seen = torch.ones(queries, keys).tril().bool()
        return torch.zeros(queries, keys).masked_fill(~seen, -torch.inf)


@case(
    "https://github.com/pytorch/executorch/pull/21749",
    "the causal mask of a second chunk begins at the first key of the cache",
    "stack.0.mixer",
    causes="mask",
    dump=("--step", "*"),
)
def mask_of_a_second_chunk(variant: Variant) -> None:
    Cornered.upper_left = variant.bad
    model = trained(Language(Cornered, rotation=Rotation(12)), variant.dtype)
    words, past = words_of(2, 32), [[] for _ in range(3)]
    with torch.no_grad():
        model(words[:, :20], past)
        model(words[:, 20:], past, 20)


class Padded(nn.Module):
    """Two sentences of different length; the mask of pads is laid out per sentence and head."""

    tiled = False

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.MultiheadAttention(48, 4, batch_first=True)
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 12)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pads = torch.arange(x.shape[1])[None] >= lengths[:, None]
        pads = pads[:, None].expand(-1, x.shape[1], -1)
        pads = pads.repeat(4, 1, 1) if self.tiled else pads.repeat_interleave(4, 0)
        y, _ = self.mixer(x, x, x, attn_mask=pads, need_weights=False)
        return self.head(self.norm(x + y))


@case(
    "https://github.com/line/lighthouse/pull/77",
    "the mask of pads is tiled over heads, so that heads see the pads of another sentence",
    # The code that lays it out is the model's own; the attention computes rightly what it is given.
    "",
    causes="mask permutation",
)
def pads_of_another_sentence(variant: Variant) -> None:
    Padded.tiled = variant.bad
    x = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(5)).to(variant.dtype)
    read_once(trained(Padded(), variant.dtype), x, torch.tensor([20, 13, 7]))


class Fused(Mixer):
    """One matrix for queries, keys and values; a checkpoint may hold it head by head."""

    def __init__(self) -> None:
        super().__init__(groups=4)
        del self.query, self.key, self.value
        self.fused = nn.Linear(48, 144, bias=False)
        self.query = lambda x: self.fused(x)[..., :48]
        self.key = lambda x: self.fused(x)[..., 48:96]
        self.value = lambda x: self.fused(x)[..., 96:]


@case(
    "https://github.com/sgl-project/sglang/issues/40127",
    "a fused matrix that lies head by head is read as queries, keys, values",
    "stack.0.mixer.fused",
    causes="permutation",
    differences="fused.weight",
    formats="float32 bfloat16",
)
def fused_head_by_head(variant: Variant) -> None:
    model = trained(Language(Fused, rotation=Rotation(12)), variant.dtype)
    if variant.bad:
        with torch.no_grad():
            for layer in model.stack:
                weight = layer.mixer.fused.weight
                mixed = weight.view(3, 4, 12, 48).transpose(0, 1).reshape(144, 48).clone()
                weight.copy_(mixed)
    read_once(model, words_of(2, 32))


@case(
    "https://github.com/OpenNMT/CTranslate2/pull/1882",
    "what a layer adds is not multiplied by the share that its configuration names",
    "stack.0",
    causes="scale",
    differences="share",
    formats="float32 bfloat16",
)
def share_of_a_layer_ignored(variant: Variant) -> None:
    model = trained(Language(rotation=Rotation(12)), variant.dtype)
    if not variant.bad:
        for layer in model.stack:
            layer.share = 0.22
    read_once(model, words_of(2, 32))


class Divided(Language):
    divisor = 1.0

    def forward(self, words: Tensor, past: list | None = None, begin: int = 0) -> Tensor:
        return super().forward(words, past, begin) / self.divisor


@case(
    "https://github.com/vllm-project/vllm/pull/52158",
    "logits are not divided as the model's configuration asks for",
    "",
    causes="scale",
    differences="divisor",
)
def logits_not_divided(variant: Variant) -> None:
    model = trained(Divided(rotation=Rotation(12)), variant.dtype)
    model.divisor = 1.0 if variant.bad else 8.0
    read_once(model, words_of(2, 32))


if __name__ == "__main__":
    run_case()
