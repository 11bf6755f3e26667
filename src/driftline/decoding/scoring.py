"""How far a candidate's next-token distributions are from the reference's, token by token.

The four documented scores (`ce`, `prob_mean`, `prob_std`, `diff_mean`) use both sides' logits at
the reference's k largest, renormalised among these, and ignore all others. The other scores use the
whole vocabulary. Before a round is scored, it is checked that the two sides belong together. This
file has no limits.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from driftline.decoding.files.outputs import AT_REFERENCE, INDICES, NONFINITE, VALUES, Outputs
from driftline.decoding.files.token_table import SCORES, Rows, rows_of
from driftline.errors import BadFile, BadInput
from driftline.numerics.dtypes import DTYPES, DType
from driftline.numerics.token_scores import score_rows

if TYPE_CHECKING:
    import torch

F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
AnyArray: TypeAlias = npt.NDArray[Any]
Logits: TypeAlias = "torch.Tensor | AnyArray"

TOPK = 20
"""The documented scores use this many of the reference's largest logits."""
DOCUMENTED = ("ce", "prob_mean", "prob_std", "diff_mean")


class TokenScores(NamedTuple):
    """Scores with one number per token.

    p is the reference's distribution, q the candidate's. If a row of logits has NaN or Inf on
    either side, its scores over the vocabulary are NaN, and the counts say why.

    Attributes:
        ce: Cross entropy of the top-k, the sum of -q log p. It is not a distance: equal
            distributions give their entropy, not 0.
        prob_mean: Mean of p/q - 1 over the top-k.
        prob_std: Sample standard deviation of p/q; NaN for k = 1.
        diff_mean: Mean of |p - q| over the top-k.
        kl_rc: Kullback-Leibler divergence, the sum of p log(p/q) over the vocabulary, in nats.
        kl_cr: The divergence in the other direction, the sum of q log(q/p).
        total_variation: Half of the sum of |p - q|.
        top1_agree: Whether both sides have the same most likely token.
        rank_of_reference: Rank of the reference's token among the candidate's; 1 is the first.
        gap: The reference's largest logit minus its second; if it is small, there is a near tie.
        reference_nan: Number of NaN in the reference's row.
        reference_inf: Number of infinities in the reference's row.
        candidate_nan: Number of NaN in the candidate's row.
        candidate_inf: Number of infinities in the candidate's row.
    """

    ce: F64
    prob_mean: F64
    prob_std: F64
    diff_mean: F64
    kl_rc: F64
    kl_cr: F64
    total_variation: F64
    top1_agree: npt.NDArray[np.bool_]
    rank_of_reference: I64
    gap: F64
    reference_nan: I64
    reference_inf: I64
    candidate_nan: I64
    candidate_inf: I64

    @property
    def odd(self) -> npt.NDArray[np.bool_]:
        """Whether the logits of each token have a NaN or an infinity on either side."""
        counts = self.reference_nan + self.reference_inf + self.candidate_nan + self.candidate_inf
        return counts > 0

    def head(self, count: int) -> TokenScores:
        """The first `count` tokens."""
        return TokenScores._make(cast(Any, column)[:count] for column in self)


