"""Whether a saved reference may stand for one that would be computed now.

Says nothing about logits themselves: whether they are numbers is seen when they are scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from driftline.decoding.out_files import Saved
from driftline.decoding.prompts import Padded
from driftline.decoding.weights import weights_of
from driftline.errors import BadInput

if TYPE_CHECKING:
    import torch


def require_fitting(saved: Saved, batch: Padded, new_tokens: int, source: str, where: str) -> None:
    """Refuse saved outputs of other prompts, another shape or other weights.

    Args:
        saved: What was read.
        batch: The prompts that are asked for now.
        new_tokens: How many tokens are to be generated.
        source: The model, as it is now.
        where: The folder that was read, for the sentence.

    Raises:
        BadInput: They are.
    """
    if not saved.logits:
        raise BadInput(
            f"{where} keeps no logits, or only the largest",
            hint="make it again with `driftline metrics --logits full`, or name another folder",
        )
    width = int(batch.ids.shape[1])
    same = len(saved.tokens) == len(batch.ids) and all(
        len(tokens) == width + new_tokens and _equal(tokens[:width], ids)
        for tokens, ids in zip(saved.tokens, batch.ids, strict=True)
    )
    if not same:
        raise BadInput(
            f"{where} was made from other prompts, or another shape",
            hint="use the prompt file it was made from, or name another --validation_info_dir",
        )
    told = saved.provenance.get("settings")
    # Other tools' outputs do not say their weights.
    kept = cast("dict[str, Any]", told).get("weights") if isinstance(told, dict) else None
    now = weights_of(source)
    if kept and now and kept != now:
        raise BadInput(
            f"{where} was made by a model with other weights or another config than {source} "
            "has now",
            hint="make it again with `driftline metrics`, or name another --validation_info_dir",
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return len(a) == len(b) and bool((a == b).all())
