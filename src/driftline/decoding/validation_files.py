"""What a validation found, on disk: for `driftline report`, and for whoever reads JSON.

`{prefix}.validation.json` has verdict, rates, prompts and the first failing token with both sides'
likeliest; `{prefix}.tokens.parquet` the scores of every kept token, as `driftline metrics` has
them; `{prefix}--{layer}.abs_diff.csv` a number per token of a layer. docs/decoders.md specifies
them. How any of it was found is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from driftline.comparison.table.table import Table
from driftline.decoding.explaining import explain
from driftline.decoding.failing import Candidate, FirstFailure
from driftline.decoding.layer_files import LayerFiles
from driftline.decoding.out_files import write_json
from driftline.decoding.score_table import write_part
from driftline.decoding.validate_ask import ValidateAsk
from driftline.decoding.validation import Subjects, Verdict
from driftline.errors import DriftlineError

SCHEMA = "driftline.validation/1"
SUFFIX = ".validation.json"
LAYERS = ".layers"
_BEFORE = 32
"""Tokens of the text before the first failing one that are kept as text."""


def write_validation(verdict: Verdict, folder: Path, tokenizer: Any = None) -> Path:
    """Write both files of one model and shape; what is there is replaced.

    Args:
        verdict: What was found.
        folder: Made if it is not there.
        tokenizer: Turns ids into text, where there is one.

    Returns:
        The JSON file.

    Raises:
        DriftlineError: They cannot be written.
    """
    text = _reader(tokenizer)
    place = folder / f"{verdict.ask.prefix}{SUFFIX}"
    document = _document(verdict, text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if verdict.rows:
            table = folder / f"{verdict.ask.prefix}.tokens.parquet"
            write_part(table, verdict.rows, {"settings": document["settings"]})
        write_json(place, document)
    except OSError as trouble:
        raise DriftlineError(
            f"the validation cannot be written to {folder}: {trouble.strerror}",
            hint="give another folder with --output",
        ) from None
    return place


def write_layers(ask: ValidateAsk, first: FirstFailure, subjects: Subjects, folder: Path) -> Table:
    """Compare all layers on the text before a failing token, and keep a number per token of each.

    Returns:
        The comparison, which is not judged yet; whoever judges it writes it.

    Raises:
        DriftlineError: No layer could be compared, or nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".driftline-", dir=folder) as desk:
            files = LayerFiles(Path(desk), ask.library)
            table = explain(ask, first, subjects, files=files)
            files.finish(folder, ask.prefix)
    except OSError as trouble:
        raise DriftlineError(
            f"the layers cannot be written to {folder}: {trouble.strerror}",
            hint="give another folder with --output",
        ) from None
    return table


def _document(verdict: Verdict, text: Callable[[int], str]) -> dict[str, Any]:
    ask = verdict.ask
    ids = sorted({int(token) for rows in verdict.rows for token in rows.columns["token"]})
    return {
        "schema": SCHEMA,
        "verdict": "pass" if verdict.passed else "fail",
        "complaint": verdict.complaint,
        "settings": {
            "model": ask.model,
            "batch_size": ask.batch_size,
            "seq_length": ask.length,
            "max_new_tokens": ask.new_tokens,
            "dtype": ask.candidate.dtype,
            "reference": str(ask.reference),
            "candidate": str(ask.candidate),
            "micro_layers": ask.micro_layers,
            "rounds": ask.rounds,
        },
        "tokens_equal": verdict.tokens_equal,
        "first_other": list(verdict.first_other) if verdict.first_other is not None else None,
        "limits": {
            "ce": ask.limits.ce,
            "diff_mean": ask.limits.mean_diff,
            "source": ask.limits.source,
        },
        "rates": [
            {
                "name": rate.check,
                "failing": rate.failing,
                "kept": rate.kept,
                "limit": rate.limit,
                "allowed": rate.allowed,
                "rate": rate.rate,
                "interval": list(rate.interval),
                "passed": rate.passed,
                "skipped": rate.skipped,
            }
            for rate in verdict.rates
        ],
        "prompts": [
            {
                "seed": prompt.seed,
                "prompt": prompt.prompt,
                "name": prompt.name,
                "kept": prompt.kept,
                "failing": dict(prompt.failing),
            }
            for prompt in verdict.prompts
        ],
        "agreed": verdict.agreed,
        "variation": verdict.variation,
        "first": None if verdict.first is None else _first(verdict.first, text),
        "texts": {str(token): text(token) for token in ids},
        "seconds": round(verdict.seconds, 3),
    }


def _first(first: FirstFailure, text: Callable[[int], str]) -> dict[str, Any]:
    kept = cast("list[int]", first.tokens[-_BEFORE:].tolist())  # pyright: ignore[reportUnknownMemberType]
    before = [int(token) for token in kept]
    return {
        "seed": first.seed,
        "prompt": first.prompt,
        "name": first.name,
        "position": first.position,
        "token": first.token,
        "text": text(first.token),
        "before": "".join(text(token) for token in before),
        "values": dict(first.values),
        "reference": [_choice(each, text) for each in first.reference],
        "candidate": [_choice(each, text) for each in first.candidate],
    }


def _choice(choice: Candidate, text: Callable[[int], str]) -> dict[str, Any]:
    return {
        "token": choice.token,
        "text": text(choice.token),
        "probability": choice.probability,
    }


def _reader(tokenizer: Any) -> Callable[[int], str]:
    def read(token: int) -> str:
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    return read