def score(
    reference_logits: Logits,
    candidate_logits: Logits,
    tokens: torch.Tensor | AnyArray | Sequence[int],
    *,
    topk: int = TOPK,
    path: str | None = None,
    threads: int | None = None,
) -> TokenScores:
    """Score every row of [new, vocabulary] logits against that of the other side.

    Args:
        reference_logits: A torch tensor or numpy array of floats; not copied if it is contiguous.
        candidate_logits: Logits of the same shape; the element type may differ.
        tokens: The reference's token after each row, for `rank_of_reference`.
        topk: The documented scores use this many of the reference's largest logits, or all of a
            smaller vocabulary.
        path: The path of the kernel; see `driftline.numerics.kernel.available`.
        threads: Number of threads; None for one per core.

    Raises:
        BadInput: The two sides have different numbers of tokens, or different vocabularies.
    """
    reference, reference_dtype = _storage(reference_logits, "reference")
    candidate, candidate_dtype = _storage(candidate_logits, "candidate")
    rows, vocabulary = reference.shape
    if candidate.shape != reference.shape:
        raise BadInput(
            f"the reference has logits of {rows} tokens over a vocabulary of {vocabulary}, the "
            f"candidate of {candidate.shape[0]} over {candidate.shape[1]}",
            hint="both sides must run the same model on the same number of tokens",
        )
    if not vocabulary:
        raise BadInput(
            "the logits are over a vocabulary of nothing", hint="compute them again: --force"
        )
    if topk < 1:
        raise BadInput(f"the {topk} greatest logits cannot be taken: at least 1 is needed")
    token_ids = _tokens(tokens, rows)
    # The gap needs the two largest logits, whatever k is.
    k = min(max(topk, 2), vocabulary)

    def scored_rows() -> Any:
        return score_rows(
            *(reference, reference_dtype, candidate, candidate_dtype, token_ids),
            k=k,
            path=path,
            threads=threads,
        )

    scored = scored_rows()
    if bool(((scored.reference_inf > 0) & (scored.candidate_inf > 0)).any()):
        # A token that is minus infinity on both sides has probability 0 on both.
        reference, candidate = _without_common_infinities(
            (reference, reference_dtype), (candidate, candidate_dtype)
        )
        scored = scored_rows()
    r_top = scored.reference_top.astype(np.float64)
    c_top = scored.candidate_top.astype(np.float64)
    documented = top_scores(r_top[:, :topk], c_top[:, :topk])
    for column in documented:
        column[scored.reference_nan > 0] = np.nan  # in torch's order, NaN is among the largest
    with np.errstate(invalid="ignore"):
        gap = r_top[:, 0] - r_top[:, 1] if k > 1 else np.full(rows, np.inf)
    odd_candidate = scored.candidate_nan > 0
    return TokenScores(
        *documented,
        scored.kl_rc,
        scored.kl_cr,
        scored.total_variation,
        (scored.top[:, 0] == scored.candidate_choice)
        & ~odd_candidate
        & (scored.reference_nan == 0),
        scored.rank,
        gap,
        scored.reference_nan,
        scored.reference_inf,
        scored.candidate_nan,
        scored.candidate_inf,
    )


def _without_common_infinities(*sides: tuple[AnyArray, DType]) -> tuple[AnyArray, AnyArray]:
    """Both sides, with the lowest finite number of their type where both are minus infinity."""
    infinite = np.logical_and(*(_is_minus_infinity(*side) for side in sides))
    lowest = [
        0xFF7F if dtype.name == "bfloat16" else np.finfo(values.dtype).min
        for values, dtype in sides
    ]
    first, second = (
        np.where(infinite, np.array(low, values.dtype), values)
        for (values, _), low in zip(sides, lowest, strict=True)
    )
    return first, second


def _is_minus_infinity(values: AnyArray, dtype: DType) -> npt.NDArray[np.bool_]:
    return values == 0xFF80 if dtype.name == "bfloat16" else np.isneginf(values)


def top_scores(reference: F64, candidate: F64) -> tuple[F64, F64, F64, F64]:
    """The documented scores (ce, prob_mean, prob_std, diff_mean) of [tokens, k] chosen logits.

    >>> ce, *_ = top_scores(np.zeros((1, 20)), np.zeros((1, 20)))
    >>> float(ce[0].round(4))  # log 20, for two equal and uniform distributions
    2.9957
    """
    with np.errstate(all="ignore"):
        log_p, log_q = _log_softmax(reference), _log_softmax(candidate)
        p, q = np.exp(log_p), np.exp(log_q)
        # If the probability is 0 on both sides, the two are equal.
        ratio = np.where((p == 0) & (q == 0), 1.0, p / q)
        spread = ratio.std(axis=1, ddof=1) if ratio.shape[1] > 1 else np.full(len(ratio), np.nan)
        # The entropy defines 0 log 0 as 0, but floating point gives NaN.
        terms = np.where(q == 0, 0.0, q * log_p)
        terms[np.isnan(log_p) | np.isnan(log_q)] = np.nan
        return (
            -terms.sum(axis=1),
            (ratio - 1.0).mean(axis=1),
            spread,
            np.abs(p - q).mean(axis=1),
        )


