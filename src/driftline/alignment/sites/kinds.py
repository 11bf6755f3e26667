"""Classes of layers: which classes do the same work, and the role that a name suggests.

This is one table for torch, transformers, Paddle, ATB and hand-written models. It knows only names,
no shapes and no order. An unknown class is a kind of its own; only its shapes can find it a
partner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

SOLID = frozenset({"linear", "norm.layer", "norm.rms", "norm", "norm.batch", "embedding", "conv"})
"""Kinds that every implementation of a model has as separate sites.

Activations and dropouts may also be a line of code, so they are aligned between solid kinds.
"""

MAPPED = "mapped"
"""Prefix of the kinds of classes that the user maps to each other; these are solid too."""

WHOLE = frozenset({"linear", "norm.layer", "norm.rms", "norm"})
"""Kinds that count as one leaf even if they have children.

Examples are an adapter around a Linear, and an ATB operation with its kernels.
"""

# Exact names come first, because endings of class names are guesses.
_EXACT = {
    "RmsNormOperation": "norm.rms",
    "LayerNormOperation": "norm.layer",
    "LinearOperation": "linear",
    "LinearQuantOperation": "linear",
    "LinearParallelOperation": "linear",
    "LinearSparseOperation": "linear",
    "LinearDequantOnly": "linear",
    "LinearNoQuant": "linear",
    "LinearRowParallelNoAdd": "linear",
    "LinearRowParallelAndAdd": "linear",
    "MatmulOperation": "linear",
    "WordEmbedding": "embedding",
    "WordEmbeddingOperation": "embedding",
    "GatherOperation": "embedding",
    "SelfAttentionOperation": "core attention",
    "PagedAttentionOperation": "core attention",
    "CoreAttention": "core attention",
    "DotProductAttention": "core attention",
    "FlashAttention": "core attention",
    "RopeOperation": "rope",
    "ActivationOperation": "activation",
    "SoftmaxOperation": "softmax",
    "SplitOperation": "cut",
    "SliceOperation": "cut",
    "LmHead": "linear",
    "Lm_head": "linear",
    "LMHead": "linear",
    "Conv1D": "linear",
    "T5LayerNorm": "norm.rms",
    "NonDynamicallyQuantizableLinear": "linear",
    "CommonLayer": "block",
    "Decoder_layer": "block",
    "Prefill_layer": "block",
    "MlpGateLayerV2": "mlp",
    "RMS": "norm.rms",
    "Identity": "identity",
    "Softmax": "softmax",
    "Flatten": "flatten",
}
# Activations are the last row of the table, because their short endings (`act`, `elu`) fit many
# names.
_ACTIVATIONS = (
    r"gelu|relu|silu|swish|swiglu|sigmoid|tanh|mish|elu|celu|selu|softplus|activation|glu|act"
)
_ENDS = (  # tried in this order on the lower-case class name
    (r"layer_?norm\w*", "norm.layer"),
    (r"rms_?norm\w*", "norm.rms"),
    (r"batch_?norm\w*|group_?norm|instance_?norm\w*", "norm.batch"),
    (r"t5layernorm|\w*norm", "norm"),
    (r"rotary\w*|rope\w*|rotaryposition\w*", "rope"),
    (r"embedding\w*|embed", "embedding"),
    (r"\w*linear\w*|dense|\w*lmhead|lm_head", "linear"),
    (r"conv\d*d?|conv2dsame|convtranspose\dd", "conv"),
    (r"(alpha|feature|attn|stable)?_?dropout\w*|drop_?path", "dropout"),
    (_ACTIVATIONS, "activation"),
)
_COMPILED = tuple((re.compile(rf"(?:\w*?)(?:{end})"), kind) for end, kind in _ENDS)
# Containers are guessed from any part of the name, because frameworks add prefixes and versions.
_CONTAINERS = (
    (re.compile(r"\w*attention\w*|\w*attn\w*"), "attention"),
    (re.compile(r"\w*(mlp|feed_?forward|ffn)\w*"), "mlp"),
    (re.compile(r"\w*(block|layer|decoderlayer|encoderlayer)(v\d)?"), "block"),
)
_NORMS = frozenset({"norm.layer", "norm.rms", "norm"})

TRANSPOSED = frozenset({"Conv1D"})
"""Linear classes whose weight is (in, out): y = x W + b. torch's own is (out, in)."""

PER_HEAD = ("GPTNeoX", "Bloom", "Falcon", "Persimmon")
"""Model families whose fused qkv is stored head by head (q, k, v of head 0, then head 1, ...)."""

OWN_LAYOUT = ("CodeGen",)
"""Model families whose fused qkv has its own order; it is not cut into parts."""

