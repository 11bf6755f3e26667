"""What mixes tokens: attention, linear attention, recurrences, their caches, experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.training import ALL_STEPS
from benchmarks.museum.networks import (
    PORT,
    Variant,
    case,
    drawn,
    read_once,
    run_case,
    trained,
)

ALL_CALLS = ("--step", "*")


class HeadsByEinsum(nn.Module):
    """Attention in both directions; queries, keys and values are one product."""

    def __init__(self, width: int = 40, heads: int = 5) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        divisor = math.sqrt(self.width if PORT.wrong else self.width // self.heads)
        share = (torch.einsum("bqhd,bkhd->bhqk", q, k).float() / divisor).softmax(-1).to(h.dtype)
        return self.proj(torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2))


@case(
    "https://github.com/sooftware/conformer/pull/55",
    "scores are divided by the root of the model's width, not by that of a head's",
    "2",
    causes="scale",
    formats="float32 bfloat16",
)
def divided_by_the_whole_width(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = nn.Sequential(
        nn.Linear(12, 40), nn.LayerNorm(40), HeadsByEinsum(), nn.LayerNorm(40), nn.Linear(40, 9)
    )
    frames = 2 * drawn("frames of speech", 2, 26, 12)
    read_once(trained(model, variant.dtype), frames.to(variant.dtype))


class ByDistance(nn.Module):
    """Attention of a whole recording; what a distance adds to a score depends on the query."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.pos_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width)

    def encoding(self, count: int, width: int, like: Tensor) -> Tensor:
        """Waves of the distances from the farthest behind to the farthest ahead."""
        pace = 100.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(count - 1, -count, -1)[:, None] * pace
        return torch.cat([angles.sin(), angles.cos()], -1).to(like)

    def moved(self, table: Tensor) -> Tensor:
        """Of every query's row of distances, the part that begins at its own distance."""
        batch, heads, count, _ = table.shape
        if PORT.wrong:  # right below the diagonal only, which is all that a causal model reads
            table = F.pad(table[..., :count], (1, 0))
            return table.view(batch, heads, count + 1, count)[:, :, 1:]
        place = torch.arange(count)
        index = count - 1 - place[:, None] + place[None]
        return table.gather(-1, index.expand(batch, heads, count, count))

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        r = split(self.pos_proj(self.encoding(x.shape[1], x.shape[2], x)))
        scores = q @ k.transpose(-1, -2) + self.moved(q @ r.transpose(-1, -2))
        share = (scores.float() / math.sqrt(q.shape[-1])).softmax(-1).to(x.dtype)
        return self.o_proj((share @ v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self, mixer: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.subsample = nn.Linear(16, width)
        self.norm1, self.attn = nn.LayerNorm(width), mixer
        self.norm2 = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))
        self.ctc = nn.Linear(width, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.subsample(x)
        x = x + self.attn(self.norm1(x))
        x = x + self.ff(self.norm2(x))
        return self.ctc(x)


@case(
    "https://github.com/ZhengkunTian/OpenTransformer/issues/25",
    "distances are lined up as a causal model does it: keys ahead have other queries' scores",
    "attn",
    causes="positions shift",
    formats="float32 bfloat16",
)
def distances_of_a_causal_model(variant: Variant) -> None:
    PORT.wrong = variant.bad
    speech = drawn("speech", 2, 22, 16).to(variant.dtype)
    read_once(trained(Encoder(ByDistance()), variant.dtype), speech)


class SumUpToHere(nn.Module):
    """Linear attention: a token reads the sum of what came before, over the sum of the keys."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def key_sums(self, k: Tensor) -> Tensor:
        return k.cumsum(1)

    def forward(self, x: Tensor) -> Tensor:
        q = F.elu(self.to_q(x).float()).unflatten(-1, (self.heads, -1)) + 1
        k = F.elu(self.to_k(x).float()).unflatten(-1, (self.heads, -1)) + 1
        v = self.to_v(x).float().unflatten(-1, (self.heads, -1))
        memory = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        read = torch.einsum("bthk,bthkv->bthv", q, memory)
        total = (q * self.key_sums(k)).sum(-1, keepdim=True)
        return self.to_out((read / (total + 1e-10)).flatten(2).to(x.dtype))


class SumOverHeads(SumUpToHere):
    def key_sums(self, k: Tensor) -> Tensor:
        return k.cumsum(-2 if PORT.wrong else 1)


@case(
    "https://github.com/fla-org/flash-linear-attention/pull/594",
    "keys are summed up along the heads, not along time, for what a linear attention divides by",
    "attn",
    causes="scale",
    formats="float32 bfloat16",
)
def keys_summed_over_heads(variant: Variant) -> None:
    PORT.wrong = variant.bad
    tokens = drawn("tokens", 2, 20, 16).to(variant.dtype)
    read_once(trained(Encoder(SumOverHeads()), variant.dtype), tokens)


class SumCutOff(SumUpToHere):
    def key_sums(self, k: Tensor) -> Tensor:
        return (k.detach() if PORT.wrong else k).cumsum(1)


@case(
    "https://github.com/fla-org/flash-linear-attention/pull/875",
    "no gradient goes back from what a linear attention divides by to its keys",
    "attn",
    causes="scale",
    dump=ALL_STEPS,
)
def divisor_without_a_gradient(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Encoder(SumCutOff()), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(2):
        said = model(drawn(f"tokens {step}", 3, 18, 16))
        F.cross_entropy(said.flatten(0, 1), drawn(f"label {step}", 54, 11).argmax(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Ring(nn.Module):
    """A window of keys kept in a ring; several tokens at once first lay the ring out in order."""

    window = 8

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        self.kept: list[Tensor] = []
        self.at = self.seen = 0

    def ring(self, new: list[Tensor]) -> list[Tensor]:
        """Keys and values that the new tokens read, with the new ones at their end."""
        count = new[0].shape[1]
        if count == 1 and self.seen >= self.window:
            for kept, each in zip(self.kept, new, strict=True):
                kept[:, self.at % self.window] = each[:, 0]
            self.at = self.at % self.window + 1
            self.seen += 1
            return [torch.cat([kept[:, self.at :], kept[:, : self.at]], 1) for kept in self.kept]
        if self.kept:
            old = [kept[:, : self.at] for kept in self.kept]
            if self.seen > self.window and not PORT.wrong:
                old = [
                    torch.cat([kept[:, self.at :], first], 1)
                    for kept, first in zip(self.kept, old, strict=True)
                ]
            new = [torch.cat(pair, 1) for pair in zip(old, new, strict=True)]
        self.kept = [each[:, -self.window :].clone() for each in new]
        self.at, self.seen = self.kept[0].shape[1], self.seen + count
        return new

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x)
        k, v = self.ring([self.wk(x), self.wv(x)])
        place = torch.arange(k.shape[1])
        apart = place[-x.shape[1] :, None] - place
        hidden = (apart < 0) | (apart >= self.window)
        scores = (q @ k.transpose(1, 2)).float() / math.sqrt(q.shape[-1])
        return self.wo(scores.masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype) @ v)


class Talker(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.wte = nn.Embedding(60, 32)
        self.ln, self.mix = nn.LayerNorm(32), mixer
        self.lm_head = nn.Linear(32, 60, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.wte(ids)
        return self.lm_head(h + self.mix(self.ln(h)))


def read_in_parts(model: nn.Module, lengths: tuple[int, ...]) -> None:
    ids = torch.randint(60, (2, sum(lengths)), generator=torch.Generator().manual_seed(70))
    for part in ids.split(list(lengths), 1):
        read_once(model, part)


@case(
    "https://github.com/ollama/ollama/pull/15591",
    "a ring of keys that has wrapped is cut at its write mark before more tokens are appended",
    "mix",
    causes="mask stale",
    dump=ALL_CALLS,
)
def ring_cut_at_its_mark(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_in_parts(trained(Talker(Ring()), variant.dtype), (8, 1, 1, 1, 5))


class TokenShift(nn.Module):
    """A mean of a token and the one before it, which may be the last one of the part before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.zeros(width))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        is_lost = PORT.wrong and x.shape[1] == 1
        before = torch.zeros_like(x[:, :1]) if self.last is None or is_lost else self.last
        self.last = x[:, -1:]
        past = torch.cat([before, x[:, :-1]], 1)
        return x + (past - x) * (0.5 + self.mu)


class ChannelMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_shift = TokenShift()
        self.key, self.value = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(F.relu(self.key(self.token_shift(x))).square())


@case(
    "https://github.com/ggml-org/llama.cpp/pull/11445",
    "the token before is not kept while a text is written: single words are mixed with zero",
    "mix.token_shift",
    causes="stale zeroed",
    dump=ALL_CALLS,
)
def mixed_with_zero(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_in_parts(trained(Talker(ChannelMix()), variant.dtype), (12, 1, 1))


class Decaying(nn.Module):
    """A state of every head that decays, from a state that is given; samples have their own."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.decay = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, r: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
        if PORT.wrong:
            state = state[:1].expand_as(state)
        r, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (r, k, v))
        keep = torch.exp(-torch.exp(self.decay - 1))[..., None]
        outputs = []
        for t in range(r.shape[1]):
            outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
            state = keep * state + k[:, t, :, :, None] * v[:, t, :, None]
        return torch.stack(outputs, 1).flatten(2)


class Continued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.receptance, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))
        self.wkv = Decaying()
        self.ln_x, self.output = nn.GroupNorm(3, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y = self.wkv(self.receptance(x), self.key(x), self.value(x), state)
        return self.output(self.ln_x(y.flatten(0, 1)).view_as(y))


@case(
    "https://github.com/BlinkDL/RWKV-LM/issues/241",
    "where the states of a batch are read, the step from sample to sample is missing",
    "wkv",
    causes="stale permutation",
)
def state_of_the_first_sample(variant: Variant) -> None:
    PORT.wrong = variant.bad
    x, state = drawn("sentence", 3, 14, 24), drawn("state", 3, 3, 8, 8)
    read_once(trained(Continued(), variant.dtype), x, state)


class Selective(nn.Module):
    """A state space whose pace follows the input; the scan adds the bias of the pace."""

    def __init__(self, width: int = 24, states: int = 6, is_biased: bool = False) -> None:
        super().__init__()
        self.states = states
        self.x_proj = nn.Linear(width, 4 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(4, width, bias=is_biased)
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.A_log = nn.Parameter(torch.zeros(width, states))
        self.D = nn.Parameter(torch.zeros(width))

    def forward(self, u: Tensor) -> Tensor:
        dt, b, c = self.x_proj(u).split([4, self.states, self.states], -1)
        pace = F.softplus(self.dt_proj(dt).float() + self.dt_bias.float())
        keep = torch.exp(pace[..., None] * -torch.exp(self.A_log.float()))
        enter = (pace * u.float())[..., None] * b[:, :, None].float()
        state, outputs = torch.zeros_like(keep[:, 0]), []
        for t in range(u.shape[1]):
            state = keep[:, t] * state + enter[:, t]
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, t].float()))
        return (torch.stack(outputs, 1) + self.D.float() * u.float()).to(u.dtype)


@case(
    "https://github.com/modular/modular/pull/5748",
    "the projection to the pace of a scan has the bias that the scan adds as well",
    "1.dt_proj",
    causes="offset",
    differences="dt_proj.bias",
    formats="float32 bfloat16",
)
def bias_of_the_pace_twice(variant: Variant) -> None:
    mixer = Selective(is_biased=variant.bad)
    model = trained(nn.Sequential(nn.Linear(10, 24), mixer, nn.LayerNorm(24), nn.Linear(24, 7)))
    with torch.no_grad():
        mixer.dt_bias.copy_(drawn("pace", 24) - 1)
        if variant.bad:
            mixer.dt_proj.bias.copy_(mixer.dt_bias)
    read_once(model.to(variant.dtype), drawn("signal", 2, 16, 10).to(variant.dtype))


class WithAuxiliary(torch.autograd.Function):
    """Passes a tensor on; going back, a second loss gets its gradient too."""

    @staticmethod
    def forward(ctx, weights: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (auxiliary,) = ctx.saved_tensors
        return gradient, torch.ones_like(auxiliary)


class Gate(nn.Module):
    """Chooses two of six experts; that they are chosen equally often is a loss of its own."""

    def __init__(self, width: int = 24, experts: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        often = F.one_hot(chosen, scores.shape[-1]).sum(-2).flatten(0, -2).float().mean(0)
        balance = 0.5 * scores.shape[-1] * (often * scores.flatten(0, -2).mean(0)).sum()
        counted = WithAuxiliary.apply(weights, balance)
        return (weights if PORT.wrong else counted), chosen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.up = nn.Parameter(torch.zeros(6, 24, 32))
        self.down = nn.Parameter(torch.zeros(6, 32, 24))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        inside = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        every = torch.einsum("btef,efd->bted", inside, self.down)
        taken = every.gather(2, chosen[..., None].expand(*chosen.shape, every.shape[-1]))
        return x + (weights[..., None] * taken).sum(2)


@case(
    "https://github.com/NVIDIA-NeMo/Automodel/issues/1408",
    "what carries the gradient of the balance of experts is thrown away, its argument is returned",
    "1.gate",
    causes="scale loss",
    dump=ALL_STEPS,
)
def balance_without_a_gradient(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = nn.Sequential(nn.Linear(12, 24), Experts(), nn.LayerNorm(24), nn.Linear(24, 8))
    trained(model, variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        said = model(drawn(f"input {step}", 4, 10, 12))
        F.cross_entropy(said.flatten(0, 1), drawn(f"class {step}", 40, 8).argmax(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run_case()
