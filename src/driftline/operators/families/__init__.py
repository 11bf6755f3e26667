"""The operators' definitions, one file per family; imports numpy and nothing of Driftline's.

`driftline opcheck --repro` writes these files, as they stand, into its stand-alone scripts. That is
why they import each other only by `from driftline.operators.families.X import …`.
"""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {
    "activations": ("Activation",),
    "elementwise": ("Elewise",),
    "norms": ("LayerNorm", "RmsNorm"),
    "softmaxes": ("FastSoftMax", "FastSoftMaxGrad", "GenAttentionMask", "Softmax"),
    "products": (
        "Linear",
        "LinearSparse",
        "Matmul",
        "StridedBatchMatmul",
    ),
    "moving": (
        "AsStrided",
        "Concat",
        "Fill",
        "Gather",
        "Pad",
        "Repeat",
        "SetValue",
        "Slice",
        "Split",
        "Transdata",
        "Transpose",
        "Unpad",
        "Where",
    ),
    "counting": (
        "Cumsum",
        "Gating",
        "IndexAdd",
        "Nonzero",
        "Onehot",
        "Reduce",
        "Sort",
    ),
    "rotary": ("Rope", "RopeGrad"),
    "attention": ("PagedAttention", "SelfAttention"),
    "caches": ("KvCache", "ReshapeAndCache"),
    "sampling": ("Multinomial", "TopkToppSampling"),
    "ranks": ("AllGather", "AllReduce", "Broadcast", "LinearParallel"),
}
"""Which file defines which operators (names without `Operation`)."""
