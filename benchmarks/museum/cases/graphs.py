"""Graphs: self-loops, whose neighbours a softmax is over, which end of an edge is meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import PORT, Variant, case, drawn, read_once, run_case, trained

NODES = 24


def edges() -> tuple[Tensor, Tensor]:
    """From which node to which; no node to itself, and numbers of neighbours differ."""
    generator = torch.Generator().manual_seed(17)
    near = torch.rand(NODES, NODES, generator=generator) < torch.linspace(0.08, 0.4, NODES)
    near.fill_diagonal_(False)
    near |= torch.eye(NODES).roll(1, 0).bool()
    return near.nonzero(as_tuple=True)


class Hops(nn.Module):
    """What lies up to two steps away, each step divided by the roots of both ends' degrees."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.near = nn.ModuleList(nn.Linear(width, out, bias=False) for _ in range(3))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        if PORT.wrong:
            own = torch.arange(len(x))
            source, target = torch.cat([source, own]), torch.cat([target, own])
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target)))
        inverse = degree.clamp(min=1).rsqrt()
        factors = (inverse[source] * inverse[target])[:, None].to(x.dtype)
        y = self.near[0](x)
        for hop in self.near[1:]:
            x = torch.zeros_like(x).index_add_(0, target, x[source] * factors)
            y = y + hop(x)
        return y


class Gaze(nn.Module):
    """Every node takes from those that point to it, by shares that add up to one."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.turn = nn.Linear(width, out, bias=False)
        self.giving = nn.Parameter(torch.zeros(1, out))
        self.taking = nn.Parameter(torch.zeros(1, out))

    def ends(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return (y * self.giving).sum(-1), (y * self.taking).sum(-1)

    def shared(self, source: Tensor, target: Tensor) -> Tensor:
        """The ends whose shares add up to one."""
        del source
        return target

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        y = self.turn(x)
        giving, taking = self.ends(y)
        weights = F.leaky_relu(giving[source] + taking[target], 0.2).float().exp()
        ends = self.shared(source, target)
        sums = torch.zeros(len(x)).index_add_(0, ends, weights)
        shares = (weights / sums[ends])[:, None].to(x.dtype)
        return torch.zeros_like(y).index_add_(0, target, y[source] * shares)


class SharedByGivers(Gaze):
    def shared(self, source: Tensor, target: Tensor) -> Tensor:
        return source if PORT.wrong else target


class OneVector(Gaze):
    def ends(self, y: Tensor) -> tuple[Tensor, Tensor]:
        giving, taking = super().ends(y)
        return giving, giving if PORT.wrong else taking


class Graph(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 20)
        self.first = first
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return self.head(F.relu(self.first(self.enter(x), source, target)))


def look(variant: Variant, first: nn.Module) -> None:
    PORT.wrong = variant.bad
    x = drawn("nodes", NODES, 12).to(variant.dtype)
    read_once(trained(Graph(first), variant.dtype), x, *edges())


@case(
    "https://github.com/pyg-team/pytorch_geometric/issues/1104",
    "every node is made its own neighbour by the normalisation, and the layer has none such",
    "first",
    causes="scale mask",
    formats="float32 bfloat16",
)
def own_neighbour(variant: Variant) -> None:
    look(variant, Hops(20, 16))


@case(
    "https://github.com/pyg-team/pytorch_geometric/issues/224",
    "shares add up to one over the nodes that one points to, not over those that point to it",
    "first",
    causes="scale transpose",
    formats="float32 bfloat16",
)
def shares_of_the_other_end(variant: Variant) -> None:
    look(variant, SharedByGivers(20, 16))


@case(
    "https://github.com/pyg-team/pytorch_geometric/issues/1642",
    "both ends of an edge are weighed with the vector of the one that gives",
    "first",
    causes="weights permutation",
)
def one_vector_for_both_ends(variant: Variant) -> None:
    look(variant, OneVector(20, 16))


if __name__ == "__main__":
    run_case()
