"""`driftline thresholds`: metric files of clean runs → lines and a thresholds file per model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import EXIT_FINE, BadInput, DriftlineError

_SHOWN = 8
"""Complaints about files, for each model; a model has hundreds of layers."""


def thresholds(
    *,
    models: Annotated[list[str] | None, Option(metavar="MODEL", several=True)] = None,
    metrics: Annotated[list[str] | None, Option(metavar="METRIC", several=True)] = None,
    file_base: Annotated[
        Path | None, Option(names=("--file_base", "--file-base"), metavar="DIR")
    ] = None,
    layer_io: Annotated[bool, Option(names=("--layer_io", "--layer-io"))] = False,
    statistic: Annotated[str | None, Option(metavar="NAME")] = None,
    seed: int = 0,
    output_path: Annotated[
        Path | None, Option(names=("--output_path", "--output-path", "-o"), metavar="DIR")
    ] = None,
) -> int:
    """Turn the metric files of clean runs into thresholds.

        driftline thresholds --models acme/tiny --metrics diff_mean ce --file_base out
        driftline thresholds --models acme/tiny --metrics abs_diff --file_base out --layer_io

    Reads what `driftline metrics` and `driftline layer-metrics` wrote, in DIR and the folders below
    it, prints one line per threshold, and writes {model}-thresholds.json there. Exit code 2 when a
    threshold could not be had; NaN among the values is one reason.

    Args:
        models: Ids or paths of the models, as they were given when the files were made.
        metrics: ce, diff_mean, prob_mean, prob_std, and over the whole vocabulary kl_rc, kl_cr,
            total_variation, top1_agree, rank_of_reference; with --layer_io abs_diff, cos_sim.
        file_base: The folder of the metric files.
        layer_io: One threshold per layer, from the files of layers.
        statistic: p99 (per token) and average (per layer) unless given: any percentile such as
            p99.9, counted towards the bad side, or average, median, max, std, l2.
        seed: Of the bootstrap that gives the confidence intervals.
        output_path: Where the thresholds files go instead of DIR.
    """
    if not models or not metrics or file_base is None:
        missing = "--models" if not models else "--metrics" if not metrics else "--file_base"
        raise BadInput(f"`driftline thresholds` needs {missing}", hint="see --help")
    from driftline.comparison.tolerance.statistics import parse_statistic
    from driftline.decoding.files.metric_files import find_metric_files, metric_name
    from driftline.decoding.files.names import flat_name, require_short
    from driftline.decoding.thresholds import (
        Lines,
        MadeThresholds,
        make_thresholds,
        write_thresholds,
    )

    chosen = None if statistic is None else parse_statistic(statistic)
    for word in metrics:
        metric_name(word, layers=layer_io)
    wanted = list(dict.fromkeys(model.rstrip("/") or model for model in models))
    for model in wanted:
        require_short(f"{flat_name(model)}-thresholds.json")
    found = script.step("files", find_metric_files, file_base)
    if not script.asked() and found.hashed and found.files:
        _said(found.passed_over)
    complaints: list[str] = []
    lines = _Lines()
    say = Lines(lines.print, complaints.append)
    unusable: list[str] = []
    unmade: list[DriftlineError] = []
    all_made: list[MadeThresholds] = []
    for model in wanted:
        goal = (output_path or file_base) / f"{flat_name(model)}-thresholds.json"
        try:
            made = script.step(
                "made",
                make_thresholds,
                found,
                model,
                metrics,
                say,
                folder=file_base,
                layers=layer_io,
                statistic=chosen,
                seed=seed,
            )
        except DriftlineError as trouble:
            if len(wanted) == 1:
                raise
            _said(str(trouble))
            unmade.append(trouble)
            continue
        finally:
            _complain(complaints)
        all_made.append(made)
        if script.asked():
            script.act(write_thresholds, made, goal)
            continue
        entries = made.thresholds.entries
        unusable += [
            f"{entry.metric} of {entry.site or model}" for entry in entries if not entry.usable
        ]
        if any(entry.usable for entry in entries):
            _said(write_thresholds(made, goal))
        for trouble in made.refused:
            _said(str(trouble))
        unmade += made.refused
    script.end(*all_made)
    lines.end()
    if unusable:
        one = len(unusable) == 1
        raise BadInput(
            f"{len(unusable)} threshold{' is' if one else 's are'} no number"
            f"{': ' if one else ', '}{unusable[0]}{'' if one else ' for one'}",
            hint="the values named above are why; such a threshold lets nothing pass",
        )
    if unmade:
        raise BadInput(
            "not every threshold could be had; the others were written", hint=unmade[0].hint
        )
    return EXIT_FINE


def _complain(complaints: list[str]) -> None:
    for line in complaints[:_SHOWN]:
        _said(line)
    if len(complaints) > _SHOWN:
        _said(f"and {len(complaints) - _SHOWN} more files of this kind")
    complaints.clear()


class _Lines:
    """What is found, line by line. A reader who leaves (`| head`) has not asked for no file."""

    def __init__(self) -> None:
        self._left: BrokenPipeError | None = None

    def print(self, line: str) -> None:
        from driftline.reporting.terminal import printable

        if self._left is None:
            try:
                print(printable(line), flush=True)
            except BrokenPipeError as left:
                self._left = left

    def end(self) -> None:
        if self._left is not None:
            raise self._left


def _said(line: str) -> None:
    from driftline.reporting.terminal import printable

    print(f"driftline: {printable(line)}", file=sys.stderr)
