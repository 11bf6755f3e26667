"""Six small architectures with random weights, and inputs for them.

Weights are drawn so that nothing is degenerate: activations of order one, attention that is not
uniform, norms and biases that do something. A fault in an idle part proves nothing.
"""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportCallIssue=false
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

# Few tokens, for the same reason: the logits are the widest tensor.
VOCABULARY = 160
# Narrow models: a trial runs both sides and several noise runs on a CPU.
_WIDTH, _HEADS, _INNER = 64, 4, 96
_STREAM = 0.3
"""Size of the residual stream where every block begins with a norm. The norms take it away again,
but for their epsilon: with a stream of order one an epsilon of 1e-4 would be no fault at all."""


class Specimen(NamedTuple):
    """A model in float32, and what to call it with."""

    model: nn.Module
    inputs: dict[str, Any]


def _llama(layers: int, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=_WIDTH,
            intermediate_size=_INNER,
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            rms_norm_eps=1e-6,
            max_position_embeddings=max(2048, length),
            use_cache=False,
            attn_implementation="eager",
        )
    )


def _gpt2(layers: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=_WIDTH,
            n_layer=layers,
            n_head=_HEADS,
            n_inner=_INNER,
            vocab_size=VOCABULARY,
            n_positions=max(1024, length),
            use_cache=False,
            attn_implementation="eager",
        )
    )


def _bert(layers: int, length: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=_WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
            intermediate_size=_INNER,
            vocab_size=VOCABULARY,
            max_position_embeddings=max(1024, length),
            attn_implementation="eager",
        )
    )


def _t5(layers: int, length: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=_WIDTH,
            d_kv=_WIDTH // _HEADS,
            d_ff=_INNER,
            num_layers=max(1, layers // 2),
            num_decoder_layers=max(1, layers // 2),
            num_heads=_HEADS,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            use_cache=False,
            attn_implementation="eager",
        )
    )


def _mixtral(layers: int, length: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=_WIDTH,
            intermediate_size=_INNER,
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            num_local_experts=4,
            rms_norm_eps=1e-6,
            max_position_embeddings=max(2048, length),
            use_cache=False,
            attn_implementation="eager",
        )
    )


def _vit(layers: int, length: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=_WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
            intermediate_size=_INNER,
            image_size=48,
            patch_size=8,
            num_labels=11,
            attn_implementation="eager",
        )
    )


_BUILDERS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "mixtral": _mixtral,
    "vit": _vit,
}
ARCHITECTURES = tuple(_BUILDERS)
"""Names that `specimen` takes."""


def _liven(model: nn.Module, generator: torch.Generator, stream: float) -> None:
    """Weights of order 1/sqrt(fan in), larger queries and keys, norms and biases that matter."""
    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[0] if _stored_transposed(model, name) else parameter.shape[-1]
        if parameter.dim() == 4:  # a convolution sums over everything but its first axis
            fan_in = parameter[0].numel()
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            size = stream if _joins_the_stream(name) else 1.0
            if name.endswith("bias"):
                parameter.copy_(0.1 * size * noise)
            # Norm weights near one, but not equal to it: a lost norm weight must show.
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif _is_embedding(model, name):
                parameter.copy_(0.2 * noise * (1.0 if "relative" in name else stream))
            else:
                parameter.copy_(noise * size * _gain(name) / math.sqrt(fan_in))


def _gain(name: str) -> float:
    # Larger queries and keys make attention choose; uniform attention hides its faults.
    if any(part in name for part in ("q_proj", "k_proj", "query", "key", "c_attn")):
        return 1.6
    # Inside a block the norm has set the scale already.
    if "patch" in name or not _joins_the_stream(name):
        return 1.0
    return 0.4  # so that the stream grows slowly


def _joins_the_stream(name: str) -> bool:
    parts = ("o_proj", "down_proj", "c_proj", "fc2", "output.dense", ".wo.", ".o.", "patch")
    return any(part in name for part in parts)


def _stored_transposed(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"


def _is_embedding(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)


def specimen(
    name: str, seed: int, *, layers: int = 4, batch: int = 4, length: int = 40
) -> Specimen:
    """A model of an architecture, and inputs; equal seeds give equal bits.

    Args:
        name: One of `ARCHITECTURES`.
        seed: Of weights and inputs.
        layers: Blocks in all (T5: half of them in the decoder).
        batch: Sequences or images.
        length: Tokens of each; images have 36 patches.
    """
    # Spread out, so that neighbouring seeds share no draws.
    generator = torch.Generator().manual_seed(7919 * seed + 13)
    model = _BUILDERS[name](layers, length).eval()
    _liven(model, generator, 1.0 if name == "bert" else _STREAM)
    if name == "vit":
        return Specimen(
            model, {"pixel_values": torch.randn((batch, 3, 48, 48), generator=generator)}
        )
    # Ids 0 to 2 are special tokens in some of these models.
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids}
    # Only these are called with a padding mask; decoders have their causal one.
    if name in ("bert", "t5"):
        mask = torch.ones_like(ids)
        mask[0, length - length // 4 :] = 0  # one sequence is shorter: pads have to be masked
        inputs["attention_mask"] = mask
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(
            3, VOCABULARY, (batch, length), generator=generator
        )
    return Specimen(model, inputs)
