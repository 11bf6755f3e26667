"""What a layer is called in the files of `driftline layer-metrics`.

Models of ibm-fms keep the documented names (`model.base_model.layers7.ln`); models of transformers
go by their own module paths (`model.layers.7.mlp`), as runs and tables do.
"""

from __future__ import annotations

METRICS = ("abs_diff", "cos_sim")
ROOT = "(root)"
"""A model itself, as runs call it."""


def file_layer(site: str, library: str) -> str:
    """The name of a site in file names.

    >>> file_layer("base_model.layers.7.ln", "fms"), file_layer("(root)", "fms")
    ('model.base_model.layers7.ln', 'model')
    >>> file_layer("model.layers.7.mlp", "transformers")
    'model.layers.7.mlp'
    """
    if library != "fms":
        return site
    name = "model"
    for part in () if site == ROOT else site.split("."):
        name += part if part.isdigit() else f".{part}"
    return name


def layer_csv(prefix: str, layer: str, metric: str) -> str:
    """The file of one metric of one layer.

    >>> layer_csv("acme--tiny_max-new-tokens-8_batch-size-1_seq-length-64_dtype-float16",
    ...           "model.head", "cos_sim")[-31:]
    'float16--model.head.cos_sim.csv'
    """
    return f"{prefix}--{layer}.{metric}.csv"
