"""Programs on text and sound."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.third_party.catalogue import Use, program
from benchmarks.third_party.faults import (
    Plant,
    attribute,
    replaced,
    rolled,
    scaled,
    tensor_changed,
    through,
    wrapped,
)


def tiny_llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        pad_token_id=0,
        **settings,
    )
    return LlamaForCausalLM(config)


def _adapter_scale(model: nn.Module) -> None:
    layer: Any = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    layer.scaling["default"] = 1.0


@program(
    "peft",
    "an adapter without its scale",
    _adapter_scale,
    ("base_model.model.model.layers.1.self_attn.q_proj",),
    "bfloat16",
)
def peft_lora(use: Use) -> None:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = use.ready(get_peft_model(tiny_llama(), adapter).eval())
    with torch.no_grad():
        model(use.numbers(64, 2, 12))


def _lost_update(model: nn.Module) -> None:
    """Layer 1 does not see the keys and values of the last token it has cached."""
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    forward = attention.forward

    def faulty(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        layer = past_key_values.layers[1]
        if layer.is_initialized and layer.keys.shape[2]:
            layer.keys[:, :, -1] = 0
            layer.values[:, :, -1] = 0
        return forward(*args, past_key_values=past_key_values, **kwargs)

    attention.forward = faulty


@program(
    "transformers",
    "the cache of one layer loses the latest token",
    _lost_update,
    ("model.layers.1.self_attn",),
    "bfloat16",
)
def transformers_generate(use: Use) -> None:
    model = use.ready(tiny_llama().eval())
    model.generate(use.numbers(60, 1, 8) + 3, max_new_tokens=4, do_sample=False)


@program(
    "transformers",
    "rotary frequencies of another base",
    tensor_changed("model.rotary_emb", "inv_freq", lambda x: x**0.8),
    ("model.rotary_emb",),
)
def transformers_rotary(use: Use) -> None:
    model = use.ready(tiny_llama(attn_implementation="eager").eval())
    words = use.numbers(64, 2, 16)
    mask = torch.ones_like(words)
    mask[1, 10:] = 0
    with torch.no_grad():
        model(words, attention_mask=mask)


@program(
    "open_clip",
    "the text tower sees what comes later: its causal mask is all zeros",
    tensor_changed("", "attn_mask", torch.zeros_like),
    ("",),
    "autocast",
)
def open_clip_pair(use: Use) -> None:
    from open_clip.model import CLIP

    model = CLIP(
        32,
        {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
        {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(3, 3, 32, 32), use.numbers(64, 3, 12))


@program(
    "x-transformers",
    "scale of one attention",
    attribute("attn_layers.layers.2.1.attend", "scale", 1.0),
    ("attn_layers.layers.2.1.attend", "attn_layers.layers.2.1"),
    "bfloat16",
)
def x_transformers_decoder(use: Use) -> None:
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=64,
        max_seq_len=32,
        attn_layers=Decoder(dim=32, depth=3, heads=2, attn_dim_head=16, rotary_pos_emb=True),
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.numbers(64, 2, 16))


@program(
    "openai-whisper",
    "the encoder's positions moved by one frame",
    rolled("encoder", "positional_embedding", 0),
    ("encoder",),
    "autocast",
)
def whisper_greedy(use: Use) -> None:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(16, 20, 32, 2, 2, 64, 16, 32, 2, 2)).eval()
    # A checkpoint would bring them; without one the package leaves this memory as it is.
    nn.init.normal_(model.decoder.positional_embedding, std=0.02)
    model = use.ready(model)
    with torch.no_grad():
        sound = model.embed_audio(use.drawn(1, 16, 40))
        words = torch.tensor([[1]])
        for _ in range(3):
            words = torch.cat([words, model.logits(words, sound)[:, -1:].argmax(-1)], 1)


@program(
    "sentence-transformers",
    "the first word instead of the mean of all",
    wrapped("1", lambda forward, features, **_: {**features, **_first_word(features)}),
    ("1",),
)
def sentence_embeddings(use: Use) -> None:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(words))
        BertTokenizerFast(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
        config = BertConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        )
        BertModel(config).save_pretrained(folder)
        encoder = models.Transformer(folder)
    model = SentenceTransformer(modules=[encoder, models.Pooling(32)], device="cpu")
    model = use.ready(model.eval())
    model.encode(["two runs agree", "they do", "a longer sentence of more words"])


def _first_word(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"sentence_embedding": features["token_embeddings"][:, 0]}


@program(
    "conformer",
    "a depthwise convolution padded on one side only",
    attribute("layers.1.conv.net.4", "padding", (6, 0)),
    ("layers.1.conv.net.4",),
    "bfloat16",
)
def conformer_speech(use: Use) -> None:
    from conformer import Conformer

    model = Conformer(dim=32, depth=3, dim_head=16, heads=2, conv_kernel_size=7)
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 24, 32))


def rotary_base(site: str) -> Plant:
    return tensor_changed(site, "freqs", lambda x: x**0.7)


@program(
    "rotary-embedding-torch",
    "rotation with another base",
    rotary_base("attention.rotary"),
    ("attention.rotary", "attention"),
)
def rotary_attention(use: Use) -> None:
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=16)
            self.project = nn.Linear(32, 96)
            self.out = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            q = self.rotary.rotate_queries_or_keys(parts[0])
            k = self.rotary.rotate_queries_or_keys(parts[1])
            y = nn.functional.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 32)
            self.attention = Attention()
            self.head = nn.Linear(32, 64)

        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words)
            return self.head(x + self.attention(x))

    model = use.ready(Model().eval())
    with torch.no_grad():
        model(use.numbers(64, 2, 16))


@program(
    "performer-pytorch",
    "random features drawn anew",
    tensor_changed(
        "performer.net.layers.1.0.fn.fast_attention",
        "projection_matrix",
        lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(9)),
    ),
    ("performer.net.layers.1.0.fn.fast_attention",),
    "autocast",
)
def performer_features(use: Use) -> None:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=64, max_seq_len=32, dim=32, depth=3, heads=2, dim_head=16)
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.numbers(64, 2, 32))


@program(
    "local-attention",
    "scale of a local attention",
    attribute("layers.1.0.branch.attn_fn", "scale", 1.0),
    ("layers.1.0.branch.attn_fn",),
    "autocast",
)
def local_attention(use: Use) -> None:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=64,
        dim=32,
        depth=2,
        max_seq_len=64,
        causal=True,
        local_attn_window_size=8,
        heads=2,
        dim_head=16,
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.numbers(64, 1, 32))


@program(
    "transformers",
    "ReLU in place of GELU, in one layer",
    replaced("encoder.layer.1.intermediate.intermediate_act_fn", nn.ReLU),
    (
        "encoder.layer.1.intermediate.intermediate_act_fn",
        "encoder.layer.1.intermediate",
    ),
    "bfloat16",
)
def transformers_bert(use: Use) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = use.ready(BertModel(config).eval())
    words = use.numbers(64, 2, 12)
    mask = torch.ones_like(words)
    mask[0, 8:] = 0
    with torch.no_grad():
        model(input_ids=words, attention_mask=mask)


@program(
    "transformers",
    "a weight kept in 8 bits",
    through("decoder.block.1.layer.2.DenseReluDense.wo", "weight", torch.float8_e5m2),
    ("decoder.block.1.layer.2.DenseReluDense.wo",),
)
def transformers_t5(use: Use) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    model = use.ready(T5ForConditionalGeneration(config).eval())
    with torch.no_grad():
        model(input_ids=use.numbers(64, 2, 10), labels=use.numbers(64, 2, 6))


@program(
    "transformers",
    "weight of a norm too large by a quarter",
    scaled("transformer.h.1.ln_2", "weight", 1.25),
    ("transformer.h.1.ln_2",),
    "autocast",
)
def transformers_gpt2(use: Use) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=2, n_positions=64)
    model = use.ready(GPT2LMHeadModel(config).eval())
    with torch.no_grad():
        model(use.numbers(64, 2, 12))
