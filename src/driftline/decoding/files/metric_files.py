"""Metric files of a folder: which belong to a model, the values in them, and how they were made.

`{model}_max-new-tokens-N_batch-size-B_seq-length-S_dtype-D.ce.csv` holds one number per token,
`…--{layer}.abs_diff.csv` one per element or token row of a layer. Scores over the whole vocabulary
have no csv files: they are columns of `….tokens.parquet`. File names are parsed, never matched by
prefix: `tiny-v1` does not own the files of `tiny-v1-instruct`.

`driftline metrics` also writes `….provenance.json`, and `driftline layer-metrics` `….layers.json`.
Files of other tools have neither, and a damaged one is treated as absent, because only the order of
layers and a warning depend on it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.comparison.table.row import Direction
from driftline.decoding.files.names import (
    LAYER_PROVENANCE,
    PROVENANCE,
    TOKEN_TABLE,
    FileName,
    flat_name,
    parse_name,
)
from driftline.errors import BadFile, BadInput, did_you_mean

Values = np.ndarray[Any, np.dtype[np.float64]]

TOKEN_METRICS: dict[str, Direction] = {
    "ce": "lower",
    "diff_mean": "lower",
    "prob_mean": "lower",
    "prob_std": "lower",
    "kl_rc": "lower",
    "kl_cr": "lower",
    "total_variation": "lower",
    "top1_agree": "higher",
    "rank_of_reference": "lower",
}
COMPANIONS = ("kl_rc", "kl_cr", "total_variation", "top1_agree", "rank_of_reference")
"""Those of them that only the table of tokens has."""
LAYER_METRICS: dict[str, Direction] = {"abs_diff": "lower", "cos_sim": "higher"}
SPELLINGS = {"mean_diff": "diff_mean", "cos_sim_avg": "cos_sim", "cos_sim_mean": "cos_sim"}
"""Other names of these metrics that are in use."""

MOST_FOLDERS = 10_000
_BLOCK = 1 << 24
_LONGEST_LINE = 1 << 12
_ITERATION = re.compile(r"\.iter-\d+$")
_HEADING = re.compile(rb"(?:GPU|CPU|Metric|Reference|Candidate) shape .*", re.IGNORECASE)
_HASHED = re.compile(r"[0-9a-f]{64}(_\d+\.\d+\.\d+)?[.-].*\.csv")
_UNFINISHED = ".driftline-"
MOST_BYTES = 64 << 20
_DTYPE = re.compile(r"dtype=\w+,?|,dtype=\w+")
_SETTINGS = ("library", "weights", "reference", "candidate", "mode")
_DIGITS = re.compile(r"(\d+)")


class MetricFile(NamedTuple):
    """One file of values.

    Attributes:
        path: Where it is.
        named: What its name says.
        metric: Whose values it holds.
        layer: The layer they are of; empty for values per token.
    """

    path: Path
    named: FileName
    metric: str
    layer: str

    @property
    def shape(self) -> dict[str, int | str]:
        """What the name says of the shape, as thresholds files write it."""
        return {
            "batch_size": self.named.batch_size,
            "seq_length": self.named.length,
            "max_new_tokens": self.named.new_tokens,
            "dtype": self.named.dtype,
        }


class MetricFiles(NamedTuple):
    """The metric files of a folder and its subfolders; `hashed` counts names that say nothing."""

    files: list[MetricFile]
    hashed: int

    def models(self) -> list[str]:
        return sorted({file.named.model for file in self.files})

    @property
    def passed_over(self) -> str:
        """A sentence about files with hashed names; empty if there are none."""
        if not self.hashed:
            return ""
        if self.hashed == 1:
            return "1 file has a hashed name, which does not say its model or shape: it is not used"
        return (
            f"{self.hashed} files have hashed names, which do not say their model or shape: they "
            "are not used"
        )

    def of(self, model: str, metric: str, *, layers: bool) -> list[MetricFile]:
        """The files of one model and metric, in the order of their names.

        Raises:
            BadInput: There is none.
        """
        # The hint names the most likely mistake: the other level, a similar model, hashed names.
        own_files = [file for file in self.files if file.named.model == flat_name(model)]
        wanted = [
            file for file in own_files if file.metric == metric and bool(file.layer) == layers
        ]
        if wanted:
            return wanted
        what = "layer files" if layers else "files"
        if own_files:
            metrics = sorted({file.metric for file in own_files if bool(file.layer) == layers})
            hint = f"there are {what} of {', '.join(metrics)}" if metrics else ""
            if not metrics:
                hint = (
                    "its files are per token: leave --layer_io out"
                    if layers
                    else "its files are per layer: add --layer_io"
                )
            raise BadInput(f"there are no {what} of {metric} for the model '{model}'", hint=hint)
        if self.hashed and not self.files:
            hint = self.passed_over
        elif self.files:
            hint = did_you_mean(flat_name(model), self.models())
        else:
            hint = "`driftline metrics` and `driftline layer-metrics` write them"
        raise BadInput(f"there are no metric files of the model '{model}'", hint=hint)


def metric_name(word: str, *, layers: bool) -> str:
    """A metric by any of its names.

    Raises:
        BadInput: There is no such metric, or not at this level.
    """
    name = SPELLINGS.get(word, word)
    metrics, others = (LAYER_METRICS, TOKEN_METRICS) if layers else (TOKEN_METRICS, LAYER_METRICS)
    if name in metrics:
        return name
    if name in others:
        raise BadInput(
            f"{word} is a metric of {'tokens' if layers else 'layers'}",
            hint="leave --layer_io out" if layers else "add --layer_io",
        )
    raise BadInput(f"there is no metric '{word}'", hint=did_you_mean(word, metrics))


def find_metric_files(folder: Path, *, below: bool = True) -> MetricFiles:
    """Look for metric files in a folder and all below it; links to folders are not followed.

    Args:
        folder: Where.
        below: Whether folders below it count.

    Raises:
        BadInput: There is no such folder.
    """
    if not folder.is_dir():
        raise BadInput(
            f"{folder} is {'a file' if folder.exists() else 'not there'}; a folder of metric files "
            "is needed",
            hint="`driftline metrics` and `driftline layer-metrics` write them",
        )
    metric_files = MetricFiles([], 0)
    hashed = 0
    for path in _metric_files(folder, below=below):
        if path.name.endswith(TOKEN_TABLE):
            metric_files.files.extend(_columns(path))
            continue
        file = _read_name(path)
        if file is not None:
            metric_files.files.append(file)
        elif _HASHED.fullmatch(path.name):
            hashed += 1
    metric_files.files.sort(key=lambda file: (natural(file.path.name), str(file.path)))
    return metric_files._replace(hashed=hashed)


def _metric_files(folder: Path, *, below: bool) -> Iterator[Path]:
    for count, (place, inside, names) in enumerate(os.walk(folder, onerror=_refuse)):
        # A wrong folder, such as the home folder, is refused in seconds, not walked for hours.
        if count > MOST_FOLDERS:
            raise BadInput(
                f"{folder} has more than {MOST_FOLDERS} folders below it",
                hint="give --file_base a folder nearer to the files",
            )
        # Saved logits are folders too, and hold no csv; hidden ones hold what is not finished.
        inside[:] = sorted(
            name
            for name in inside
            if below and not name.endswith(".out") and not name.startswith(_UNFINISHED)
        )
        yield from (
            Path(place, name) for name in sorted(names) if name.endswith((".csv", TOKEN_TABLE))
        )


def _refuse(trouble: OSError) -> None:
    raise BadInput(
        f"{trouble.filename} cannot be read: {trouble.strerror}",
        hint="give --file_base a folder that can be read",
    )


def _columns(path: Path) -> Iterator[MetricFile]:
    """The table of tokens, once for each score that nothing else holds."""
    named = parse_name(path.name)
    # The documented four have csv files; taking them from here too would count them twice.
    if named is not None and named.rest == TOKEN_TABLE and path.is_file():
        yield from (MetricFile(path, named, metric, "") for metric in COMPANIONS)


def _read_name(path: Path) -> MetricFile | None:
    named = parse_name(path.name)
    if named is None or not path.is_file():  # reading a pipe of that name would never end
        return None
    start, _, metric = named.rest.removesuffix(".csv").rpartition(".")
    _, dashes, layer = start.partition("--")
    # Older tools write one file per iteration; all of a layer are pooled.
    if metric in LAYER_METRICS and dashes and layer:
        return MetricFile(path, named, metric, _ITERATION.sub("", layer))
    if metric in TOKEN_METRICS and metric not in COMPANIONS and not dashes:
        return MetricFile(path, named, metric, "")
    return None


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sorting key that puts layers9 before layers10."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name) if part
    )


def by_layer(files: Iterable[MetricFile], order: Sequence[str] = ()) -> dict[str, list[MetricFile]]:
    """The files of each layer, all iterations together, in the order a model runs them.

    Args:
        files: Files of layers.
        order: Layers in the order they ran, if it is known; that of usual decoders otherwise.
    """
    layers: dict[str, list[MetricFile]] = {}
    for file in files:
        layers.setdefault(file.layer, []).append(file)
    positions = {layer: index for index, layer in enumerate(order)}
    ordered = sorted(
        layers, key=lambda layer: (positions.get(layer, len(positions)), _execution(layer))
    )
    return {layer: layers[layer] for layer in ordered}


_ORDER = (
    *("embedding", "embed_tokens", "wte", "wpe", "embeddings", "rotary_emb"),
    *("layers", "h", "blocks"),
    *("ln", "input_layernorm", "ln_1", "attn", "self_attn", "in_proj", "query", "key", "value"),
    *("q_proj", "k_proj", "v_proj", "dense", "o_proj"),
    *("ff_ln", "post_attention_layernorm", "ln_2", "ff_sub_layer", "mlp"),
    *("wg", "gate_proj", "a", "act_fn", "w1", "up_proj", "w2", "down_proj"),
    *("dec_norm", "norm", "ln_f", "base_model", "model", "head", "lm_head"),
)
"""The usual order of the parts of decoders; file names do not show the order of layers."""
_PLACE = {word: index for index, word in enumerate(_ORDER)}


def _execution(layer: str) -> tuple[Any, ...]:
    """Children before the module they are part of, unknown parts after the known ones, by name."""
    split = re.sub(r"(?<=[A-Za-z_])\[?(\d+)\]?(?=\.|$)", _spread, layer).split(".")
    places = [
        (int(part), "") if part.isdigit() else (_PLACE.get(part, len(_ORDER)), part)
        for part in split
    ]
    return (*places, (1 << 60, ""))


def _spread(match: re.Match[str]) -> str:
    """Separate a number from its list: `layers7` is layer 7, but `w1` is a name."""
    before = match.string[: match.start()].rpartition(".")[2]
    return f".{match[1]}" if before in ("layers", "h", "blocks") else match[0]


def read_values(path: Path, metric: str) -> Values:
    """The numbers of one file, whatever heading it has.

    Raises:
        BadFile: It cannot be read, begins with another metric, or a line is no number.
    """
    if path.name.endswith(TOKEN_TABLE):
        from driftline.decoding.files.token_table import read_columns

        return read_columns(path, [metric])[metric]
    parts: list[Values] = []
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_LINE).strip()
            if first.decode("utf-8", "replace") not in _headings(metric):
                heading = first[:40].decode("utf-8", "backslashreplace")
                raise BadFile(f"{path} begins with '{heading}', not with the name of its metric")
            line = 2
            start = file.tell()
            while _HEADING.fullmatch(file.readline(_LONGEST_LINE).strip()):
                line += 1
                start = file.tell()
            file.seek(start)
            # Blocks that end with a line: the file may be larger than memory should hold as text.
            while block := file.read(_BLOCK):
                block += file.readline(_LONGEST_LINE)
                parts.append(_numbers(block, path, line))
                line += block.count(b"\n")
    except OSError as trouble:
        raise BadFile(
            f"{path} cannot be read: {trouble.strerror}",
            hint="give --file_base a folder that can be read",
        ) from None
    return np.concatenate(parts) if parts else np.empty(0)


def _headings(metric: str) -> tuple[str, ...]:
    return (metric, *(word for word, name in SPELLINGS.items() if name == metric))


def _numbers(text: bytes, path: Path, line: int) -> Values:
    """A number per line; numpy's own reader of text, which is fast, does not say where it stops."""
    text = text.rstrip()
    if not text:
        return np.empty(0)
    try:
        with warnings.catch_warnings():  # what older numpy gives where newer ones raise
            warnings.simplefilter("ignore", DeprecationWarning)
            values = np.fromstring(text, np.float64, sep="\n")
    except ValueError:
        values = np.empty(0)
    # numpy takes blanks for separators, so a line with one would become two numbers.
    if len(values) == text.count(b"\n") + 1 and b" " not in text and b"\t" not in text:
        return values
    slowly: list[float] = []
    for index, word in enumerate(text.split(b"\n")):
        if not word.strip():
            continue
        try:
            slowly.append(float(word))
        except ValueError:
            shown = word[:40].decode("utf-8", "backslashreplace").strip()
            raise BadFile(f"{path}: line {line + index} is '{shown}', which is no number") from None
    return np.array(slowly)


