"""Thresholds from the metric files of clean runs: what `driftline thresholds` does for one model.

Per token the 99th percentile, per layer the average, unless another statistic is asked for. All
shapes of a model are pooled, and each is also listed by itself. Knows no command line: lines to
print are passed to the caller one by one.
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
from driftline.decoding.files.metric_files import (
    LAYER_METRICS,
    TOKEN_METRICS,
    MetricFile,
    MetricFiles,
    Values,
    by_layer,
    differing_settings,
    metric_name,
    read_provenance,
    read_values,
)
from driftline.decoding.files.names import flat_name
from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.runs.provenance import provenance

_ENOUGH_BEYOND = 10
"""How many values must be beyond a percentile for a reliable limit."""
_KEPT_PROVENANCE = ("created", "driftline", "command", "cwd", "git", "python", "platform")


class MadeThresholds(NamedTuple):
    """Thresholds of a model, and the errors of requested thresholds that could not be made."""

    thresholds: Thresholds
    refused: list[DriftlineError]


class Lines(NamedTuple):
    """Functions that take lines at once: results, and warnings about them."""

    result: Callable[[str], None]
    warning: Callable[[str], None]


def make_thresholds(
    metric_files: MetricFiles,
    model: str,
    metrics: Sequence[str],
    lines: Lines,
    *,
    folder: Path,
    layers: bool = False,
    statistic: Statistic | None = None,
    seed: int = 0,
) -> MadeThresholds:
    """The thresholds of one model from its metric files; NaN if a value is NaN, or there is none.

    Args:
        metric_files: The files of the folder.
        model: Its id or path.
        metrics: Names of metrics, in the order to print.
        lines: Takes the documented lines, and warnings about NaN and empty files.
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
    work = _Collection(model, chosen, seed, lines, folder)
    for name in names:
        try:
            files = metric_files.of(model, name, layers=layers)
        except DriftlineError as trouble:
            work.refused.append(trouble)  # the other metrics are worth having
            continue
        lines.result(f"found {len(files)} {'layers ' if layers else ''}metric files")
        work.add(name, files, layers=layers)
    if not work.entries:
        raise work.refused[0]
    if not layers:  # the average of a layer does not hang on its worst values
        _warn_of_few_values(work.entries, chosen, lines)
    if mixed := differing_settings(work.targets):
        lines.warning(
            f"the files were made with more than one {' and '.join(mixed)}; all are pooled"
        )
    facts = provenance()
    thresholds = Thresholds(
        flat_name(model),
        tuple(work.entries),
        settings={
            "made_by": "driftline thresholds",
            "model": model.rstrip("/"),
            "statistic": chosen.name,
            "resamples": RESAMPLES,
            "confidence": CONFIDENCE,
            "seed": seed,
            "targets": work.targets,
        },
        sources=tuple(work.sources),
        provenance={name: facts[name] for name in _KEPT_PROVENANCE},
    )
    return MadeThresholds(thresholds, work.refused)


class _Collection:
    """Thresholds of one model as metric after metric is added."""

    def __init__(
        self, model: str, statistic: Statistic, seed: int, lines: Lines, folder: Path
    ) -> None:
        self.entries: list[Threshold] = []
        self.sources: list[str] = []
        self.targets: list[dict[str, str]] = []
        self.refused: list[DriftlineError] = []
        self._model = model
        self._statistic = statistic
        self._seed = seed
        self._lines = lines
        self._folder = folder

    def add(self, metric: str, files: Sequence[MetricFile], *, layers: bool) -> None:
        """One metric: a threshold for the model, or one for each layer."""
        made = read_provenance(files)
        groups = by_layer(files, made.layers) if layers else {"": list(files)}
        for layer, layer_files in groups.items():
            try:
                entry = _threshold(
                    metric, layer, layer_files, self._statistic, self._seed, self._lines
                )
            except DriftlineError as trouble:
                self.refused.append(trouble)
                continue
            self.entries.append(entry)
            # Relative, so that a thresholds file does not tell where somebody's folders are.
            self.sources += [file.path.relative_to(self._folder).as_posix() for file in layer_files]
            if layers:
                word = _word(self._statistic, entry)
                self._lines.result(f"Layer {layer} {word} {metric} = {entry.value}")
            else:
                self._lines.result(f"{flat_name(self._model)} {metric} {entry.value}")
        self.targets += [target for target in made.targets if target not in self.targets]


