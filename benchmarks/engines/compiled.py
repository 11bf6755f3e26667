"""torch.compile with inductor: small models of eight families against themselves in eager mode.

The cost is that of compiling and running under capture over compiling and running without, both
without torch's caches, in CPU seconds of this process: the compilers that it starts count too. On a
machine with a CUDA device there are the same rows for it, whose kernels Triton makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import driftline
from benchmarks.engines.cases import Case, Measured, cpu_seconds, measured
from benchmarks.engines.networks import BasicBlock

FACTOR = 1.05
IDS = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
SOUND = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))


class Inverted(nn.Module):
    """Wide, depthwise, narrow, as in mobilenet."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        wide = 4 * into
        self.up = nn.Conv2d(into, wide, 1, bias=False)
        self.bn1, self.act = nn.BatchNorm2d(wide), nn.ReLU6()
        self.depthwise = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.down = nn.Conv2d(wide, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.same = into == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.up(x)))
        y = self.bn3(self.down(self.act(self.bn2(self.depthwise(y)))))
        return x + y if self.same else y


class Pictures(nn.Module):
    """A stem, some blocks, a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.relu(self.norm(self.stem(x))))).flatten(1))


def _transformer(name: str, **config: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IN_TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Model(NamedTuple):
    """A model, what it is given, and the module whose weight the fault scales."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    faulty: str


TEXT = {"input_ids": IDS, "use_cache": False}
BOTH = {"decoder_input_ids": IDS.flip(0), "use_cache": False}
MODELS: dict[str, Model] = {
    "BERT": Model(
        partial(_transformer, "BertModel", **SMALL, **IN_TEXT, intermediate_size=64),
        {"input_ids": IDS},
        "encoder.layer.1.intermediate.dense",
    ),
    "ViT": Model(
        partial(
            _transformer, "ViTModel", **SMALL, intermediate_size=64, image_size=16, patch_size=4
        ),
        {"pixel_values": PIXELS},
        "layers.1.mlp.fc1",
    ),
    "GPT-2": Model(
        partial(_transformer, "GPT2LMHeadModel", **IN_TEXT, n_embd=32, n_layer=2, n_head=4),
        TEXT,
        "transformer.h.1.mlp.c_fc",
    ),
    "Whisper": Model(
        partial(
            _transformer,
            "WhisperModel",
            **IN_TEXT,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            num_mel_bins=8,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            decoder_start_token_id=1,
            max_source_positions=16,
            max_target_positions=32,
        ),
        {"input_features": SOUND, **BOTH},
        "decoder.layers.1.fc1",
    ),
    "Mixtral": Model(
        partial(
            _transformer,
            "MixtralForCausalLM",
            **SMALL,
            **IN_TEXT,
            intermediate_size=48,
            num_key_value_heads=2,
            num_local_experts=4,
        ),
        TEXT,
        "model.layers.1.self_attn.o_proj",
    ),
    "T5": Model(
        partial(
            _transformer,
            "T5ForConditionalGeneration",
            **IN_TEXT,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        {"input_ids": IDS, **BOTH},
        "decoder.block.1.layer.2.DenseReluDense.wi",
    ),
    "resnet, small": Model(
        lambda: Pictures(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)), {"x": PIXELS}, "blocks.1.conv2"
    ),
    "mobilenet, small": Model(
        lambda: Pictures(Inverted(8, 8), Inverted(8, 16)), {"x": PIXELS}, "blocks.1.depthwise"
    ),
}


def _run(model: nn.Module, inputs: Mapping[str, Any], *, training: bool) -> None:
    if not training:
        with torch.no_grad():
            model(**inputs)
        return
    result = model(**inputs)
    first = result if isinstance(result, Tensor) else result[0]
    # Weights of both signs: the mean square of what a norm gives has no gradient.
    weights = torch.linspace(-9, 9, first.numel(), device=first.device).sin().view(first.shape)
    (first * weights).sum().backward()


def without_dropout(network: nn.Module) -> nn.Module:
    """The network with every probability of dropout at 0."""
    for part in network.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return network


def measure(model: Model, folder: Path, *, training: bool, device: str = "cpu") -> Measured:
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    levels = ("modules", "gradients") if training else ("modules",)

    inputs = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in model.inputs.items()
    }

    def made(*, faulty: bool = False) -> nn.Module:
        torch.manual_seed(0)
        network = without_dropout(model.make().train(training)).to(device)
        if faulty:
            with torch.no_grad():
                network.get_submodule(model.faulty).weight.mul_(FACTOR)
        return network

    def dumped(name: str, network: nn.Module, *, graph: bool) -> None:
        watched = torch.compile(network) if graph else network
        with driftline.capture(
            network, folder / name, levels=levels, graph="inductor" if graph else None
        ):
            _run(watched, inputs, training=training)

    dumped("eager", made(), graph=False)
    torch._dynamo.reset()
    # What the compiler does once in a process is no part of either.
    torch.compile(lambda x: x.sin() * 2)(torch.ones(3, device=device))
    plain = cpu_seconds(lambda: _run(torch.compile(made()), inputs, training=training))
    torch._dynamo.reset()
    captured = cpu_seconds(lambda: dumped("compiled", made(), graph=True))
    torch._dynamo.reset()
    dumped("faulty", made(faulty=True), graph=True)
    clean = driftline.compare(folder / "eager", folder / "compiled")
    wrong = driftline.compare(folder / "eager", folder / "faulty")
    fault = f"weight of {model.faulty} x {FACTOR:g}"
    return measured(clean, wrong, fault, (model.faulty,), captured / plain)


DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
CASES = tuple(
    Case(
        f"torch.compile, inductor, {'training' if training else 'eval'}"
        + ("" if device == "cpu" else ", CUDA"),
        name,
        partial(measure, model, training=training, device=device),
    )
    for device in DEVICES
    for training in (False, True)
    for name, model in MODELS.items()
)
