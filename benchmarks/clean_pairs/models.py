"""Small models of many architectures with random weights, and inputs for them.

Nothing is downloaded: every model is built from a configuration. Each builder takes a number of
layers and of tokens, and models whose depth is part of their definition ignore what does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.clean_pairs import environment
from driftline.testing.faults import Specimen

WIDTH, HEADS, INNER, WORDS = 96, 4, 192, 256
LONG = 4096
"""Tokens from which on both sides use fused attention: eager attention would need gigabytes."""


class Size(NamedTuple):
    """How large a model and its inputs are."""

    layers: int
    tokens: int
    batch: int


class Architecture(NamedTuple):
    """One architecture.

    Attributes:
        family: The package it comes from.
        build: Gives a model of a size; the weights are drawn from torch's generator.
        inputs: Gives what to call it with, as keywords; drawn from a generator.
        kind: decoder, encoder, seq2seq, images or other: which variants and faults make sense.
    """

    family: str
    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size, torch.Generator], dict[str, Any]]
    kind: str


# Text models of transformers: configuration, model, and their words for width, depth and heads.

_USUAL: Mapping[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": "layers",
    "num_attention_heads": HEADS,
    "vocab_size": WORDS,
    "max_position_embeddings": "positions",
}
_GROUPED: Mapping[str, Any] = {**_USUAL, "num_key_value_heads": 2}
_PLAIN_TOKENS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": WIDTH // HEADS}),
    "mistral": ("Mistral", _GROUPED),
    "gemma2": ("Gemma2", {**_GROUPED, "head_dim": WIDTH // HEADS, **_PLAIN_TOKENS}),
    "olmo2": ("Olmo2", {**_GROUPED, **_PLAIN_TOKENS}),
    "phi": ("Phi", _USUAL),
    "gpt_neox": ("GPTNeoX", _USUAL),
    "opt": (
        "OPT",
        {
            **{k: v for k, v in _USUAL.items() if k != "intermediate_size"},
            "ffn_dim": INNER,
            "word_embed_proj_dim": WIDTH,
            **_PLAIN_TOKENS,
        },
    ),
    "gpt2": (
        "GPT2LMHead",
        {
            "n_embd": WIDTH,
            "n_layer": "layers",
            "n_head": HEADS,
            "n_inner": INNER,
            "vocab_size": WORDS,
            "n_positions": "positions",
        },
    ),
    "bloom": (
        "Bloom",
        {"hidden_size": WIDTH, "n_layer": "layers", "n_head": HEADS, "vocab_size": WORDS},
    ),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": INNER // 2,
            "shared_expert_intermediate_size": INNER,
        },
    ),
    "mamba": (
        "Mamba",
        {"hidden_size": WIDTH, "num_hidden_layers": "layers", "vocab_size": WORDS, "state_size": 8},
    ),
}


def _options(options: Mapping[str, Any], size: Size) -> dict[str, Any]:
    named = {"layers": size.layers, "positions": max(512, size.tokens)}
    return {key: named.get(value, value) for key, value in options.items()}


def _attention(size: Size) -> str:
    return "sdpa" if size.tokens >= LONG else "eager"


def _decoder(stem: str, options: Mapping[str, Any]) -> Callable[[Size], nn.Module]:
    def build(size: Size) -> nn.Module:
        import transformers

        config_class = getattr(transformers, f"{stem.removesuffix('LMHead')}Config")
        ending = "Model" if stem.endswith("LMHead") else "ForCausalLM"
        model_class = getattr(transformers, f"{stem}{ending}")
        extra = {} if stem == "Mamba" else {"attn_implementation": _attention(size)}
        config = config_class(**_options(options, size), use_cache=False, **extra)
        return model_class(config)

    return build


def _ids(size: Size, generator: torch.Generator) -> torch.Tensor:
    # Ids 0 to 2 are special tokens in some of these models.
    return torch.randint(3, WORDS, (size.batch, size.tokens), generator=generator)


def _text(size: Size, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _ids(size, generator)}


def _masked_text(size: Size, generator: torch.Generator) -> dict[str, Any]:
    ids = _ids(size, generator)
    mask = torch.ones_like(ids)
    mask[0, size.tokens - size.tokens // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _two_texts(size: Size, generator: torch.Generator) -> dict[str, Any]:
    return _masked_text(size, generator) | {"decoder_input_ids": _ids(size, generator)}


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(**_options(_USUAL, size), attn_implementation=_attention(size))
    )


def _distilbert(size: Size) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        dim=WIDTH,
        hidden_dim=INNER,
        n_layers=size.layers,
        n_heads=HEADS,
        vocab_size=WORDS,
        max_position_embeddings=max(512, size.tokens),
        attn_implementation=_attention(size),
    )
    return DistilBertForMaskedLM(config)


def _t5(size: Size) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=INNER,
        num_layers=max(1, size.layers // 2),
        num_decoder_layers=max(1, size.layers // 2),
        num_heads=HEADS,
        vocab_size=WORDS,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    return T5ForConditionalGeneration(config)


def _bart(size: Size) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    half = max(1, size.layers // 2)
    config = BartConfig(
        d_model=WIDTH,
        encoder_layers=half,
        decoder_layers=half,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        vocab_size=WORDS,
        max_position_embeddings=max(512, size.tokens),
        use_cache=False,
        attn_implementation=_attention(size),
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **_PLAIN_TOKENS,
    )
    return BartForConditionalGeneration(config)


_FRAMES = 100


def _whisper(size: Size) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    half = max(1, size.layers // 2)
    config = WhisperConfig(
        d_model=WIDTH,
        encoder_layers=half,
        decoder_layers=half,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        vocab_size=WORDS,
        num_mel_bins=20,
        max_source_positions=_FRAMES // 2,
        max_target_positions=max(64, size.tokens),
        use_cache=False,
        attn_implementation="eager",
        decoder_start_token_id=1,
        **_PLAIN_TOKENS,
    )
    return WhisperForConditionalGeneration(config)


def _sound(size: Size, generator: torch.Generator) -> dict[str, Any]:
    features = torch.randn((size.batch, 20, _FRAMES), generator=generator)
    return {"input_features": features, "decoder_input_ids": _ids(size, generator)}


# Models of images.


def _vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=size.layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=48,
        patch_size=8,
        num_labels=11,
        attn_implementation="eager",
    )
    return ViTForImageClassification(config)


def _clip(size: Size) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
    }
    text = {**tower, "vocab_size": WORDS, "max_position_embeddings": 64, "eos_token_id": 2}
    vision = {**tower, "image_size": 48, "patch_size": 8}
    config = CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=32, attn_implementation="eager"
    )
    return CLIPModel(config)


def _text_and_images(size: Size, generator: torch.Generator) -> dict[str, Any]:
    ids = _ids(size._replace(tokens=16), generator)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn((size.batch, 3, 48, 48), generator=generator),
    }


def _pictures(name: str, side: int) -> Callable[[Size, torch.Generator], dict[str, Any]]:
    def inputs(size: Size, generator: torch.Generator) -> dict[str, Any]:
        return {name: torch.randn((size.batch, 3, side, side), generator=generator)}

    return inputs


def _torchvision(name: str, **options: Any) -> Callable[[Size], nn.Module]:
    def build(size: Size) -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=11, **options)

    return build


def _raft(size: Size) -> nn.Module:
    from torchvision.models.optical_flow import raft_small

    return raft_small(weights=None)


def _two_pictures(size: Size, generator: torch.Generator) -> dict[str, Any]:
    shape = (1, 3, 128, 128)
    first, second = (torch.rand(shape, generator=generator) * 2 - 1 for _ in range(2))
    return {"image1": first, "image2": second, "num_flow_updates": 2}


def _timm(name: str, **options: Any) -> Callable[[Size], nn.Module]:
    def build(size: Size) -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=11, **options)

    return build


# Models of diffusers.


def _unet(size: Size) -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _noised(size: Size, generator: torch.Generator) -> dict[str, Any]:
    picture = torch.randn((size.batch, 3, 16, 16), generator=generator)
    return {"sample": picture, "timestep": torch.tensor([7] * size.batch), "return_dict": False}


def _unet_with_text(size: Size) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=WIDTH,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def _noised_with_text(size: Size, generator: torch.Generator) -> dict[str, Any]:
    text = torch.randn((size.batch, 16, WIDTH), generator=generator)
    return _noised(size, generator) | {"encoder_hidden_states": text}


def _autoencoder(size: Size) -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=16,
    )


def _pictures_plain(size: Size, generator: torch.Generator) -> dict[str, Any]:
    picture = torch.randn((size.batch, 3, 16, 16), generator=generator)
    return {"sample": picture, "return_dict": False}


def _dit(size: Size) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        in_channels=3,
        out_channels=3,
        num_layers=size.layers,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=20,
        norm_num_groups=1,
    )


def _noised_with_class(size: Size, generator: torch.Generator) -> dict[str, Any]:
    fields = _noised(size, generator)
    fields["hidden_states"] = fields.pop("sample")
    return fields | {"class_labels": torch.tensor([3] * size.batch)}


# Models of our own: parts that the others have not, or have inside something larger.


class Perceptron(nn.Module):
    """Layers without residuals: nothing carries the input past them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.head(x)


