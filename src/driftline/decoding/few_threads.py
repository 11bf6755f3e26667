"""One thread for models so small that waiting for others takes longer than their arithmetic."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from driftline.decoding.decoder import DecoderModel

SMALL = 4_000_000
"""Weights of a model that several threads do not make faster: on a busy machine of two cores the
tiny models of our tests took ten times as long with two threads as with one."""


@contextmanager
def few_threads(model: DecoderModel) -> Generator[None]:
    """While it lasts, torch computes a small model with one thread."""
    import torch

    before = torch.get_num_threads()
    if sum(weights.numel() for weights in model.module.parameters()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