def _log_softmax(rows: F64) -> F64:
    # The largest value becomes 0, so that no exponential overflows.
    moved = rows - rows.max(axis=1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))


def kept_before_eos(
    tokens: torch.Tensor | AnyArray | Sequence[int], eos_ids: Iterable[int], prompt_length: int
) -> int:
    """The number of generated tokens before the first end of text.

    Args:
        tokens: The tokens of one prompt: padding, prompt, generated.
        eos_ids: All ids that end a text. An id inside the prompt does not count.
        prompt_length: The number of tokens before the first generated one.

    >>> kept_before_eos([2, 5, 7, 9, 2, 7], {2, 3}, 2)
    2
    """
    generated = _plain(tokens)[prompt_length:]
    ends = np.flatnonzero(np.isin(generated, np.fromiter(eos_ids, np.int64)))
    return int(ends[0]) if ends.size else len(generated)


def _plain(tokens: Any) -> I64:
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    return np.asarray(tokens, np.int64)


def _tokens(tokens: Any, rows: int) -> I64:
    plain = _plain(tokens)
    if plain.shape != (rows,):
        raise BadInput(
            f"{rows} rows of logits, but tokens of shape {plain.shape}",
            hint="give a row of logits for each token",
        )
    return plain


def _storage(logits: Any, side: str) -> tuple[AnyArray, DType]:
    """The bytes of [tokens, vocabulary] logits, without a copy if possible, and their type."""
    if hasattr(logits, "detach"):
        import torch

        tensor = cast("torch.Tensor", logits).detach()
        name = str(tensor.dtype).removeprefix("torch.")
        # The kernel has no other formats, and float32 has every value of the smaller ones.
        if name not in ("float32", "float16", "bfloat16", "float64"):
            tensor, name = tensor.float(), "float32"
        tensor = tensor.cpu().contiguous()
        array: AnyArray = (
            tensor.view(torch.uint16).numpy() if name == "bfloat16" else tensor.numpy()
        )
    else:
        array = np.ascontiguousarray(logits)
        name = array.dtype.name
        if name not in ("float32", "float16", "float64"):
            raise BadInput(f"the {side}'s logits are of type {name}; floating point is expected")
    if array.ndim != 2:
        raise BadInput(
            f"the {side}'s logits are of shape {array.shape}; [tokens, vocabulary] is expected"
        )
    return array, DTYPES[name]


Array = np.ndarray[Any, np.dtype[Any]]


class RoundScores(NamedTuple):
    """The rows of a round, one entry per prompt; `trouble` says where logits are not finite."""

    rows: list[Rows]
    trouble: str


def score_round(
    reference: Outputs,
    candidate: Outputs,
    *,
    seed: int,
    names: Sequence[str],
    ends: Sequence[int],
    topk: int,
    new_tokens: int,
) -> RoundScores:
    """Score all prompts of a round.

    Args:
        reference: The reference's outputs.
        candidate: The candidate's outputs, forced along the reference's tokens.
        seed: Number of the round.
        names: Names of the prompts; empty if they are unknown.
        ends: Ids that end a text; tokens after the first of them do not count.
        topk: The documented metrics use this many of the reference's largest logits.
        new_tokens: Number of generated tokens.

    Raises:
        BadInput: The two sides do not belong together.
    """
    if len(reference.tokens) != len(candidate.tokens):
        raise BadInput(
            f"round {seed}: the reference has {len(reference.tokens)} prompts, the candidate "
            f"{len(candidate.tokens)}",
            hint="compute both sides again: --force",
        )
    rows: list[Rows] = []
    trouble = ""
    for prompt, tokens in enumerate(reference.tokens):
        where = f"round {seed}, prompt {prompt}"
        # Scores compare predictions after the same text.
        if tokens.shape != candidate.tokens[prompt].shape or bool(
            (tokens != candidate.tokens[prompt]).any()
        ):
            raise BadInput(
                f"{where}: the candidate was not forced along the reference's tokens",
                hint="the two sides come from different runs; compute the candidate again",
            )
        length = len(tokens) - new_tokens
        if length < 0:
            raise BadInput(
                f"{where}: {len(tokens)} tokens are fewer than {new_tokens} new ones",
                hint="compute them again: --force",
            )
        new = tokens[length:]
        pair = _Pair(reference, candidate, prompt, where)
        columns, nonfinite = pair.scores(new, topk)
        kept = kept_before_eos(tokens, ends, length)
        name = names[prompt] if prompt < len(names) else ""
        rows.append(rows_of(seed, prompt, name, new.numpy(), columns, kept))
        # The first one is named, because later ones usually follow from it.
        trouble = trouble or _not_numbers(nonfinite, where)
    return RoundScores(rows, trouble)


