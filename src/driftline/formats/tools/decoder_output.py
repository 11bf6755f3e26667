"""Decoder dumps: `….cpu_validation_info.N.out`, a folder of `0.pt`, `1.pt`, … one per prompt.

Each file holds `{"tokens": ids of the whole text, "logits": a row per generated token}`, or only
the ids if logits were not kept. A prompt is a visit and a generated token is a step of the site
`logits`, so that a comparison names the first token whose logits differ.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from driftline.errors import BadFile
from driftline.formats.dump_run import Leaf, Member, TreeRun
from driftline.formats.folder import Folder
from driftline.formats.tensor_files import describe, leaf
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import TensorKey

NAME = "decoder output"
SUFFIX = ".out"
MOST_STEPS = 1_000_000
_PROMPT = re.compile(r"(\d+)\.pt")

Array = np.ndarray[Any, np.dtype[Any]]


def sniff(path: Path) -> bool:
    # The name must match too: a plain folder of numbered `.pt` files is not a decoder's.
    return path.name.endswith(SUFFIX) and bool(_prompts(path))


def open(path: Path) -> TreeRun:
    """Open the prompts of the folder, by number, as one run."""
    folder = Folder(path)
    leaves: list[Leaf] = []
    for name in sorted(
        filter(_PROMPT.fullmatch, folder.files(named=_PROMPT.fullmatch)), key=_number
    ):
        leaves += _prompt(folder, name, _number(name))
    if not leaves:
        raise BadFile(f"{path} holds no prompt")
    return TreeRun(path, NAME, leaves)


def _prompts(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if _PROMPT.fullmatch(entry.name)]
    except OSError:
        return []
    return names


def _number(name: str) -> int:
    """Sort key: as text, 10 would come before 2, and prompts would be paired wrongly."""
    return int(name.removesuffix(".pt"))


def _prompt(folder: Folder, name: str, prompt: int) -> Iterator[Leaf]:
    for member in describe(folder, name):
        site = member.name or "tokens"
        key = TensorKey.of(site, "output", visit=prompt)
        # Only a matrix of logits can be split into tokens.
        if site != "logits" or member.trouble or len(member.shape) != 2:
            yield leaf(key, name, member, class_name=site)
            continue
        steps, width = member.shape
        # The shape comes from the file; the number of records must stay limited.
        if steps > MOST_STEPS:
            yield leaf(key, name, member._replace(trouble=f"it claims {steps} tokens"))
            continue
        bits = DTYPES[member.dtype].bits
        for step in range(steps):
            fetch = functools.partial(_row, member.fetch, step, width * bits // 8)
            row = Member("", member.dtype, (width,), fetch)
            row_leaf = leaf(key._replace(step=step), name, row, class_name=site)
            # Rows of one file need different offsets; otherwise they would count as one blob.
            yield row_leaf._replace(offset=step)


def _row(fetch: Callable[[], Array], step: int, length: int) -> Array:
    values = fetch()
    item = values.dtype.itemsize
    return values[step * length // item : (step + 1) * length // item]
