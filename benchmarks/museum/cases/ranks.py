"""Two processes that share a model: which rows of a matrix belong to whom."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import Variant, case, drawn, run_case


class SharedFeed(nn.Module):
    """Gate and up in one matrix, cut over two processes; the sum of both is taken at the end."""

    def __init__(self, rank: int, plain: bool) -> None:
        super().__init__()
        gate, up = drawn("gate", 64, 32) / 5, drawn("up", 64, 32) / 5
        if plain:
            fused = torch.cat([gate, up]).chunk(2)[rank]
        else:
            fused = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        self.gate_up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            self.gate_up.weight.copy_(fused)
            self.down.weight.copy_((drawn("down", 32, 64) / 8).chunk(2, 1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y = self.down(F.silu(gate) * up)
        dist.all_reduce(y)
        return y


class SharedNet(nn.Module):
    def __init__(self, rank: int, plain: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.feed = SharedFeed(rank, plain)
        self.head = nn.Linear(32, 9)
        with torch.no_grad():
            self.head.weight.copy_(drawn("head", 9, 32) / 5)
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.feed(self.norm(x)))


@case(
    "https://github.com/xLLM-AI/xllm/pull/1616",
    "a fused matrix of gate and up is cut in the middle: one process has all gates",
    "feed.gate_up",
    causes="permutation",
    differences="gate_up.weight",
    ranks=2,
)
def gates_on_one_rank(variant: Variant) -> None:
    dist.init_process_group("gloo")
    model = SharedNet(dist.get_rank(), variant.bad).eval()
    with torch.no_grad():
        model(drawn("x", 4, 10, 32))
    dist.destroy_process_group()


class SharedMixer(nn.Module):
    """Queries, keys and values in one matrix, two of four heads on each process."""

    def __init__(self, rank: int, plain: bool) -> None:
        super().__init__()
        parts = [drawn(name, 32, 32) / 5 for name in ("query", "key", "value")]
        if plain:
            fused = torch.cat(parts).chunk(2)[rank]
        else:
            fused = torch.cat([part.chunk(2)[rank] for part in parts])
        self.fused = nn.Linear(32, 48, bias=False)
        self.out = nn.Linear(16, 32, bias=False)
        with torch.no_grad():
            self.fused.weight.copy_(fused)
            self.out.weight.copy_((drawn("out", 32, 32) / 5).chunk(2, 1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.fused(x).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(rows, length, 16))
        dist.all_reduce(y)
        return y


class SharedAttention(nn.Module):
    def __init__(self, rank: int, plain: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mixer = SharedMixer(rank, plain)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


@case(
    "https://github.com/vllm-project/vllm/issues/42803",
    "a fused matrix of queries, keys and values is cut in equal pieces",
    "mixer.fused",
    causes="permutation",
    differences="fused.weight",
    ranks=2,
)
def queries_in_place_of_keys(variant: Variant) -> None:
    dist.init_process_group("gloo")
    model = SharedAttention(dist.get_rank(), variant.bad).eval()
    with torch.no_grad():
        model(drawn("x", 2, 12, 32))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_case()
