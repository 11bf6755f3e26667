"""One round's saved logits, both sides → rows of scores, with every reason not to believe them.

Checks that the two sides belong together before anything is scored. How a score is computed is
`scoring`'s.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driftline.decoding.out_files import Saved
from driftline.decoding.score_table import SCORES, Rows, rows_of
from driftline.decoding.scoring import DOCUMENTED, kept_before_eos, score, top_scores
from driftline.decoding.top_logits import AT_REFERENCE, INDICES, NONFINITE, VALUES
from driftline.errors import BadFile, BadInput

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


class Scored(NamedTuple):
    """The rows of a round, one entry per prompt; `trouble` says where logits are not numbers."""

    rows: list[Rows]
    trouble: str


def score_round(
    reference: Saved,
    candidate: Saved,
    *,
    seed: int,
    names: Sequence[str],
    ends: Sequence[int],
    topk: int,
    new_tokens: int,
) -> Scored:
    """Score all prompts of a round.

    Args:
        reference: What the reference left.
        candidate: What the candidate left, forced along the reference's tokens.
        seed: Number of the round.
        names: Of the prompts; empty if they are not known.
        ends: Ids that end a text; what comes after the first of them does not count.
        topk: How many of the reference's largest logits the documented metrics look at.
        new_tokens: How many tokens were generated.

    Raises:
        BadInput: The two sides do not belong together.
    """
    if len(reference.tokens) != len(candidate.tokens):
        raise BadInput(
            f"round {seed}: the reference has {len(reference.tokens)} prompts, the candidate "
            f"{len(candidate.tokens)}"
        )
    rows: list[Rows] = []
    trouble = ""
    for at, tokens in enumerate(reference.tokens):
        where = f"round {seed}, prompt {at}"
        if tokens.shape != candidate.tokens[at].shape or bool(
            (tokens != candidate.tokens[at]).any()
        ):
            raise BadInput(
                f"{where}: the candidate was not forced along the reference's tokens",
                hint="the two sides come from different runs; compute the candidate again",
            )
        length = len(tokens) - new_tokens
        if length < 0:
            raise BadInput(f"{where}: {len(tokens)} tokens are fewer than {new_tokens} new ones")
        new = tokens[length:]
        pair = _Pair(reference, candidate, at, where)
        columns, nonfinite = pair.scores(new, topk)
        kept = kept_before_eos(tokens, ends, length)
        name = names[at] if at < len(names) else ""
        rows.append(rows_of(seed, at, name, new.numpy(), columns, kept))
        trouble = trouble or _not_numbers(nonfinite, where)
    return Scored(rows, trouble)


def no_numbers(count: Array, side: str) -> str:
    """How many logits are none, and where the first is, given how many each token has.

    >>> no_numbers(np.array([0, 1]), "reference")
    '1 logit of the reference is NaN or infinite, at token 1'
    """
    total, first = int(count.sum()), int(np.flatnonzero(count)[0])
    if total == 1:
        return f"1 logit of the {side} is NaN or infinite, at token {first}"
    return f"{total} logits of the {side} are NaN or infinite, first at token {first}"


def _not_numbers(counts: Mapping[str, Array], where: str) -> str:
    for side, count in counts.items():
        if count.any():
            return f"{where}: {no_numbers(count, side)}"
    return ""


class _Pair:
    """Both sides of one prompt."""

    def __init__(self, reference: Saved, candidate: Saved, at: int, where: str) -> None:
        self.reference, self.candidate = reference, candidate
        self.at, self.where = at, where

    def scores(
        self, new: torch.Tensor, topk: int
    ) -> tuple[dict[str, Array | None], dict[str, Array]]:
        """Columns by name, and per side and token how many logits are no numbers."""
        if self.reference.logits and self.candidate.logits:
            return self._from_logits(new, topk)
        if self.reference.top and self.candidate.top:
            return self._from_top(new, topk)
        raise BadFile(f"{self.where}: one side keeps all logits, the other only the largest")

    def _from_logits(
        self, new: torch.Tensor, topk: int
    ) -> tuple[dict[str, Array | None], dict[str, Array]]:
        left, right = self.reference.logits[self.at], self.candidate.logits[self.at]
        self._same_shape(left, right, new)
        scores = score(left, right, new, topk=topk)
        columns: dict[str, Array | None] = {name: getattr(scores, name) for name in SCORES}
        counts = {
            "reference": scores.reference_nan + scores.reference_inf,
            "candidate": scores.candidate_nan + scores.candidate_inf,
        }
        return columns, counts

    def _from_top(
        self, new: torch.Tensor, topk: int
    ) -> tuple[dict[str, Array | None], dict[str, Array]]:
        left, right = self.reference.top[self.at], self.candidate.top[self.at]
        for side, parts, wanted in (
            ("reference", left, (INDICES, VALUES, NONFINITE)),
            ("candidate", right, (INDICES, AT_REFERENCE, NONFINITE)),
        ):
            if any(name not in parts or len(parts[name]) != len(new) for name in wanted):
                raise BadFile(f"{self.where}: what the {side} keeps of its logits is not whole")
        known = int(left[VALUES].shape[-1])
        if known < topk:
            raise BadInput(
                f"{self.where}: {known} logits per token are saved, {topk} are asked for",
                hint=f"--topk_per_token {known} can be had, or compute it again with --force",
            )
        ours, theirs = (part.double().numpy() for part in (left[VALUES], right[AT_REFERENCE]))
        documented = top_scores(ours[:, :topk], theirs[:, :topk])
        columns: dict[str, Array | None] = dict(zip(DOCUMENTED, documented, strict=True))
        columns["top1_agree"] = (left[INDICES][:, 0] == right[INDICES][:, 0]).numpy()
        if known > 1:
            columns["gap"] = ours[:, 0] - ours[:, 1]
        counts = {
            "reference": left[NONFINITE].numpy(),
            "candidate": right[NONFINITE].numpy(),
        }
        return columns, counts

    def _same_shape(self, left: torch.Tensor, right: torch.Tensor, new: torch.Tensor) -> None:
        if left.shape[-1] != right.shape[-1]:
            raise BadInput(
                f"{self.where}: the reference's vocabulary has {left.shape[-1]} tokens, the "
                f"candidate's {right.shape[-1]}",
                hint="the two sides are not the same model",
            )
        if len(left) != len(new) or len(right) != len(new):
            raise BadInput(
                f"{self.where}: {len(left)} and {len(right)} rows of logits for {len(new)} tokens"
            )
