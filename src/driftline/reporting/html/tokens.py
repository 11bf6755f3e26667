"""Scores of generated tokens, the first failing token, and maps of layers against tokens.

Reads `.tokens.parquet`, layer files, and the saved logits of one prompt at most. Does not decide
limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.decoding.files.metric_files import MetricFile, by_layer, read_provenance, read_values
from driftline.decoding.files.names import CANDIDATE, REFERENCE, out_name
from driftline.decoding.files.outputs import INDICES, NORM, VALUES, read_prompt
from driftline.decoding.files.token_table import PLACES, SCORES
from driftline.errors import BadFile, DriftlineError
from driftline.registry import require
from driftline.reporting.html.depth import PASSES, Pass, pass_of
from driftline.reporting.html.document import figures, words
from driftline.reporting.html.page import Array, singles

_LIKELIEST = 5
# Folders of IBM's scripts call the candidate `aiu`.
_LABELS = (CANDIDATE, "aiu")

Text = Callable[[int], str]


class Tokens(NamedTuple):
    """Every kept token of one model and shape.

    Attributes:
        places: seed, prompt, position and token, as integers.
        names: The prompts' names.
        scores: The scores, as float64; missing ones are NaN.
    """

    places: Mapping[str, Array]
    names: Sequence[str]
    scores: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.places["seed"])

    def columns(self, text: Text | None) -> dict[str, Any]:
        """The columns that docs/report-format.md describes."""
        shown = figures({**self.places, **self.scores})
        shown["prompt_name"] = words(list(self.names))
        if text is not None:
            # Each token is decoded once: a tokenizer is slow and tokens repeat.
            text_of = {int(token): text(int(token)) for token in np.unique(self.places["token"])}
            shown["text"] = words([text_of[int(token)] for token in self.places["token"]])
        return {"count": len(self), "columns": shown}

    def prompts(self, bad: Mapping[str, Array]) -> list[dict[str, Any]]:
        """Failing tokens of every prompt, by metric."""
        summaries: dict[tuple[int, int], dict[str, Any]] = {}
        for index in range(len(self)):
            seed, prompt = int(self.places["seed"][index]), int(self.places["prompt"][index])
            summary = summaries.setdefault(
                (seed, prompt),
                {
                    "seed": seed,
                    "prompt": prompt,
                    "name": self.names[index],
                    "kept": 0,
                    "failing": dict.fromkeys(bad, 0),
                },
            )
            summary["kept"] += 1
            for name, fails in bad.items():
                summary["failing"][name] += int(fails[index])
        return list(summaries.values())


def read_tokens(path: Path) -> Tokens:
    """The table of tokens.

    Raises:
        BadFile: The file is not such a table.
    """
    # pyarrow is optional: imported only when a table of tokens is read.
    parquet = require("pyarrow.parquet")
    try:
        table: Any = parquet.read_table(path)
        with np.errstate(invalid="raise"):  # a place that is absent is no number
            places = {
                name: np.asarray(table[name].to_numpy(zero_copy_only=False), np.int64)
                for name in PLACES
                if name != "prompt_name"
            }
        names = [str(name or "") for name in table["prompt_name"].to_pylist()]
        scores = {
            name: np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)
            for name in SCORES
        }
    except Exception as trouble:  # arrow raises its own kinds of exceptions
        reason = str(trouble).partition("\n")[0][:200] or type(trouble).__name__
        raise BadFile(f"{path} is no table of token scores: {reason}") from None
    return Tokens(places, names, scores)


def first_failing(
    start: Path, tokens: Tokens, limits: Mapping[str, float], text: Text | None
) -> dict[str, Any] | None:
    """The first token at or above a limit, with the likeliest tokens of both sides."""
    fails = np.zeros(len(tokens), np.bool_)
    for name, limit in limits.items():
        # Negated, so that a NaN score fails.
        fails |= ~(tokens.scores[name] < limit)
    if not fails.any():
        return None
    index = int(np.flatnonzero(fails)[0])
    seed, prompt, position, token = (
        int(tokens.places[name][index]) for name in ("seed", "prompt", "position", "token")
    )
    read: Text = text or _nothing
    sides: list[list[dict[str, Any]]] = []
    before = ""
    # Both sides, the reference first, as the page shows them.
    for labels in ((REFERENCE,), _LABELS):
        likeliest, context = _likeliest(start, labels, seed, prompt, position, read)
        sides.append(likeliest)
        before = before or context
    return {
        "seed": seed,
        "prompt": prompt,
        "name": tokens.names[index],
        "position": position,
        "token": token,
        "text": read(token),
        "before": before,
        "values": {name: float(tokens.scores[name][index]) for name in limits},
        "reference": sides[0],
        "candidate": sides[1],
    }


def _likeliest(
    start: Path, labels: Sequence[Any], seed: int, prompt: int, position: int, read: Text
) -> tuple[list[dict[str, Any]], str]:
    """The likeliest tokens of one side; none if its logits were not saved or cannot be read."""
    for label in labels:
        folder = start.with_name(out_name(start.name, label, seed))
        if not folder.is_dir():
            continue
        try:
            saved = read_prompt(folder, prompt)
        except (DriftlineError, ImportError):
            continue
        if saved.logits:
            row = np.asarray(cast("Any", saved.logits[0])[position].double().numpy())
            # Stable, so that equal logits come in the order of their ids on both sides.
            ids = np.argsort(-row, kind="stable")[:_LIKELIEST]
            logs = row[ids] - _log_sum(row)
        elif saved.top:
            top = cast("Mapping[str, Any]", saved.top[0])
            ids = np.asarray(top[INDICES][position].numpy())[:_LIKELIEST]
            values = np.asarray(top[VALUES][position].double().numpy())[:_LIKELIEST]
            # Only the largest logits were saved, together with the sum over all of
            # them.
            logs = values - float(top[NORM][position])
        else:
            continue
        # Saved tokens begin with the prompt; logits exist for generated ones only.
        length = len(saved.tokens[0]) - len((saved.logits or [saved.top[0][NORM]])[0])
        ahead = cast("Any", saved.tokens[0])[max(0, length + position - 32) : length + position]
        context = "".join(read(int(token)) for token in ahead)
        chosen = [
            {"token": int(token), "text": read(int(token)), "probability": float(np.exp(log))}
            for token, log in zip(ids, logs, strict=True)
        ]
        return chosen, context
    return [], ""


def _nothing(token: int) -> str:
    del token
    return ""


def _log_sum(row: Array) -> float:
    # Subtracted first: the exponential of a large logit overflows.
    top = float(row.max())
    return top + float(np.log(np.exp(row - top).sum()))


# Maps of layers against tokens: the error of each layer's output at each token.


FEWEST_STEPS = 3
"""The smallest number of steps for which a map is drawn."""
_METRIC = "relative_l2"
_MOST_TOKENS = 768
_MOST_LAYERS = 1024
_STATUS = {"pass": 1, "unjudged": 1, "fail": 2}


def of_steps(table: Table) -> dict[str, Any] | None:
    """The map of a comparison of several steps: tokens, batches, or iterations of training.

    A run does not say which of these they are, so they are called steps. None if there are too few.
    """
    rows = [row for row in table.rows if _drawn(row)]
    steps = sorted({row.step for row in rows})
    if len(steps) < FEWEST_STEPS:
        return None
    # Forward, backward and optimizer are below each other: training may go wrong in any of them.
    places = sorted(dict.fromkeys(map(_place, rows)), key=lambda place: PASSES.index(place[0]))
    places = places[:_MOST_LAYERS]
    place = {name: index for index, name in enumerate(places)}
    sites = [site for _, site in places]
    column = {step: index for index, step in enumerate(steps)}
    values = np.full((len(sites), len(steps)), np.nan)
    status = np.zeros((len(sites), len(steps)), np.uint8)
    limit = np.full(len(sites), np.nan)
    for row in rows:
        if _place(row) not in place:
            continue
        y, x = place[_place(row)], column[row.step]
        value = float(row.metrics.get(_METRIC, np.nan))
        # A site may be called several times in a step; the worst call counts.
        values[y, x] = value if np.isnan(values[y, x]) else max(values[y, x], value)
        status[y, x] = max(int(status[y, x]), _STATUS.get(row.status, 0))
        if row.decided_by == _METRIC and row.limit is not None:
            limit[y] = row.limit
    layer_map = _map(sites, np.asarray(steps), values, status, limit, _METRIC)
    return {"unit": "step", "passes": [name for name, _ in places], **layer_map}


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
    # Layers have one number per token; heads and caches have more, and are left out.
    sizes = Counter(len(values) for values in read.values())
    if not sizes:
        return None
    common = sizes.most_common(1)[0][0]
    layers = [layer for layer, values in read.items() if len(values) == common]
    if common < FEWEST_STEPS:
        return None
    values = np.stack([read[layer] for layer in layers])
    # These files have no limits, so only NaN is known to be wrong.
    status = np.where(np.isnan(values), 2, 0).astype(np.uint8)
    limit = np.full(len(layers), np.nan)
    layer_map = _map(layers, np.arange(common), values, status, limit, "abs_diff")
    return {"unit": "token", "passes": ["forward"] * len(layers), **layer_map}


def _drawn(row: Row) -> bool:
    if not row.compared or _METRIC not in row.metrics or pass_of(row.key) is None:
        return False
    # A module's second output, such as a cache, is no row of the map.
    return row.port != "output" or row.slot in _FIRST


def _place(row: Row) -> tuple[Pass, str]:
    return pass_of(row.key) or "forward", row.site


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
    """A key that the files of one shape share, whichever name of the number format they use.

    >>> shape_key(Path("a_max-new-tokens-8_batch-size-1_seq-length-64_dtype-float16.layers"))
    'a 8 1 64 fp16'
    """
    from driftline.decoding.files.names import parse_name

    named = parse_name(folder.name)
    if named is None:
        return folder.name
    # Two programs write the format of one model in two ways.
    formats = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    dtype = formats.get(named.dtype, named.dtype)
    return f"{named.model} {named.new_tokens} {named.batch_size} {named.length} {dtype}"