_ROLES = {
    "q": "q", "query": "q", "wq": "q", "queries": "q", "qproj": "q", "toq": "q", "querylayer": "q",
    "k": "k", "key": "k", "wk": "k", "keys": "k", "kproj": "k", "tok": "k",
    "v": "v", "value": "v", "wv": "v", "values": "v", "vproj": "v", "tov": "v",
    "gate": "gate", "gateproj": "gate", "wgate": "gate",
    "up": "up", "upproj": "up", "wup": "up",
}  # fmt: skip
ROLE_ORDER = ("q", "k", "v", "gate", "up")
"""The order of the parts in fused weights that are not interleaved."""


@lru_cache(maxsize=4096)
def kind_of(class_name: str) -> str:
    """The kind of work that a leaf of this class does; `?` and the name for unknown classes.

    >>> kind_of("LlamaRMSNorm"), kind_of("RmsNormOperation"), kind_of("Frobnicate")
    ('norm.rms', 'norm.rms', '?Frobnicate')
    >>> kind_of("AllGatherOperation"), kind_of("RopeGradOperation")  # "gatheROPEration" is no rope
    ('?AllGatherOperation', 'rope')
    """
    if (exact := _EXACT.get(class_name)) is not None:
        return exact
    # All of ATB's classes end in "Operation"; with that, "AllGatherOperation" would contain "rope".
    lower = class_name.removesuffix("Operation").lower()
    for pattern, kind in _COMPILED:
        if pattern.fullmatch(lower):
            return kind
    # A fused attention may be a single call, so a leaf can have a container's kind.
    return container_kind(class_name) or f"?{class_name}"


@lru_cache(maxsize=4096)
def container_kind(class_name: str) -> str:
    """The kind of a container: attention, mlp or block; empty if unknown."""
    exact = _EXACT.get(class_name)
    if exact in ("block", "mlp"):
        return exact
    lower = class_name.lower()
    for pattern, kind in _CONTAINERS:
        if pattern.fullmatch(lower):
            return kind
    return ""


# Quantised variants (Linear4bit, LinearFP8) are still one linear layer.
_ONE_LINEAR = re.compile(r"\w*(linear(_?\dbits?|fp\d|nf\d|lt)?|lm_?head)|dense")
_ONE_NORM = frozenset({"norm.layer", "norm.rms", "norm", "dropout", "identity"})


def is_whole(class_name: str, inside: Iterable[str]) -> bool:
    """Whether a site with children counts as one leaf, by its class and the kinds inside.

    An adapter around a Linear does. T5's `DenseActDense` and a `PreNorm` that contains the
    attention have the name of a single layer, but contain several.

    >>> is_whole("Linear", ["linear", "dropout"]), is_whole("T5DenseActDense", ["linear"])
    (True, False)
    """
    kind = kind_of(class_name)
    # The exact test excludes T5DenseActDense, whose name ends like a Linear, but which holds
    # several.
    if kind == "linear":
        named = class_name in _EXACT or _ONE_LINEAR.fullmatch(class_name.lower()) is not None
        return named and not {"activation", "conv", *_NORMS}.intersection(inside)
    return kind in WHOLE and all(inner in _ONE_NORM or not is_known(inner) for inner in inside)


def is_solid(kind: str) -> bool:
    """Whether a kind belongs to the backbone of a model."""
    return kind in SOLID or kind.startswith(MAPPED)


def is_known(kind: str) -> bool:
    """Whether a kind is in the table."""
    return not kind.startswith("?")


@lru_cache(maxsize=65536)
def same_kind(kind: str, other: str) -> int:
    """2 for the same work, 1 if one of the two is unknown, 0 for different work."""
    if kind == other:
        return 2 if kind != "?" else 1  # runs without class names: no evidence
    if kind in _NORMS and other in _NORMS and "norm" in (kind, other):
        return 2  # a generic "norm" may be any of them
    return 1 if not (is_known(kind) and is_known(other)) else 0


@lru_cache(maxsize=65536)
def role_of(site: str) -> str:
    """The role (q, k, v, gate, up) that the name of a site suggests; empty if there is none.

    >>> role_of("model.layers.0.self_attn.q_proj"), role_of("h.0.attn.key"), role_of("h.0.fc")
    ('q', 'k', '')
    """
    # The name of the parent counts too: `attn.q.linear` is a query projection.
    last, *holder = reversed(site.replace("/", ".").split(".")[-2:])
    for part in (last, *(name for name in holder if not name[-1:].isdigit())):  # not `k0`, `v2`
        word = re.sub(r"[^a-z]", "", part.lower().removesuffix("_linear").removesuffix("_layer"))
        if (role := _ROLES.get(word)) is not None:
            return role
    return ""
