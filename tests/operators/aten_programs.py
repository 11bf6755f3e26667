"""Small programs whose operators are captured and checked; made from configurations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

KINDS = ("llama", "gpt2", "bert", "t5", "mixtral", "cnn")
MORE_KINDS = ("deberta", "mamba", "vit", "whisper")
"""Programs on which no bound was chosen."""


_SEEN = {"hidden_size": 48, "intermediate_size": 96, "image_size": 32, "patch_size": 8}
_HEARD = {
    "vocab_size": 128,
    "num_mel_bins": 20,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.GroupNorm(4, 32),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, x):
        return self.net(x)


def program(
    kind: str, dtype: torch.dtype, device: str = "cpu"
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model, and what computes a loss with it."""
    import transformers as tf

    torch.manual_seed(0)
    if kind == "cnn":
        model = Pictures().to(device, dtype)
        x = torch.randn(4, 3, 32, 32).to(device, dtype)
        right = torch.arange(4, device=device)
        return model, lambda: functional.cross_entropy(model(x).float(), right)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    wide = size | {"intermediate_size": 128}
    rope = wide | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    made = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**rope)),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(
                n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=1, eos_token_id=2
            )
        ),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**wide)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=64,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                d_kv=16,
                vocab_size=128,
                decoder_start_token_id=0,
            )
        ),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**rope, num_local_experts=4)),
        "deberta": lambda: tf.DebertaV2ForMaskedLM(
            tf.DebertaV2Config(
                **wide, relative_attention=True, pos_att_type=["p2c", "c2p"], pad_token_id=0
            )
        ),
        "mamba": lambda: tf.MambaForCausalLM(
            tf.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=8)
        ),
        "vit": lambda: tf.ViTForImageClassification(
            tf.ViTConfig(**_SEEN, num_hidden_layers=2, num_attention_heads=4)
        ),
        "whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_HEARD)),
    }
    model = made[kind]().to(device, dtype)
    ids = torch.randint(0, 128, (2, 16)).to(device)
    if kind == "vit":
        pictures = torch.randn(2, 3, 32, 32).to(device, dtype)
        return model, lambda: model(pictures, labels=ids[:, 0] % 2).loss
    if kind == "whisper":
        sounds = torch.randn(2, 20, 64).to(device, dtype)
        return model, lambda: model(input_features=sounds, labels=ids).loss
    return model, lambda: model(input_ids=ids, labels=ids).loss


def train(model: nn.Module, loss: Callable[[], torch.Tensor], steps: int = 2, **how) -> None:
    """Forward, backward, clipping and an optimizer, as training programs do."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
