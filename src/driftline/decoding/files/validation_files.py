"""The result of a validation on disk, for `driftline report` and for readers of JSON.

`{prefix}.validation.json` has verdict, rates, prompts and the first failing token with the most
probable tokens of both sides; `{prefix}.tokens.parquet` has the scores of every counted token, as
`driftline metrics` writes them. docs/decoders.md specifies both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from driftline.decoding.files.names import TOKEN_TABLE
from driftline.decoding.files.outputs import write_json
from driftline.decoding.files.token_table import write_part
from driftline.errors import DriftlineError

if TYPE_CHECKING:
    from driftline.decoding.failures import Candidate, FirstFailure
    from driftline.decoding.validate import Verdict

SCHEMA = "driftline.validation/1"
SUFFIX = ".validation.json"
_BEFORE = 32
"""Tokens of the text before the first failing one that are kept as text."""


def write_validation(verdict: Verdict, folder: Path, tokenizer: Any = None) -> Path:
    """Write both files of one model and shape; existing ones are replaced.

    Args:
        verdict: The result.
        folder: The folder; it is created if it does not exist.
        tokenizer: Turns ids into text; optional.

    Returns:
        The JSON file.

    Raises:
        DriftlineError: They cannot be written.
    """
    text = _token_text(tokenizer)
    path = folder / f"{verdict.options.prefix}{SUFFIX}"
    document = _document(verdict, text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if verdict.rows:
            table = folder / f"{verdict.options.prefix}{TOKEN_TABLE}"
            # Before the JSON file: if that exists, the table is complete.
            write_part(table, verdict.rows, {"settings": document["settings"]})
        write_json(path, document)
    except OSError as trouble:
        raise DriftlineError(
            f"the validation cannot be written to {folder}: {trouble.strerror}",
            hint="give another folder with --output",
        ) from None
    return path


def _document(verdict: Verdict, text: Callable[[int], str]) -> dict[str, Any]:
    options = verdict.options
    # Only the tokens that occur: a whole vocabulary would dwarf the rest of the file.
    ids = sorted({int(token) for rows in verdict.rows for token in rows.columns["token"]})
    return {
        "schema": SCHEMA,
        "verdict": "pass" if verdict.passed else "fail",
        "complaint": verdict.complaint,
        "settings": {
            "model": options.model,
            "batch_size": options.batch_size,
            "seq_length": options.length,
            "max_new_tokens": options.new_tokens,
            "dtype": options.candidate.dtype,
            "reference": str(options.reference),
            "candidate": str(options.candidate),
            "micro_layers": options.micro_layers,
            "rounds": options.rounds,
        },
        "tokens_equal": verdict.tokens_equal,
        # JSON has no tuples: readers get the same type from Python and from the file.
        "first_other": list(verdict.first_other) if verdict.first_other is not None else None,
        "limits": {
            "ce": options.limits.ce,
            "diff_mean": options.limits.mean_diff,
            "source": options.limits.source,
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
        # Digits below a millisecond say nothing: they differ from run to run.
        "seconds": round(verdict.seconds, 3),
    }


def _first(first: FirstFailure, text: Callable[[int], str]) -> dict[str, Any]:
    # A page shows where it happened, not the whole text.
    tokens = cast("list[int]", first.tokens[-_BEFORE:].tolist())  # pyright: ignore[reportUnknownMemberType]
    return {
        "seed": first.seed,
        "prompt": first.prompt,
        "name": first.name,
        "position": first.position,
        "token": first.token,
        "text": text(first.token),
        "before": "".join(text(int(token)) for token in tokens),
        "values": dict(first.values),
        "reference": [_choice(choice, text) for choice in first.reference],
        "candidate": [_choice(choice, text) for choice in first.candidate],
    }


def _choice(choice: Candidate, text: Callable[[int], str]) -> dict[str, Any]:
    return {
        "token": choice.token,
        "text": text(choice.token),
        "probability": choice.probability,
    }


def _token_text(tokenizer: Any) -> Callable[[int], str]:
    def read(token: int) -> str:
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    return read
