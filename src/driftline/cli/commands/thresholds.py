"""`driftline thresholds`: metric files of clean runs → printed lines and a thresholds file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import SEVERAL, spelt
from driftline.errors import EXIT_FINE, BadInput, DriftlineError

if TYPE_CHECKING:
    from driftline.decoding.thresholds import MadeThresholds

# At most this many complaints are printed for a model, which may have hundreds of layers.
MOST_COMPLAINTS = 8


def thresholds(
    *,
    models: Annotated[list[str] | None, SEVERAL, Parameter(metavar="MODEL")] = None,
    metrics: Annotated[list[str] | None, SEVERAL, Parameter(metavar="METRIC")] = None,
    file_base: Annotated[Path | None, spelt("file_base", "DIR")] = None,
    layer_io: Annotated[bool, spelt("layer_io")] = False,
    statistic: Annotated[str | None, Parameter(metavar="NAME")] = None,
    seed: Annotated[int, Parameter(metavar="N")] = 0,
    output_path: Annotated[Path | None, spelt("output_path", "DIR", "-o")] = None,
) -> int:
    """Turn the metric files of clean runs into thresholds.

        driftline thresholds --models acme/tiny --metrics diff_mean ce --file_base out
        driftline thresholds --models acme/tiny --metrics abs_diff --file_base out --layer_io

    Reads the files of `driftline metrics` and `driftline layer-metrics` in DIR and in the folders
    below it, prints one line per threshold, and writes {model}-thresholds.json to DIR. Exit code 2
    if a threshold could not be computed, for example because of NaN among the values.

    Args:
        models: Ids or paths of the models, as they were given when the files were made.
        metrics: ce, diff_mean, prob_mean, prob_std, and over the whole vocabulary kl_rc, kl_cr,
            total_variation, top1_agree, rank_of_reference; with --layer_io abs_diff, cos_sim.
        file_base: The folder of the metric files.
        layer_io: Make one threshold per layer, from the files of layers.
        statistic: A percentile such as p99.9, where p100 is the worst value, or average, median,
            max, std, l2. Default: p99 per token, average per layer.
        seed: Seed of the bootstrap that gives the confidence intervals.
        output_path: Folder of the thresholds files. Default: DIR.
    """
    if not models or not metrics or file_base is None:
        missing = "--models" if not models else "--metrics" if not metrics else "--file_base"
        raise BadInput(f"`driftline thresholds` needs {missing}", hint="see --help")
    from driftline.comparison.tolerance.statistics import parse_statistic
    from driftline.decoding.files.metric_files import find_metric_files, metric_name
    from driftline.decoding.files.names import flat_name, require_short

    chosen = None if statistic is None else parse_statistic(statistic)
    # All words are checked before the first file is read, which may take minutes.
    for word in metrics:
        metric_name(word, layers=layer_io)
    model_names = list(dict.fromkeys(model.rstrip("/") or model for model in models))
    for model in model_names:
        require_short(f"{flat_name(model)}-thresholds.json")
    files = script.step("files", find_metric_files, file_base)
    if not script.is_script() and files.hashed and files.files:
        _print_warning(files.passed_over)
    keywords = {"folder": file_base, "layers": layer_io, "statistic": chosen, "seed": seed}
    results = _ThresholdFiles(files, metrics, keywords)
    for model in model_names:
        path = (output_path or file_base) / f"{flat_name(model)}-thresholds.json"
        try:
            results.make(model, path)
        except DriftlineError as error:
            if len(model_names) == 1:
                results.print_complaints()
                raise
            # The other models may still succeed; the exit code reports the error at the end.
            _print_warning(str(error))
            results.print_complaints()
            results.errors.append(error)
    script.end(*results.made)
    results.lines.end()
    _refuse_incomplete(results.unusable, results.errors)
    return EXIT_FINE


class _ThresholdFiles:
    """Makes the thresholds of one model after another, and collects the errors."""

    def __init__(self, files: Any, metrics: list[str], keywords: dict[str, Any]) -> None:
        self.files = files
        self.metrics = metrics
        self.keywords = keywords
        self.lines = _Lines()
        self.complaints: list[str] = []
        self.made: list[MadeThresholds] = []
        self.unusable: list[str] = []
        self.errors: list[DriftlineError] = []

    def make(self, model: str, path: Path) -> None:
        """Print and write the thresholds of a model."""
        from driftline.decoding.thresholds import Lines, make_thresholds, write_thresholds

        say = Lines(self.lines.print, self.complaints.append)
        made = script.step(
            "made", make_thresholds, self.files, model, self.metrics, say, **self.keywords
        )
        self.print_complaints()
        self.made.append(made)
        if script.is_script():
            script.act(write_thresholds, made, path)
            return
        entries = made.thresholds.entries
        self.unusable += [
            f"{entry.metric} of {entry.site or model}" for entry in entries if not entry.usable
        ]
        if any(entry.usable for entry in entries):
            _print_warning(write_thresholds(made, path))
        for refusal in made.refused:
            _print_warning(str(refusal))
        self.errors += made.refused

    def print_complaints(self) -> None:
        """Print the complaints about files of the last model."""
        for line in self.complaints[:MOST_COMPLAINTS]:
            _print_warning(line)
        if len(self.complaints) > MOST_COMPLAINTS:
            _print_warning(f"and {len(self.complaints) - MOST_COMPLAINTS} more files of this kind")
        self.complaints.clear()


def _refuse_incomplete(unusable: list[str], errors: list[DriftlineError]) -> None:
    """Raise if thresholds are missing or unusable; the others were written."""
    if unusable:
        single = len(unusable) == 1
        raise BadInput(
            f"{len(unusable)} threshold{' is' if single else 's are'} no number"
            f"{': ' if single else ', '}{unusable[0]}{'' if single else ' for one'}",
            hint="the values named above are the reason; with such a threshold nothing passes",
        )
    if errors:
        raise BadInput(
            "some thresholds could not be computed; the others were written", hint=errors[0].hint
        )


class _Lines:
    """Prints results line by line. If a pipe is closed (`| head`), files are still written."""

    def __init__(self) -> None:
        self._closed: BrokenPipeError | None = None

    def print(self, line: str) -> None:
        from driftline.reporting.terminal import printable

        if self._closed is None:
            try:
                print(printable(line), flush=True)
            except BrokenPipeError as error:
                self._closed = error

    def end(self) -> None:
        """Raise the error of printing, now that all files are written."""
        if self._closed is not None:
            raise self._closed


def _print_warning(line: str) -> None:
    from driftline.reporting.terminal import printable

    print(f"driftline: {printable(line)}", file=sys.stderr)