class Recurrent(nn.Module):
    """An embedding, an LSTM of some layers, a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, layers, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(input_ids))
        return self.head(self.norm(hidden))


class Hourglass(nn.Module):
    """Convolutions down and up again, with batch, group and instance norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.SiLU()),
        )
        self.middle = nn.Sequential(nn.Conv2d(64, 64, 1), nn.InstanceNorm2d(64, affine=True))
        self.up = nn.Sequential(
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.1)),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.middle(self.down(x)))


class Translator(nn.Module):
    """torch's own encoder and decoder layers, norms after the residual."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        half = max(1, layers // 2)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.core = nn.Transformer(WIDTH, HEADS, half, half, INNER, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(self.embed(input_ids), self.embed(decoder_input_ids)))


def _vectors(size: Size, generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn((size.batch * 16, WIDTH), generator=generator)}


def _two_plain_texts(size: Size, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _ids(size, generator), "decoder_input_ids": _ids(size, generator)}


ARCHITECTURES: Mapping[str, Architecture] = {
    **{
        name: Architecture("transformers", _decoder(stem, options), _text, "decoder")
        for name, (stem, options) in _DECODERS.items()
    },
    "bert": Architecture("transformers", _bert, _masked_text, "encoder"),
    "distilbert": Architecture("transformers", _distilbert, _masked_text, "encoder"),
    "t5": Architecture("transformers", _t5, _two_texts, "seq2seq"),
    "bart": Architecture("transformers", _bart, _two_texts, "seq2seq"),
    "whisper": Architecture("transformers", _whisper, _sound, "seq2seq"),
    "vit": Architecture("transformers", _vit, _pictures("pixel_values", 48), "images"),
    "clip": Architecture("transformers", _clip, _text_and_images, "other"),
    "resnet18": Architecture("torchvision", _torchvision("resnet18"), _pictures("x", 64), "images"),
    "mobilenet": Architecture(
        "torchvision", _torchvision("mobilenet_v3_small"), _pictures("x", 64), "images"
    ),
    "efficientnet": Architecture(
        "torchvision", _torchvision("efficientnet_b0"), _pictures("x", 64), "images"
    ),
    "shufflenet": Architecture(
        "torchvision", _torchvision("shufflenet_v2_x0_5"), _pictures("x", 64), "images"
    ),
    "swin": Architecture("torchvision", _torchvision("swin_t"), _pictures("x", 64), "images"),
    "raft": Architecture("torchvision", _raft, _two_pictures, "other"),
    "convnext": Architecture("timm", _timm("convnext_atto"), _pictures("x", 64), "images"),
    "mixer": Architecture(
        "timm", _timm("mixer_s32_224", img_size=64), _pictures("x", 64), "images"
    ),
    "regnet": Architecture("timm", _timm("regnety_002"), _pictures("x", 64), "images"),
    "deit": Architecture(
        "timm", _timm("deit_tiny_patch16_224", img_size=64), _pictures("x", 64), "images"
    ),
    "unet": Architecture("diffusers", _unet, _noised, "other"),
    "unet_with_text": Architecture("diffusers", _unet_with_text, _noised_with_text, "other"),
    "autoencoder": Architecture("diffusers", _autoencoder, _pictures_plain, "other"),
    "dit": Architecture("diffusers", _dit, _noised_with_class, "other"),
    "perceptron": Architecture("own", lambda size: Perceptron(size.layers), _vectors, "other"),
    "recurrent": Architecture("own", lambda size: Recurrent(min(size.layers, 4)), _text, "other"),
    "hourglass": Architecture("own", lambda size: Hourglass(), _pictures("x", 32), "images"),
    "translator": Architecture(
        "own", lambda size: Translator(size.layers), _two_plain_texts, "other"
    ),
}


def buildable() -> list[str]:
    """The architectures whose package can be imported here."""
    environment.activate()
    wanted = {a.family for a in ARCHITECTURES.values()} - {"own"}
    here = {"own", *(package for package in wanted if environment.available(package))}
    return [name for name, a in ARCHITECTURES.items() if a.family in here]


# Weights: as the package draws them, or with gains.

WEIGHTS: Mapping[str, tuple[float, float]] = {
    "default": (0.0, 1.0),
    "gain 1": (1.0, 1.0),
    "gain 2": (2.0, 1.0),
    "gain 2, q and k x2": (2.0, 2.0),
}
"""Name → standard deviation times the root of the fan-in, and the factor on queries and keys."""
_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query", "key", "c_attn", "to_q", "to_k", "q_lin", "k_lin")


def made(name: str, size: Size, seed: int, weights: str = "default") -> Specimen:
    """A model in evaluation mode and its inputs; equal seeds give equal bits."""
    environment.activate()
    architecture = ARCHITECTURES[name]
    # Spread out, so that neighbouring seeds share no draws.
    torch.manual_seed(7919 * seed + 29)
    model = architecture.build(size).eval()
    gain, sharpness = WEIGHTS[weights]
    if gain:
        _with_gain(model, gain, sharpness)
    generator = torch.Generator().manual_seed(104729 * seed + 31)
    return Specimen(model, architecture.inputs(size, generator))


def _with_gain(model: nn.Module, gain: float, sharpness: float) -> None:
    """Draws every matrix anew; embeddings, norms, biases and position tables stay as they are."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        experts = type(owner).__name__.endswith("Experts")
        if not (name.endswith("weight") or experts):
            continue
        if parameter.dim() < 2 or id(parameter) in tables:
            continue
        # Experts are a stack of matrices; GPT-2 keeps the axis of its inputs first.
        fan_in = parameter.shape[-1] if experts else parameter[0].numel()
        if type(owner).__name__ == "Conv1D":
            fan_in = parameter.shape[0]
        deviation = gain / math.sqrt(fan_in)
        if any(part in name for part in _QUERIES_AND_KEYS):
            deviation *= sharpness
        with torch.no_grad():
            parameter.normal_(0.0, deviation)