def nonfinite_text(count: Array, side: str) -> str:
    """A sentence about logits that are not finite, from their number at each token.

    >>> nonfinite_text(np.array([0, 1]), "reference")
    '1 logit of the reference is NaN or infinite, at token 1'
    """
    total, first = int(count.sum()), int(np.flatnonzero(count)[0])
    if total == 1:
        return f"1 logit of the {side} is NaN or infinite, at token {first}"
    return f"{total} logits of the {side} are NaN or infinite, first at token {first}"


def _not_numbers(counts: Mapping[str, Array], where: str) -> str:
    for side, count in counts.items():
        if count.any():
            return f"{where}: {nonfinite_text(count, side)}"
    return ""


class _Pair:
    """Both sides of one prompt."""

    def __init__(self, reference: Outputs, candidate: Outputs, prompt: int, where: str) -> None:
        self.reference, self.candidate = reference, candidate
        self.prompt, self.where = prompt, where

    def scores(
        self, new: torch.Tensor, topk: int
    ) -> tuple[dict[str, Array | None], dict[str, Array]]:
        """Columns by name, and the number of logits that are not finite, by side and token."""
        if self.reference.logits and self.candidate.logits:
            return self._from_logits(new, topk)
        if self.reference.top and self.candidate.top:
            return self._from_top(new, topk)
        raise BadFile(f"{self.where}: one side keeps all logits, the other only the largest")

    def _from_logits(
        self, new: torch.Tensor, topk: int
    ) -> tuple[dict[str, Array | None], dict[str, Array]]:
        left, right = self.reference.logits[self.prompt], self.candidate.logits[self.prompt]
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
        left, right = self.reference.top[self.prompt], self.candidate.top[self.prompt]
        for side, parts, wanted in (
            ("reference", left, (INDICES, VALUES, NONFINITE)),
            ("candidate", right, (INDICES, AT_REFERENCE, NONFINITE)),
        ):
            if any(name not in parts or len(parts[name]) != len(new) for name in wanted):
                raise BadFile(f"{self.where}: what the {side} keeps of its logits is not whole")
        saved_count = int(left[VALUES].shape[-1])
        # Scores of fewer logits are different scores, not approximations of these.
        if saved_count < topk:
            raise BadInput(
                f"{self.where}: {saved_count} logits per token are saved, {topk} are asked for",
                hint=f"--topk_per_token {saved_count} can be had, or compute it again with --force",
            )
        reference_logits, candidate_logits = (
            part.double().numpy() for part in (left[VALUES], right[AT_REFERENCE])
        )
        documented = top_scores(reference_logits[:, :topk], candidate_logits[:, :topk])
        columns: dict[str, Array | None] = dict(zip(DOCUMENTED, documented, strict=True))
        columns["top1_agree"] = (left[INDICES][:, 0] == right[INDICES][:, 0]).numpy()
        # The gap needs the two largest logits.
        if saved_count > 1:
            columns["gap"] = reference_logits[:, 0] - reference_logits[:, 1]
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
                f"{self.where}: {len(left)} and {len(right)} rows of logits for {len(new)} tokens",
                hint="compute them again: --force",
            )
