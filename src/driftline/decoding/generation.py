"""Greedy generation that keeps the logits: free, or forced along another run's tokens.

It never stops early: exactly the requested number of tokens is generated, also after the end of a
text, so that every prompt of a batch has the same shape. Which tokens count is decided later.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.decoding.files.outputs import Outputs
from driftline.decoding.models.decoder import DecoderModel, Forward
from driftline.decoding.prompts import Padded, Prompt, pad_left
from driftline.errors import BadInput, DriftlineError

if TYPE_CHECKING:
    import torch


class Validation(NamedTuple):
    """The result of one generation, prompt by prompt.

    Attributes:
        tokens: int64 [prompts, length + new]: padding, prompt, generated.
        logits: [prompts, new, vocabulary] in the model's own number format; None if not kept.
        choices: int64 [prompts, new]: the model's own likeliest token at each step; may differ from
            the tokens if these were forced.
        prompt_length: Tokens before the first generated one, padding included.
        nonfinite: int64 [prompts, new]: how many logits were NaN or plus infinity, kept or not.
        masked: int64 [prompts, new]: how many were minus infinity: tokens with probability 0.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    choices: torch.Tensor
    prompt_length: int
    nonfinite: torch.Tensor
    masked: torch.Tensor

    @property
    def new_tokens(self) -> int:
        return int(self.tokens.shape[1]) - self.prompt_length


def outputs_of(made: Validation) -> Outputs:
    """Tokens and logits of a generation that kept them, as they are saved and scored."""
    assert made.logits is not None
    return Outputs(list(made.tokens), list(made.logits), [], {})


def generate(
    model: DecoderModel,
    prompts: Padded | Sequence[Prompt],
    max_new_tokens: int,
    *,
    length: int = 0,
    forced: torch.Tensor | Sequence[torch.Tensor] | None = None,
    keep_logits: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Generate greedily with a cache.

    Args:
        model: The model.
        prompts: One batch, padded or not.
        max_new_tokens: The number of tokens to generate.
        length: Pad to at least this length, if prompts are not padded yet.
        forced: Tokens of another run of the same prompts [prompts, length + new]. At every step the
            model continues with these instead of its own, so that both read the same text.
        keep_logits: Whether to keep the logits.
        progress: Called with (tokens done, tokens in total).

    Raises:
        BadInput: No new tokens are asked for, or the forced tokens are of another shape or prompt.
    """
    import torch

    batch = prompts if isinstance(prompts, Padded) else pad_left(prompts, length)
    rows, width = int(batch.ids.shape[0]), int(batch.ids.shape[1])
    if max_new_tokens < 1:
        raise BadInput(f"{max_new_tokens} new tokens cannot be generated: at least 1 is needed")
    _check_ids(model, batch)
    forced_tokens = _forced_tokens(forced, batch, max_new_tokens)
    tokens = torch.zeros(rows, width + max_new_tokens, dtype=torch.int64)
    tokens[:, :width] = batch.ids
    choices = torch.zeros(rows, max_new_tokens, dtype=torch.int64)
    nonfinite, masked = torch.zeros_like(choices), torch.zeros_like(choices)
    logits: torch.Tensor | None = None
    mask = torch.ones(rows, width + max_new_tokens, dtype=torch.bool)
    mask[:, :width] = batch.mask
    positions = torch.zeros(rows, width + max_new_tokens, dtype=torch.int64)
    positions[:, :width] = batch.position_ids
    after = batch.mask.sum(dim=1)
    with torch.inference_mode():
        cache = None
        start = 0
        for step in range(max_new_tokens):
            end = width + step
            row = _next_logits(
                model, tokens[:, start:end], mask[:, :end], positions[:, start:end], cache
            )
            cache = row.cache
            # A model without a cache reads the whole text for every token.
            start = end if model.caches else 0
            if keep_logits:
                if logits is None:
                    # Allocated once at full size: appending would copy everything at every step.
                    shape = (rows, max_new_tokens, int(row.logits.shape[-1]))
                    logits = torch.empty(shape, dtype=row.logits.dtype)
                logits[:, step] = row.logits.cpu()
            choices[:, step] = row.logits.argmax(dim=-1).cpu()
            # Counted here, as logits that are not kept cannot be looked at later.
            below = row.logits.isneginf().sum(dim=-1).cpu()
            nonfinite[:, step] = row.logits.isfinite().logical_not_().sum(dim=-1).cpu() - below
            masked[:, step] = below
            tokens[:, end] = choices[:, step] if forced_tokens is None else forced_tokens[:, end]
            positions[:, end] = after + step
            if progress is not None:
                progress(step + 1, max_new_tokens)
    return Validation(tokens, logits, choices, width, nonfinite, masked)


def _next_logits(
    model: DecoderModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: object,
) -> Forward:
    """The model's next logits; an exception of the model becomes a message of ours."""
    try:
        return model.forward(ids, mask, positions, cache)
    except DriftlineError:
        raise
    except Exception as trouble:
        summary = (str(trouble).strip().splitlines() or [""])[0][:200]
        position = int(mask.shape[1])
        raise DriftlineError(
            f"{model} failed on its way to token {position} of the text: "
            f"{type(trouble).__name__}: {summary}",
            hint="does the model generate by itself? DRIFTLINE_DEBUG=1 shows where it fails",
        ) from trouble


def _check_ids(model: DecoderModel, batch: Padded) -> None:
    # An id beyond the vocabulary would read outside the embedding, or crash a device.
    largest = int(batch.ids.max())
    if model.vocabulary and largest >= model.vocabulary:
        raise BadInput(
            f"the prompts hold the id {largest}, but {model.name} knows {model.vocabulary} ids",
            hint="the tokenizer belongs to another model",
        )


def _forced_tokens(
    forced: torch.Tensor | Sequence[torch.Tensor] | None, batch: Padded, new: int
) -> torch.Tensor | None:
    import torch

    if forced is None:
        return None
    tokens = forced if isinstance(forced, torch.Tensor) else torch.stack(list(forced))
    wanted = (int(batch.ids.shape[0]), int(batch.ids.shape[1]) + new)
    if tuple(tokens.shape) != wanted:
        raise BadInput(
            f"the tokens to force are {tuple(tokens.shape)}, the batch needs {wanted} "
            "(prompts, tokens)"
        )
    if not torch.equal(tokens[:, : batch.ids.shape[1]], batch.ids):
        raise BadInput(
            "the tokens to force belong to other prompts",
            hint="force the tokens that this batch of prompts was given",
        )
    return tokens
