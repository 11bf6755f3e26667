"""Metric files of a folder: which belong to a model, and the values in them.

`{model}_max-new-tokens-N_batch-size-B_seq-length-S_dtype-D.ce.csv` holds a number per token,
`…--{layer}.abs_diff.csv` a number per element or token row of one layer. Scores over the whole
vocabulary have no csv files: they are columns of `….tokens.parquet`. A name is taken apart, never
matched by its beginning: `tiny-v1` does not own the files of `tiny-v1-instruct`. What is made of
the values is not known here.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.comparison.table.row import Direction
from driftline.decoding.out_files import Named, flat, parse
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
_TABLE = ".tokens.parquet"
_UNFINISHED = ".driftline-"
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
    named: Named
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


class Found(NamedTuple):
    """The metric files of a folder and its subfolders; `hashed` counts names that say nothing."""

    files: list[MetricFile]
    hashed: int

    def models(self) -> list[str]:
        return sorted({file.named.model for file in self.files})

    @property
    def passed_over(self) -> str:
        """What is to be said of hashed names; empty if there are none."""
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
        mine = [file for file in self.files if file.named.model == flat(model)]
        wanted = [file for file in mine if file.metric == metric and bool(file.layer) == layers]
        if wanted:
            return wanted
        what = "layer files" if layers else "files"
        if mine:
            there = sorted({file.metric for file in mine if bool(file.layer) == layers})
            hint = f"there are {what} of {', '.join(there)}" if there else ""
            if not there:
                hint = (
                    "its files are per token: leave --layer_io out"
                    if layers
                    else "its files are per layer: add --layer_io"
                )
            raise BadInput(f"there are no {what} of {metric} for the model '{model}'", hint=hint)
        if self.hashed and not self.files:
            hint = self.passed_over
        elif self.files:
            hint = did_you_mean(flat(model), self.models())
        else:
            hint = "`driftline metrics` and `driftline layer-metrics` write them"
        raise BadInput(f"there are no metric files of the model '{model}'", hint=hint)


def metric_name(word: str, *, layers: bool) -> str:
    """A metric by any of its names.

    Raises:
        BadInput: There is no such metric, or not at this level.
    """
    name = SPELLINGS.get(word, word)
    known, others = (LAYER_METRICS, TOKEN_METRICS) if layers else (TOKEN_METRICS, LAYER_METRICS)
    if name in known:
        return name
    if name in others:
        raise BadInput(
            f"{word} is a metric of {'tokens' if layers else 'layers'}",
            hint="leave --layer_io out" if layers else "add --layer_io",
        )
    raise BadInput(f"there is no metric '{word}'", hint=did_you_mean(word, known))


def find_metric_files(folder: Path, *, below: bool = True) -> Found:
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
    found = Found([], 0)
    hashed = 0
    for path in _metric_files(folder, below=below):
        if path.name.endswith(_TABLE):
            found.files.extend(_columns(path))
            continue
        file = _read_name(path)
        if file is not None:
            found.files.append(file)
        elif _HASHED.fullmatch(path.name):
            hashed += 1
    found.files.sort(key=lambda file: (natural(file.path.name), str(file.path)))
    return found._replace(hashed=hashed)


def _metric_files(folder: Path, *, below: bool) -> Iterator[Path]:
    for count, (place, inside, names) in enumerate(os.walk(folder, onerror=_refuse)):
        if count > MOST_FOLDERS:
            raise BadInput(f"{folder} has more than {MOST_FOLDERS} folders below it")
        # Saved logits are folders too, and hold no csv; hidden ones hold what is not finished.
        inside[:] = sorted(
            name
            for name in inside
            if below and not name.endswith(".out") and not name.startswith(_UNFINISHED)
        )
        yield from (Path(place, name) for name in sorted(names) if name.endswith((".csv", _TABLE)))


def _refuse(trouble: OSError) -> None:
    raise BadInput(f"{trouble.filename} cannot be read: {trouble.strerror}")


def _columns(path: Path) -> Iterator[MetricFile]:
    """The table of tokens, once for each score that nothing else holds."""
    named = parse(path.name)
    if named is not None and named.rest == _TABLE and path.is_file():
        yield from (MetricFile(path, named, metric, "") for metric in COMPANIONS)


def _read_name(path: Path) -> MetricFile | None:
    named = parse(path.name)
    if named is None or not path.is_file():  # reading a pipe of that name would never end
        return None
    start, _, metric = named.rest.removesuffix(".csv").rpartition(".")
    _, dashes, layer = start.partition("--")
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
    known = {layer: at for at, layer in enumerate(order)}
    ordered = sorted(layers, key=lambda layer: (known.get(layer, len(known)), _execution(layer)))
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
"""Where the parts of usual decoders stand; file names do not say in which order layers ran."""
_PLACE = {word: at for at, word in enumerate(_ORDER)}


def _execution(layer: str) -> tuple[Any, ...]:
    """Children before the module they are part of, unknown parts after the known ones, by name."""
    split = re.sub(r"(?<=[A-Za-z_])\[?(\d+)\]?(?=\.|$)", _spread, layer).split(".")
    wholes = [
        (int(part), "") if part.isdigit() else (_PLACE.get(part, len(_ORDER)), part)
        for part in split
    ]
    return (*wholes, (1 << 60, ""))


def _spread(match: re.Match[str]) -> str:
    """`layers7` is layer 7; `w1` is a name of its own."""
    before = match.string[: match.start()].rpartition(".")[2]
    return f".{match[1]}" if before in ("layers", "h", "blocks") else match[0]


def read_values(path: Path, metric: str) -> Values:
    """The numbers of one file, whatever heading it has.

    Raises:
        BadFile: It cannot be read, begins with another metric, or a line is no number.
    """
    if path.name.endswith(_TABLE):
        from driftline.decoding.score_table import read_columns

        return read_columns(path, [metric])[metric]
    parts: list[Values] = []
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_LINE).strip()
            if first.decode("utf-8", "replace") not in _headings(metric):
                said = first[:40].decode("utf-8", "backslashreplace")
                raise BadFile(f"{path} begins with '{said}', not with the name of its metric")
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
        raise BadFile(f"{path} cannot be read: {trouble.strerror}") from None
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
    if len(values) == text.count(b"\n") + 1 and b" " not in text and b"\t" not in text:
        return values
    slowly: list[float] = []
    for at, word in enumerate(text.split(b"\n")):
        if not word.strip():
            continue
        try:
            slowly.append(float(word))
        except ValueError:
            said = word[:40].decode("utf-8", "backslashreplace").strip()
            raise BadFile(f"{path}: line {line + at} is '{said}', which is no number") from None
    return np.array(slowly)