def _warn_of_few_values(entries: Sequence[Threshold], statistic: Statistic, lines: Lines) -> None:
    for samples in dict.fromkeys(entry.samples for entry in entries if entry.samples):
        if warning := _few(statistic, samples):
            metrics = ", ".join(entry.metric for entry in entries if entry.samples == samples)
            lines.warning(f"{metrics}: {warning}")


def write_thresholds(made: MadeThresholds, goal: Path) -> str:
    """Write the thresholds to a file; thresholds of other metrics in the file are kept.

    So one file can hold thresholds per token and per layer.

    Returns:
        A sentence about it.
    """
    fresh, others, replaced = made.thresholds, "", ""
    if goal.exists():
        try:
            older = load_thresholds(goal)
        # A damaged file is replaced, and the user is told: the values come from clean runs.
        except BadFile as trouble:
            replaced = f" ({trouble}; it was replaced)"
        else:
            rest = [name for name in older.metrics if name not in fresh.metrics]
            if rest:
                fresh = fresh.with_older(older)
                others = f", beside those of {', '.join(rest)} that were there"
    fresh.write(goal)
    return f"the thresholds are in {goal}{others}{replaced}"


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
    lines: Lines,
) -> Threshold:
    direction = (LAYER_METRICS if layer else TOKEN_METRICS)[metric]
    values: list[Values] = []
    for file in files:
        values.append(read_values(file.path, metric))
        _warn_of_odd_values(file, values[-1], lines)
    # Pooled, not averaged: an average of percentiles is not a percentile.
    pooled = np.concatenate(values)
    if not pooled.size:
        subject = f"layer {layer}" if layer else f"the model '{files[0].named.model}'"
        lines.warning(
            f"the {metric} files of {subject} hold no value: no token came before the end of "
            "text, or the run was broken off"
        )
    shapes: dict[tuple[Any, ...], list[Values]] = {}
    about: dict[tuple[Any, ...], dict[str, Any]] = {}
    # Each shape by itself as well: a limit of all may hide that one length is worse.
    for file, own_values in zip(files, values, strict=True):
        key = tuple(file.shape.values())
        about[key] = file.shape
        shapes.setdefault(key, []).append(own_values)
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
    """The warning about a percentile that depends on few values; empty if it does not.

    >>> _few(P99, 200)
    'the p99 of 200 values depends on the worst 2 of them; 1000 or more are needed for a limit'
    """
    if statistic.percentile is None or not 50.0 < statistic.percentile < 100.0:
        return ""
    beyond = 1.0 - statistic.percentile / 100.0
    if samples * beyond >= _ENOUGH_BEYOND:
        return ""
    # Rounded first: 10 / 0.01 is a little more than 1000 in floating point.
    needed = math.ceil(round(_ENOUGH_BEYOND / beyond, 6))
    return (
        f"the {statistic.name} of {samples} values depends on the worst "
        f"{max(1, round(samples * beyond))} of them; {needed} or more are needed for a limit"
    )


def _warn_of_odd_values(file: MetricFile, values: Values, lines: Lines) -> None:
    if not values.size:
        lines.warning(f"{file.path} holds no value")
        return
    for word, count in (("NaN", np.isnan(values).sum()), ("Inf", np.isinf(values).sum())):
        if count:
            lines.warning(f"{file.path}: {count} of {values.size} values are {word}")