class Provenance(NamedTuple):
    """How metric files were made, as far as the files in the same folder show.

    Attributes:
        targets: Each kind of run that was pooled: reference, candidate, weights, ….
        layers: Layers in the order they ran; empty if nothing says it.
    """

    targets: list[dict[str, str]]
    layers: list[str]


def read_provenance(files: Iterable[MetricFile]) -> Provenance:
    """Read how these files were made from the files in the same folder."""
    provenance = Provenance([], [])
    for path in dict.fromkeys(path for file in files for path in _provenance_paths(file)):
        content = _read(path)
        settings = content.get("settings")
        if isinstance(settings, dict):
            saved = cast("dict[str, Any]", settings)
            target = {name: str(saved[name]) for name in _SETTINGS if name in saved}
            if target and target not in provenance.targets:
                provenance.targets.append(target)
        layers = content.get("layers")
        if isinstance(layers, dict):
            listed = set(provenance.layers)
            names = map(str, cast("dict[str, Any]", layers))
            provenance.layers.extend(name for name in names if name not in listed)
    return provenance


def differing_settings(targets: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings in which several kinds of runs differ, except the number format.

    Settings that a run does not name are ignored: older versions record fewer.

    >>> differing_settings([{"weights": "a", "mode": "x"}, {"weights": "b", "mode": "x"}])
    ['weights']
    """
    names = sorted({name for target in targets for name in target})
    return [
        name
        for name in names
        if len({_without_dtype(target[name]) for target in targets if name in target}) > 1
    ]


def _without_dtype(value: str) -> str:
    # Formats are pooled on purpose, and written down with each threshold.
    return _DTYPE.sub("", value)


def _provenance_paths(file: MetricFile) -> list[Path]:
    # `rest` begins where the name of the model and shape ends.
    start = file.path.name.removesuffix(file.named.rest)
    return [file.path.with_name(start + suffix) for suffix in (PROVENANCE, LAYER_PROVENANCE)]


def _read(path: Path) -> dict[str, Any]:
    try:
        # A file that large is no provenance of ours, and would fill the memory.
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
