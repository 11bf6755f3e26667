"""How far a candidate's next-token distributions lie from the reference's, token by token.

Four scores are the documented ones: both sides at the reference's k greatest logits, renormalised
among those (`ce`, `prob_mean`, `prob_std`, `diff_mean`). They are blind to whatever happens outside
the k; the companions look at the whole vocabulary. What is too much is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES, DType
from driftline.numerics.token_scores import score_rows

if TYPE_CHECKING:
    import torch

F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
AnyArray: TypeAlias = npt.NDArray[Any]
Logits: TypeAlias = "torch.Tensor | AnyArray"

TOPK = 20
"""How many of the reference's logits the documented scores look at."""
DOCUMENTED = ("ce", "prob_mean", "prob_std", "diff_mean")


class TokenScores(NamedTuple):
    """One number per token.

    A row with a NaN or an infinity in it, on either side, has NaN companions; the counts say why.

    Attributes:
        ce: Cross entropy of the reference's top-k against the candidate's, at most weakly a
            distance: equal distributions give their entropy, not 0.
        prob_mean: Mean of p/q - 1 over the top-k.
        prob_std: Sample standard deviation of p/q; NaN for k = 1.
        diff_mean: Mean of |p - q| over the top-k.
        kl_rc: Kullback-Leibler divergence sum p log(p/q) over the vocabulary, in nats.
        kl_cr: The other way, sum q log(q/p).
        total_variation: Half of sum |p - q|: the share of probability that lies elsewhere.
        top1_agree: Whether both would say the same token.
        rank_of_reference: Place of the reference's token among the candidate's, 1 being first.
        gap: How far the reference's best logit is above its second: a small one is a near tie.
        reference_nan: NaN in the row, likewise below.
        reference_inf: Infinities of either sign.
        candidate_nan: NaN in the candidate's row.
        candidate_inf: Infinities in the candidate's row.
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
        """Tokens whose logits hold a NaN or an infinity somewhere, on either side."""
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
    """Score every row of [new, vocabulary] logits against its counterpart.

    Args:
        reference_logits: torch or numpy, any float type; not copied if it is contiguous.
        candidate_logits: Of the same shape; may be of another type.
        tokens: The token the reference said after each row, for `rank_of_reference`.
        topk: How many of the reference's logits the documented scores look at; a smaller
            vocabulary is taken whole.
        path: The kernel's path, see `driftline.numerics.kernel.available`.
        threads: How many threads; None: as many as cores.

    Raises:
        BadInput: The two are not of the same tokens and vocabulary.
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
        raise BadInput("the logits are over a vocabulary of nothing")
    if topk < 1:
        raise BadInput(f"the {topk} greatest logits cannot be taken: at least 1 is needed")
    said = _tokens(tokens, rows)
    # A second element besides the first is wanted for the gap, whatever k is.
    k = min(max(topk, 2), vocabulary)
    found = score_rows(
        *(reference, reference_dtype, candidate, candidate_dtype, said),
        k=k,
        path=path,
        threads=threads,
    )
    r_top = found.reference_top.astype(np.float64)
    c_top = found.candidate_top.astype(np.float64)
    documented = top_scores(r_top[:, :topk], c_top[:, :topk])
    for column in documented:
        column[found.reference_nan > 0] = np.nan  # a NaN is among the greatest, in torch's order
    with np.errstate(invalid="ignore"):
        gap = r_top[:, 0] - r_top[:, 1] if k > 1 else np.full(rows, np.inf)
    odd_candidate = found.candidate_nan > 0
    return TokenScores(
        *documented,
        found.kl_rc,
        found.kl_cr,
        found.total_variation,
        (found.top[:, 0] == found.candidate_choice) & ~odd_candidate & (found.reference_nan == 0),
        found.rank,
        gap,
        found.reference_nan,
        found.reference_inf,
        found.candidate_nan,
        found.candidate_inf,
    )


def top_scores(reference: F64, candidate: F64) -> tuple[F64, F64, F64, F64]:
    """The documented scores (ce, prob_mean, prob_std, diff_mean) of [tokens, k] chosen logits.

    >>> ce, *_ = top_scores(np.zeros((1, 20)), np.zeros((1, 20)))
    >>> float(ce[0].round(4))  # log 20: equal and flat
    2.9957
    """
    with np.errstate(all="ignore"):
        log_p, log_q = _log_softmax(reference), _log_softmax(candidate)
        p, q = np.exp(log_p), np.exp(log_q)
        ratio = p / q
        spread = ratio.std(axis=1, ddof=1) if ratio.shape[1] > 1 else np.full(len(ratio), np.nan)
        terms = np.where(q == 0, 0.0, q * log_p)
        terms[np.isnan(log_p) | np.isnan(log_q)] = np.nan
        return (
            -terms.sum(axis=1),
            (ratio - 1.0).mean(axis=1),
            spread,
            np.abs(p - q).mean(axis=1),
        )


def _log_softmax(rows: F64) -> F64:
    moved = rows - rows.max(axis=1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))


def kept_before_eos(
    tokens: torch.Tensor | AnyArray | Sequence[int], eos_ids: Iterable[int], prompt_length: int
) -> int:
    """How many generated tokens count: those before the first end of text.

    Args:
        tokens: One prompt's tokens: padding, prompt, generated.
        eos_ids: Every id that ends a text. One inside the prompt does not count.
        prompt_length: Tokens before the first generated one.

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
        raise BadInput(f"{rows} rows of logits, but tokens of shape {plain.shape}")
    return plain


def _storage(logits: Any, side: str) -> tuple[AnyArray, DType]:
    """The bytes of [tokens, vocabulary] logits without a copy where that can be, and their type."""
    if hasattr(logits, "detach"):
        import torch

        tensor = cast("torch.Tensor", logits).detach()
        name = str(tensor.dtype).removeprefix("torch.")
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
