"""What a compiler makes of a right program: inductor's own bugs, as torch 2.13 has them on a CPU.

The right variant runs as it is written, the wrong one compiled: nothing else differs. Each was
tried here; of those that were read, the ones that no longer happen, or only on a GPU, are left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import Variant, case, drawn, run_case, trained

GRAPH = ("--graph", "auto")
GRADIENTS = (*GRAPH, "--level", "modules,gradients,params")


class Around(nn.Module):
    """A layer before and after the part that is compiled wrongly."""

    def __init__(self, part: nn.Module, enter: int, leave: int) -> None:
        super().__init__()
        self.enter = nn.Linear(enter, enter)
        self.part = part
        self.leave = nn.Linear(leave, leave)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.part(self.enter(x)))


def compiled(model: nn.Module, variant: Variant) -> nn.Module:
    """The wrong variant is the same model, compiled."""
    if variant.bad:
        model.compile()
    return model


def read(model: nn.Module, x: Tensor, variant: Variant) -> None:
    with torch.no_grad():
        compiled(trained(model, variant.dtype), variant)(x.to(variant.dtype))


def step(model: nn.Module, x: Tensor, variant: Variant) -> None:
    """One step of training; every element of the result has another weight in the loss."""
    ready = compiled(trained(model, variant.dtype).train(), variant)
    optimizer = torch.optim.SGD(ready.parameters(), lr=0.1)
    result = ready(x.to(variant.dtype))
    (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    optimizer.step()


class PermutedKey(nn.Module):
    """Attention whose key is put into the order of the product at once."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 4, -1)
        query, value = (part.permute(0, 2, 1, 3) for part in (heads, heads.flip(-1)))
        key = heads.roll(1, -1).permute(0, 2, 3, 1)
        scores = (torch.matmul(query, key) * 0.3).softmax(-1)
        return scores.matmul(value).permute(0, 2, 1, 3).reshape(x.shape)


@case(
    "https://github.com/pytorch/pytorch/issues/195320",
    "a pattern of attention matches a permuted key as if it were transposed",
    "part",
    dump=GRAPH,
)
def permuted_key_taken_for_transposed(variant: Variant) -> None:
    # As many heads as tokens as batches: else the replacement does not fit, and nothing happens.
    read(Around(PermutedKey(), 32, 32), drawn("x", 4, 4, 32), variant)


class OtherAxis(nn.Module):
    """Shares that sum to one over queries, not over keys."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x, x.roll(1, -1).transpose(-2, -1)) * 0.35
        return torch.softmax(scores, dim=-2).matmul(x.flip(-1))


@case(
    "https://github.com/pytorch/pytorch/issues/196468",
    "a pattern of attention overlooks the axis of the softmax",
    "part",
    dump=GRAPH,
)
def softmax_axis_overlooked(variant: Variant) -> None:
    read(Around(OtherAxis(), 8, 8), drawn("x", 2, 4, 6, 8), variant)


class Darkest(nn.Module):
    """The smallest of the bytes in each row."""

    def forward(self, x: Tensor) -> Tensor:
        levels = (x.sigmoid() * 100 + 20).to(torch.uint8)
        return levels.amin(-1).to(x.dtype) / 100


@case(
    "https://github.com/pytorch/pytorch/issues/191499",
    "the smallest of sixteen bytes or more is zero: vectors begin with it",
    "part",
    causes="zeroed",
    dump=GRAPH,
)
def smallest_byte(variant: Variant) -> None:
    read(Around(Darkest(), 64, 16), drawn("x", 4, 16, 64), variant)


class Pooled(nn.Module):
    """Windows of three, the last of which stands over the edge."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x, 3, 2, ceil_mode=True)


@case(
    "https://github.com/pytorch/pytorch/issues/198119",
    "the gradient of the last window of a pool is divided by the whole window",
    "part enter",
    dump=GRADIENTS,
)
def last_window_of_a_pool(variant: Variant) -> None:
    step(Around(Pooled(), 16, 8), drawn("x", 4, 3, 16), variant)


class Enlarged(nn.Module):
    """Rows that stay as many, columns that become more."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=(1.3, 1.5), mode="nearest")


@case(
    "https://github.com/pytorch/pytorch/issues/198201",
    "an axis whose size does not change is resampled by its factor all the same",
    "part",
    dump=GRAPH,
)
def unchanged_axis_resampled(variant: Variant) -> None:
    read(Around(Enlarged(), 8, 12), drawn("x", 2, 3, 3, 8), variant)


class Halves(nn.Module):
    """Numbers of 64 bits read as twice as many of 32, and then written over."""

    def forward(self, codes: Tensor) -> Tensor:
        halves = codes.view(torch.int32) * 2
        halves.sub_(-4)
        codes[:, 2:5] = 2
        return halves.view(torch.int64)


class Decoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Halves()
        self.leave = nn.Linear(6, 6)

    def forward(self, codes: Tensor) -> Tensor:
        return self.leave(self.part(codes).to(self.leave.weight.dtype) / 2**32)


@case(
    "https://github.com/pytorch/pytorch/issues/198101",
    "what is read through a view of another type is read after a later write",
    "part",
    dump=GRAPH,
)
def read_after_a_later_write(variant: Variant) -> None:
    model = compiled(trained(Decoded(), variant.dtype), variant)
    with torch.no_grad():
        model(torch.arange(-12, 12).reshape(4, 6))


if __name__ == "__main__":
    run_case()
