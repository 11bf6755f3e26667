"""The largest logits of every token instead of the whole vocabulary: `--logits topk`.

Enough for the four documented metrics, which look at the reference's k largest only, and a
thousandth of the space. What needs the whole vocabulary is computed before the rest is dropped.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

INDICES = "topk_indices"
"""int32 [new, k]: which ids have the largest logits, largest first."""
VALUES = "topk_logits"
"""[new, k] in the model's number format: those logits."""
NORM = "logsumexp"
"""float32 [new]: log of the sum of exp over the whole vocabulary; a logit less this is log p."""
NONFINITE = "nonfinite"
"""int32 [new]: how many logits of the whole vocabulary were NaN or infinite."""
AT_REFERENCE = "reference_logits"
"""[new, k], candidate only: its logits at the reference's ids."""


def shorten(
    logits: torch.Tensor, count: int, *, reference: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """What is kept of [new, vocabulary] logits.

    Args:
        logits: Of one prompt.
        count: How many of each row.
        reference: What was kept of the other side's, for a candidate.
    """
    import torch

    count = min(count, int(logits.shape[-1]))
    values, indices = logits.topk(count, dim=-1)
    kept = {
        INDICES: indices.to(torch.int32),
        VALUES: values,
        NORM: torch.logsumexp(logits.float(), dim=-1),
        NONFINITE: (~torch.isfinite(logits)).sum(dim=-1).to(torch.int32),
    }
    if reference is not None:
        kept[AT_REFERENCE] = logits.gather(-1, reference[INDICES].long())
    return kept
