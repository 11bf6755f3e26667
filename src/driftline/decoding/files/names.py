"""Names of the files that decoder commands write and read.

Model, shape and number format are part of every name, so files of several runs can share a folder.
This file opens nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from driftline.decoding.models.paged_cache import FP8
from driftline.errors import BadInput

Side = Literal["cpu", "cuda", "aiu"]
REFERENCE: Side = "cpu"
CANDIDATE: Side = "cuda"
"""The documented label of the candidate, even if it ran on another device."""
DEVICE: Side = "aiu"
"""The documented label of the candidate of a validation, whatever the device is."""
TOKEN_CSV_METRICS = ("ce", "diff_mean", "prob_mean", "prob_std")
"""Token scores that have their own CSV files."""
LAYER_CSV_METRICS = ("abs_diff", "cos_sim")
"""Layer metrics that have their own CSV files."""
TOKEN_TABLE = ".tokens.parquet"
PROVENANCE = ".provenance.json"
"""Suffix of the file with the provenance of token metrics."""
LAYER_TABLE = ".layers"
LAYER_PROVENANCE = ".layers.json"
"""Suffix of the file with the provenance of layer metrics and the order of the layers."""
LONGEST_NAME = 255
"""The largest number of bytes in a file name, on all common file systems."""
ROOT = "(root)"
"""The site of the model itself in runs."""

_NAME = re.compile(
    r"(?P<model>.+)_max-new-tokens-(?P<new>\d+)_batch-size-(?P<batch>\d+)"
    r"_seq-length-?(?P<length>\d+)_dtype-(?P<dtype>[A-Za-z0-9]+)(?P<rest>.*)"
)


class FileName(NamedTuple):
    """A parsed file name; `rest` is the text after the number format, including its dot."""

    model: str
    new_tokens: int
    batch_size: int
    length: int
    dtype: str
    rest: str


def flat_name(model: str) -> str:
    """A model's id or path as part of a file name.

    >>> flat_name("ibm-granite/granite-3.2-8b-instruct/")
    'ibm-granite--granite-3.2-8b-instruct'
    """
    return model.rstrip("/").replace("/", "--")


def file_prefix(
    model: str, new_tokens: int, batch_size: int, length: int, dtype: str, attention: str = ""
) -> str:
    """The prefix of all files of one model and shape.

    Args:
        model: The id or path of the model.
        new_tokens: Number of new tokens per prompt.
        batch_size: Number of prompts.
        length: Length of the prompts.
        dtype: The candidate's number format.
        attention: The reference's attention. It is part of the name if it is in fp8, because its
            results differ from those of all others.

    >>> file_prefix("acme/tiny", 128, 1, 64, "fp16")
    'acme--tiny_max-new-tokens-128_batch-size-1_seq-length-64_dtype-fp16'
    """
    # Existing files of other attentions do not have it in their names, and must be found.
    kind = f"_attn-type-{attention}" if attention in FP8 else ""
    return (
        f"{flat_name(model)}_max-new-tokens-{new_tokens}_batch-size-{batch_size}"
        f"_seq-length-{length}_dtype-{dtype}{kind}"
    )


def parse_name(name: str) -> FileName | None:
    """Parse a file name, with either documented spelling of the length; None for other names.

    >>> parse_name("a--b_max-new-tokens-8_batch-size-1_seq-length64_dtype-fp16.ce.csv").length
    64
    """
    # `.+` is greedy, so the name of a model may contain such words itself.
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    new, batch, length = (int(match[part]) for part in ("new", "batch", "length"))
    return FileName(match["model"], new, batch, length, match["dtype"], match["rest"])


def hashed_prefixes(model: str, new_tokens: int, batch_size: int, length: int) -> list[str]:
    """The digests that newer versions of the documented tools use as names of a shape's files.

    There is one for every known spelling: names and values in alphabetical order, as two scripts
    spell them, and the readable name, as in one version.

    >>> hashed_prefixes("acme/tiny", 8, 1, 64)[0][:16]
    'f7ab8ce0d69811a0'
    """
    texts: list[str] = []
    common = {
        "batch-size": batch_size,
        "max-new-tokens": new_tokens,
        "model-id": flat_name(model),
    }
    for length_name in ("seq-length", "seq-len"):
        for dtype in ("fp16", "fp32"):
            for attention in ({"attn-type": "sdpa"}, {}):
                fields = {**common, **attention, "dtype": dtype, length_name: length}
                texts.append("_".join(f"{name}-{fields[name]}" for name in sorted(fields)))
    for dtype in ("fp16", "fp32"):
        readable = file_prefix(model, new_tokens, batch_size, length, dtype)
        texts += [readable, f"{readable}_attn-type-sdpa"]
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def find_hashed(folder: Path, prefixes: Sequence[str], side: Side, seed: int) -> Path | None:
    """The outputs of one side and round with a digest as name, of the newest version; None if there
    are none."""
    ending = f".{side}_validation_info.{seed}.out"
    for prefix in prefixes:
        # The name is `{digest}_{version}`, or the digest alone in one version.
        hits = [*folder.glob(f"{prefix}_*{ending}"), *folder.glob(f"{prefix}{ending}")]
        if hits:
            return max(hits, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name[65:])])
    return None


def out_name(prefix: str, side: Side, seed: int) -> str:
    """The folder with the tokens and logits of one side and round."""
    return f"{prefix}.{side}_validation_info.{seed}.out"


def csv_name(prefix: str, metric: str) -> str:
    """The file with one score of every token."""
    return f"{prefix}.{metric}.csv"


def layer_csv(prefix: str, layer: str, metric: str) -> str:
    """The file of one metric of one layer.

    >>> layer_csv("acme--tiny_max-new-tokens-8_batch-size-1_seq-length-64_dtype-float16",
    ...           "model.head", "cos_sim")[-31:]
    'float16--model.head.cos_sim.csv'
    """
    return f"{prefix}--{layer}.{metric}.csv"


def file_layer(site: str, library: str) -> str:
    """The name of a module in file names.

    Models of ibm-fms keep the documented names (`model.base_model.layers7.ln`); models of
    transformers use their own module paths (`model.layers.7.mlp`), as runs and tables do.

    >>> file_layer("base_model.layers.7.ln", "fms"), file_layer("(root)", "fms")
    ('model.base_model.layers7.ln', 'model')
    >>> file_layer("model.layers.7.mlp", "transformers")
    'model.layers.7.mlp'
    """
    if library != "fms":
        return site
    name = "model"
    for part in () if site == ROOT else site.split("."):
        # The documented names join a number to the list it indexes.
        name += part if part.isdigit() else f".{part}"
    return name


def require_short(name: str) -> None:
    """Refuse a name that no file system accepts, before hours of work are spent on the file.

    Raises:
        BadInput: It is too long.
    """
    size = len(os.fsencode(name))
    if size > LONGEST_NAME:
        raise BadInput(
            f"the file name '{name[:60]}…' would have {size} bytes; {LONGEST_NAME} is the most",
            hint="name the model with --variant, or give a shorter path to it",
        )
