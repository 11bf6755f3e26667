"""Tokens against layers: how far each layer's output is off at each token.

From a comparison with a step per generated token, or from the files of layer metrics, which have a
number per token. Down-sampled by the largest, so that a single bad token stays visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from driftline.comparison.row import Row
from driftline.comparison.table import Table
from driftline.decoding.files.metric_files import MetricFile, by_layer, read_provenance, read_values
from driftline.errors import DriftlineError
from driftline.pages.packing import Array, singles

FEWEST_STEPS = 3
"""Steps from which on a comparison is worth a map."""
_METRIC = "relative_l2"
_MOST_TOKENS = 768
_MOST_LAYERS = 1024
_STATUS = {"pass": 1, "unjudged": 1, "fail": 2}


def of_steps(table: Table) -> dict[str, Any] | None:
    """The map of a comparison of several steps: tokens, batches, or iterations of training.

    Which of them a run does not say, so they are called steps. None where there are too few.
    """
    rows = [row for row in table.rows if _drawn(row)]
    steps = sorted({row.step for row in rows})
    if len(steps) < FEWEST_STEPS:
        return None
    sites = list(dict.fromkeys(row.site for row in rows))[:_MOST_LAYERS]
    place = {site: at for at, site in enumerate(sites)}
    column = {step: at for at, step in enumerate(steps)}
    values = np.full((len(sites), len(steps)), np.nan)
    status = np.zeros((len(sites), len(steps)), np.uint8)
    limit = np.full(len(sites), np.nan)
    for row in rows:
        if row.site not in place:
            continue
        y, x = place[row.site], column[row.step]
        value = float(row.metrics.get(_METRIC, np.nan))
        values[y, x] = value if np.isnan(values[y, x]) else max(values[y, x], value)
        status[y, x] = max(int(status[y, x]), _STATUS.get(row.status, 0))
        if row.decided_by == _METRIC and row.limit is not None:
            limit[y] = row.limit
    return {"unit": "step", **_map(sites, np.asarray(steps), values, status, limit, _METRIC)}


def of_files(files: Sequence[MetricFile]) -> dict[str, Any] | None:
    """The map of the layer files of one shape: a number per token row, layer by layer."""
    own = [file for file in files if file.layer and file.metric == "abs_diff"]
    read: dict[str, Array] = {}
    for layer, those in by_layer(own, read_provenance(own).layers).items():
        try:
            read[layer] = read_values(those[0].path, "abs_diff")
        except DriftlineError:
            continue
        if len(read) >= _MOST_LAYERS:
            break
    # Layers give a number per token; heads and caches give more, and have no place here.
    sizes = Counter(len(values) for values in read.values())
    if not sizes:
        return None
    common = sizes.most_common(1)[0][0]
    layers = [layer for layer, values in read.items() if len(values) == common]
    if common < FEWEST_STEPS:
        return None
    values = np.stack([read[layer] for layer in layers])
    status = np.where(np.isnan(values), 2, 0).astype(np.uint8)
    limit = np.full(len(layers), np.nan)
    found = _map(layers, np.arange(common), values, status, limit, "abs_diff")
    return {"unit": "token", **found}


def _drawn(row: Row) -> bool:
    return row.port == "output" and row.compared and _METRIC in row.metrics and row.slot in _FIRST


_FIRST = ("0", "last_hidden_state", "logits")


def _map(
    sites: list[str], steps: Array, values: Array, status: Array, limit: Array, metric: str
) -> dict[str, Any]:
    width = values.shape[1]
    if width > _MOST_TOKENS:
        edges = np.arange(_MOST_TOKENS) * width // _MOST_TOKENS
        # A NaN is the worst there is, and must not be lost among neighbours.
        worst = np.where(np.isnan(values), np.inf, values)
        values = np.maximum.reduceat(worst, edges, axis=1)
        status = np.maximum.reduceat(status, edges, axis=1)
        steps = steps[edges]
    return {
        "sites": sites,
        "steps": steps.astype(np.int32),
        "metric": metric,
        "values": singles(values.reshape(-1).astype(np.float64)),
        "limit": limit.astype(np.float64),
        "status": status.reshape(-1).astype(np.uint8),
    }


def shape_key(folder: Path) -> str:
    """What files of one shape have in common, whatever the number format is called.

    >>> shape_key(Path("a_max-new-tokens-8_batch-size-1_seq-length-64_dtype-float16.layers"))
    'a 8 1 64 fp16'
    """
    from driftline.decoding.files.names import parse_name

    named = parse_name(folder.name)
    if named is None:
        return folder.name
    formats = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    dtype = formats.get(named.dtype, named.dtype)
    return f"{named.model} {named.new_tokens} {named.batch_size} {named.length} {dtype}"
