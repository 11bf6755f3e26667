"""Scores of generated tokens, and the first one that fails with both sides' likeliest.

Reads `.tokens.parquet`, and of the saved logits no more than one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.decoding.files.names import CANDIDATE, REFERENCE, out_name
from driftline.decoding.files.outputs import INDICES, NORM, VALUES, read_prompt
from driftline.decoding.files.token_table import PLACES, SCORES
from driftline.errors import BadFile, DriftlineError
from driftline.pages.columns import figures, words
from driftline.pages.packing import Array
from driftline.registry import require

_LIKELIEST = 5
_LABELS = (CANDIDATE, "aiu")

Text = Callable[[int], str]


class Tokens(NamedTuple):
    """Every kept token of one model and shape.

    Attributes:
        places: seed, prompt, position and token, as integers.
        names: The prompts' names.
        scores: The scores, as float64; what is absent is NaN.
    """

    places: Mapping[str, Array]
    names: Sequence[str]
    scores: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.places["seed"])

    def columns(self, text: Text | None) -> dict[str, Any]:
        """As docs/report-format.md has them."""
        shown = figures({**self.places, **self.scores})
        shown["prompt_name"] = words(list(self.names))
        if text is not None:
            known = {int(token): text(int(token)) for token in np.unique(self.places["token"])}
            shown["text"] = words([known[int(token)] for token in self.places["token"]])
        return {"count": len(self), "columns": shown}

    def prompts(self, bad: Mapping[str, Array]) -> list[dict[str, Any]]:
        """Failing tokens of every prompt, by metric."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for at in range(len(self)):
            seed, prompt = int(self.places["seed"][at]), int(self.places["prompt"][at])
            one = found.setdefault(
                (seed, prompt),
                {
                    "seed": seed,
                    "prompt": prompt,
                    "name": self.names[at],
                    "kept": 0,
                    "failing": dict.fromkeys(bad, 0),
                },
            )
            one["kept"] += 1
            for name, fails in bad.items():
                one["failing"][name] += int(fails[at])
        return list(found.values())


def read_tokens(path: Path) -> Tokens:
    """The table of tokens.

    Raises:
        BadFile: It is none.
    """
    parquet = require("pyarrow.parquet")
    try:
        table: Any = parquet.read_table(path)
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
    except (OSError, ValueError, KeyError, TypeError) as trouble:
        raise BadFile(f"{path} is no table of token scores: {trouble}") from None
    return Tokens(places, names, scores)


def first_failing(
    start: Path, tokens: Tokens, limits: Mapping[str, float], text: Text | None
) -> dict[str, Any] | None:
    """The first token at or above a limit, and what both sides would have said there."""
    fails = np.zeros(len(tokens), np.bool_)
    for name, limit in limits.items():
        fails |= ~(tokens.scores[name] < limit)
    if not fails.any():
        return None
    at = int(np.flatnonzero(fails)[0])
    seed, prompt, position, token = (
        int(tokens.places[name][at]) for name in ("seed", "prompt", "position", "token")
    )
    read: Text = text or _nothing
    sides: list[list[dict[str, Any]]] = []
    before = ""
    for labels in ((REFERENCE,), _LABELS):
        found, context = _likeliest(start, labels, seed, prompt, position, read)
        sides.append(found)
        before = before or context
    return {
        "seed": seed,
        "prompt": prompt,
        "name": tokens.names[at],
        "position": position,
        "token": token,
        "text": read(token),
        "before": before,
        "values": {name: float(tokens.scores[name][at]) for name in limits},
        "reference": sides[0],
        "candidate": sides[1],
    }


def _likeliest(
    start: Path, labels: Sequence[Any], seed: int, prompt: int, position: int, read: Text
) -> tuple[list[dict[str, Any]], str]:
    """Of one side; nothing where its logits were not saved, or cannot be read here."""
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
            ids = np.argsort(-row, kind="stable")[:_LIKELIEST]
            logs = row[ids] - _log_sum(row)
        elif saved.top:
            top = cast("Mapping[str, Any]", saved.top[0])
            ids = np.asarray(top[INDICES][position].numpy())[:_LIKELIEST]
            values = np.asarray(top[VALUES][position].double().numpy())[:_LIKELIEST]
            logs = values - float(top[NORM][position])
        else:
            continue
        length = len(saved.tokens[0]) - len((saved.logits or [saved.top[0][NORM]])[0])
        ahead = cast("Any", saved.tokens[0])[max(0, length + position - 32) : length + position]
        context = "".join(read(int(each)) for each in ahead)
        chosen = [
            {"token": int(each), "text": read(int(each)), "probability": float(np.exp(log))}
            for each, log in zip(ids, logs, strict=True)
        ]
        return chosen, context
    return [], ""


def _nothing(token: int) -> str:
    del token
    return ""


def _log_sum(row: Array) -> float:
    top = float(row.max())
    return top + float(np.log(np.exp(row - top).sum()))
