"""Metric files of clean runs become thresholds: what `driftline thresholds` does for one model.

Per token the 99th percentile, per layer the average, unless another statistic is asked for. All
shapes of a model are pooled, and each is also kept by itself. Knows no command line: what there is
to print is handed to the caller line by line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.comparison.tolerance.statistics import AVERAGE, CONFIDENCE, P99, RESAMPLES, Statistic
from driftline.comparison.tolerance.thresholds import (
    OUTPUT,
    PerShape,
    Threshold,
    Thresholds,
    load_thresholds,
)
from driftline.decoding.metric_files import (
    LAYER_METRICS,
    TOKEN_METRICS,
    Found,
    MetricFile,
    Values,
    by_layer,
    metric_name,
    read_values,
)
from driftline.decoding.out_files import flat
from driftline.decoding.told import differing, told_beside
from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.runs.provenance import provenance

_ENOUGH_BEYOND = 10
"""Values beyond a percentile that make it a limit rather than an accident."""
_KEPT_PROVENANCE = ("created", "driftline", "command", "cwd", "git", "python", "platform")


class Made(NamedTuple):
    """Thresholds of a model, and what stood in the way of those that were asked for as well."""

    thresholds: Thresholds
    refused: list[DriftlineError]


class Say(NamedTuple):
    """Where lines go as they are found: results, and what is wrong with them."""

    result: Callable[[str], None]
    trouble: Callable[[str], None]


def make_thresholds(
    found: Found,
    model: str,
    metrics: Sequence[str],
    say: Say,
    *,
    folder: Path,
    layers: bool = False,
    statistic: Statistic | None = None,
    seed: int = 0,
) -> Made:
    """The thresholds of one model from its metric files; NaN where a value is NaN, or none is.

    Args:
        found: The files of the folder.
        model: Its id or path.
        metrics: Names of metrics, in the order to print.
        say: Takes the documented lines, and what is to be said of NaN and empty files.
        folder: Where the files are; sources are written down relative to it.
        layers: Per layer instead of per token.
        statistic: Instead of the 99th percentile, or the average of a layer.
        seed: Of the bootstrap.

    Raises:
        BadInput: An unknown metric, or no file of any metric.
        BadFile: Files that cannot be read, and nothing else was found.
    """
    chosen = statistic or (AVERAGE if layers else P99)
    names = list(dict.fromkeys(metric_name(word, layers=layers) for word in metrics))
    if not names:
        raise BadInput("no metric is named", hint="--metrics ce diff_mean")
    entries: list[Threshold] = []
    sources: list[str] = []
    targets: list[dict[str, str]] = []
    refused: list[DriftlineError] = []
    for name in names:
        try:
            files = found.of(model, name, layers=layers)
        except DriftlineError as trouble:
            refused.append(trouble)  # the other metrics are worth having
            continue
        say.result(f"found {len(files)} {'layers ' if layers else ''}metric files")
        told = told_beside(files)
        for layer, mine in (by_layer(files, told.layers) if layers else {"": files}).items():
            try:
                entry = _threshold(name, layer, mine, chosen, seed, say)
            except DriftlineError as trouble:
                refused.append(trouble)
                continue
            entries.append(entry)
            sources += [file.path.relative_to(folder).as_posix() for file in mine]
            if layers:
                say.result(f"Layer {layer} {_word(chosen, entry)} {name} = {entry.value}")
            else:
                say.result(f"{flat(model)} {name} {entry.value}")
        targets += [target for target in told.targets if target not in targets]
    if not entries:
        raise refused[0]
    for size in dict.fromkeys(entry.samples for entry in entries if not layers and entry.samples):
        if few := _few(chosen, size):
            of = ", ".join(entry.metric for entry in entries if entry.samples == size)
            say.trouble(f"{of}: {few}")
    if mixed := differing(targets):
        say.trouble(f"the files were made with more than one {' and '.join(mixed)}; all are pooled")
    facts = provenance()
    thresholds = Thresholds(
        flat(model),
        tuple(entries),
        settings={
            "made_by": "driftline thresholds",
            "model": model.rstrip("/"),
            "statistic": chosen.name,
            "resamples": RESAMPLES,
            "confidence": CONFIDENCE,
            "seed": seed,
            "targets": targets,
        },
        sources=tuple(sources),
        provenance={name: facts[name] for name in _KEPT_PROVENANCE},
    )
    return Made(thresholds, refused)


def write_beside(made: Made, goal: Path) -> str:
    """Write them; what other metrics have in the file already stays in it.

    Per token and per layer go into one file so.

    Returns:
        A sentence about it.
    """
    fresh, beside, replaced = made.thresholds, "", ""
    if goal.exists():
        try:
            older = load_thresholds(goal)
        except BadFile as trouble:
            replaced = f" ({trouble}; it was replaced)"
        else:
            rest = [name for name in older.metrics if name not in fresh.metrics]
            if rest:
                fresh = fresh.kept_beside(older)
                beside = f", beside those of {', '.join(rest)} that were there"
    fresh.write(goal)
    return f"the thresholds are in {goal}{beside}{replaced}"


def _word(statistic: Statistic, entry: Threshold) -> str:
    if statistic.name == "max" and entry.direction == "higher":
        return "min"  # the worst of a cosine
    return "avg" if statistic.name == "average" else statistic.name


def _threshold(
    metric: str,
    layer: str,
    files: Sequence[MetricFile],
    statistic: Statistic,
    seed: int,
    say: Say,
) -> Threshold:
    direction = (LAYER_METRICS if layer else TOKEN_METRICS)[metric]
    values: list[Values] = []
    for file in files:
        values.append(read_values(file.path, metric))
        _complain(file, values[-1], say)
    pooled = np.concatenate(values)
    if not pooled.size:
        of = f"layer {layer}" if layer else f"the model '{files[0].named.model}'"
        say.trouble(
            f"the {metric} files of {of} hold no value: no token came before the end of text, or "
            "the run was broken off"
        )
    shapes: dict[tuple[Any, ...], list[Values]] = {}
    about: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file, mine in zip(files, values, strict=True):
        key = tuple(file.shape.values())
        about[key] = file.shape
        shapes.setdefault(key, []).append(mine)
    per_shape = [
        PerShape(about[key], statistic.of(together, direction), together.size)
        for key, together in ((key, np.concatenate(own)) for key, own in shapes.items())
        if together.size
    ]
    value = statistic.of(pooled, direction)
    return Threshold(
        metric,
        value,
        layer,
        OUTPUT if layer else "",
        statistic.name,
        direction,
        samples=pooled.size,
        interval=statistic.interval(pooled, direction, seed=seed),
        observed=value,
        nan=int(np.isnan(pooled).sum()),
        inf=int(np.isinf(pooled).sum()),
        dtypes=tuple(dict.fromkeys(file.named.dtype for file in files)),
        shapes=tuple(per_shape),
    )


def _few(statistic: Statistic, samples: int) -> str:
    """What to say of a percentile that hangs on a few values; nothing if it does not.

    >>> _few(P99, 200)
    'the p99 of 200 values hangs on the worst 2 of them; 1000 or more are needed for a limit'
    """
    if statistic.percentile is None or not 50.0 < statistic.percentile < 100.0:
        return ""
    beyond = 1.0 - statistic.percentile / 100.0
    if samples * beyond >= _ENOUGH_BEYOND:
        return ""
    needed = math.ceil(round(_ENOUGH_BEYOND / beyond, 6))
    return (
        f"the {statistic.name} of {samples} values hangs on the worst "
        f"{max(1, round(samples * beyond))} of them; {needed} or more are needed for a limit"
    )


def _complain(file: MetricFile, values: Values, say: Say) -> None:
    if not values.size:
        say.trouble(f"{file.path} holds no value")
        return
    for word, count in (("NaN", np.isnan(values).sum()), ("Inf", np.isinf(values).sum())):
        if count:
            say.trouble(f"{file.path}: {count} of {values.size} values are {word}")
