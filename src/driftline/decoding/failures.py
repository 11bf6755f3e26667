"""Counts failing tokens by check and prompt, and records the first failing token.

Counts and scores grow round by round; only the logits of the first failing token are kept. The
limits are given by the caller.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driftline.decoding.files.outputs import Outputs
from driftline.decoding.files.token_table import Rows

if TYPE_CHECKING:
    import torch

CHECKS = {"mean_diff": ("mean diff", "diff_mean"), "ce": ("cross entropy loss", "ce")}
"""The two checks, in the order in which they are judged: name in messages, and column."""
SHOWN = 5
"""How many of the likeliest tokens of each side are shown at the first failing token."""


class Rate(NamedTuple):
    """How many tokens fail one check.

    Attributes:
        check: `ce` or `mean_diff`.
        failing: Tokens at or above the limit.
        kept: Tokens that count.
        limit: A token fails if its value reaches this.
        allowed: The fraction of failing tokens must stay below this.
        skipped: It is reported, but not judged.
    """

    check: str
    failing: int
    kept: int
    limit: float
    allowed: float
    skipped: bool = False

    @property
    def called(self) -> str:
        return CHECKS[self.check][0]

    @property
    def rate(self) -> float:
        return self.failing / self.kept

    @property
    def passed(self) -> bool:
        return self.skipped or self.rate < self.allowed

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the rate (Wilson's), which treats tokens as independent."""
        z, n, p = 1.959963984540054, self.kept, self.rate
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        # At the ends rounding would leave tiny numbers where 0 and 1 are exact.
        low = middle - half if self.failing else 0.0
        high = middle + half if self.failing < n else 1.0
        return max(0.0, low), min(1.0, high)


class PromptCount(NamedTuple):
    """Failing tokens of one prompt, by check."""

    seed: int
    prompt: int
    name: str
    kept: int
    failing: dict[str, int]

    @property
    def most(self) -> int:
        return max(self.failing.values(), default=0)


class Candidate(NamedTuple):
    """One of the likeliest next tokens of a side."""

    token: int
    probability: float


class FirstFailure(NamedTuple):
    """The first token that fails a check.

    Attributes:
        seed: Round.
        prompt: Index in the batch.
        name: The prompt's name in its file.
        position: How many generated tokens came before.
        token: The reference's token.
        values: The documented scores of the token.
        reference: The reference's likeliest tokens, over the whole vocabulary.
        candidate: The candidate's likeliest tokens.
        tokens: The whole text before the token, including padding.
    """

    seed: int
    prompt: int
    name: str
    position: int
    token: int
    values: dict[str, float]
    reference: tuple[Candidate, ...]
    candidate: tuple[Candidate, ...]
    tokens: torch.Tensor


class Tally:
    """Counts failing tokens as rounds come in.

    Attributes:
        limits: Check → its limit.
        prompts: Counts of every prompt so far.
        first: The first failing token.
        agreed: Tokens where both sides' largest logit is at the same place.
        variation: The greatest total variation over the whole vocabulary.
        rows: The scores of every kept token, prompt by prompt.
    """

    def __init__(self, limits: dict[str, float]) -> None:
        self.limits = limits
        self.rows: list[Rows] = []
        self.prompts: list[PromptCount] = []
        self.first: FirstFailure | None = None
        self.agreed = 0
        self.variation = 0.0

    @property
    def kept(self) -> int:
        return sum(count.kept for count in self.prompts)

    def failing(self, check: str) -> int:
        return sum(count.failing[check] for count in self.prompts)

    def add(self, rows: Rows, reference: Outputs, candidate: Outputs, new_tokens: int) -> None:
        """Count the rows of one prompt. A score that is NaN fails."""
        if not len(rows):
            return
        self.rows.append(rows)
        columns = rows.columns
        bad = {
            # `not <` rather than `>=`, so that a score that is NaN fails.
            check: ~(np.asarray(columns[CHECKS[check][1]], np.float64) < limit)
            for check, limit in self.limits.items()
        }
        seed, prompt = int(columns["seed"][0]), int(columns["prompt"][0])
        name = str(columns["prompt_name"][0])
        counts = {check: int(fails.sum()) for check, fails in bad.items()}
        self.prompts.append(PromptCount(seed, prompt, name, len(rows), counts))
        self.agreed += int(np.asarray(columns["top1_agree"], np.bool_).sum())
        self.variation = max(self.variation, float(np.max(columns["total_variation"])))
        any_bad = np.logical_or.reduce(list(bad.values()))
        # Logits are kept of this one token only: those of all would not fit into memory.
        if self.first is None and any_bad.any():
            index = int(np.flatnonzero(any_bad)[0])
            tokens = reference.tokens[prompt]
            self.first = FirstFailure(
                seed,
                prompt,
                name,
                index,
                int(columns["token"][index]),
                {check: float(columns[CHECKS[check][1]][index]) for check in self.limits},
                _likeliest(reference.logits[prompt][index]),
                _likeliest(candidate.logits[prompt][index]),
                tokens[: len(tokens) - new_tokens + index].clone(),
            )


def _likeliest(logits: torch.Tensor) -> tuple[Candidate, ...]:
    import torch

    # In float64: probabilities of fp16 logits would be rounded to a thousandth.
    row: Any = torch.softmax(logits.detach().double(), dim=-1)
    values, places = row.topk(min(SHOWN, len(row)))
    pairs = zip(places.tolist(), values.tolist(), strict=True)
    return tuple(Candidate(int(token), float(value)) for token, value in pairs)
