"""Small networks in which the bugs of the museum are shown: random weights, a second each.

Weights follow from the name of a parameter and its shape alone, so that two variants of a program
that differ in a parameter share all others, as two ports share a checkpoint. A case is a function
of a `Variant`; `@case` says what happened in public, where the fault lies and what may be said of
it, and `run_case` is the command line.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
VOCABULARY = 101
FRESH: tuple[str, ...] = ("fifth.mixers", "fifth.fields", "fifth.lessons")
"""Files of cases that no rule was tuned on: once one was, a file leaves this list for good."""
FILES = (
    *("positions", "attention", "norms", "decoders", "ports", "training", "ranks", "compiled"),
    *("speech", "vision", "diffusion", "graphs", "retrieval", "serving", "losses", "processes"),
    *("contexts", "converters", "updates"),
    *FRESH,
)
"""Files of cases."""


@dataclass(frozen=True)
class Variant:
    """What a program is asked to be: right or wrong, and in which number format."""

    bad: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Case:
    """One bug that happened in public.

    Attributes:
        name: How it is called here.
        url: The public thread.
        title: What was wrong, in our words.
        program: Runs the model, right or wrong.
        sites: Where it lies; any of these is exact. An empty text is the model itself.
        causes: Words of `diagnose` that explain it rightly.
        differences: Texts of which one stands in what differs between the two models, where a
            difference names the bug.
        formats: Number formats of the reference and the candidate.
        dump: Further options of `driftline dump`.
        ranks: Processes that run it.
    """

    name: str
    url: str
    title: str
    program: Callable[[Variant], None]
    sites: tuple[str, ...]
    causes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    formats: tuple[str, str] = ("float32", "float32")
    dump: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def file(self) -> str:
        """The file of cases that it stands in."""
        return self.program.__module__.partition(".cases.")[2]


CASES: dict[str, Case] = {}


class Port:
    """Whether the code of a port is wrong, said by no attribute of a module.

    A port to another framework has code of its own, so what differs must be told from tensors.
    Where the public bug was a setting, or a tensor of the checkpoint, the case has that difference.
    """

    wrong = False


PORT = Port()


def case(
    url: str,
    title: str,
    sites: str,
    *,
    causes: str = "",
    differences: str = "",
    formats: str = "float32 float32",
    dump: tuple[str, ...] = (),
    ranks: int = 1,
) -> Callable[[Callable[[Variant], None]], Callable[[Variant], None]]:
    """Put a program into the museum; several words of one argument are alternatives."""
    reference, candidate = formats.split()

    def enter(program: Callable[[Variant], None]) -> Callable[[Variant], None]:
        name = program.__name__
        CASES[name] = Case(
            *(name, url, title, program, tuple(sites.split()) or ("",)),
            causes=tuple(causes.split()),
            differences=tuple(differences.split()),
            formats=(reference, candidate),
            dump=dump,
            ranks=ranks,
        )
        return program

    return enter


def run_case() -> None:
    """The command line of every file of cases."""
    words = argparse.ArgumentParser()
    words.add_argument("case", choices=sorted(CASES))
    words.add_argument("--variant", choices=("good", "bad"), default="good")
    words.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    asked = words.parse_args()
    torch.manual_seed(0)
    CASES[asked.case].program(Variant(asked.variant == "bad", DTYPES[asked.dtype]))


# Weights and data.


def drawn(name: str, *shape: int) -> Tensor:
    """Normal numbers that follow from a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator)


def trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with the weights of its checkpoint, in evaluation mode and in a format."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = drawn(name, *weight.shape)
            if weight.dim() > 1 and "table" not in name:
                values *= 1.4 / math.sqrt(weight[0].numel())
            elif weight.dim() == 1:
                values = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
            weight.copy_(values)
    return model.eval().to(dtype)


def words_of(rows: int, length: int, name: str = "words") -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


# Parts.


class RootNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (self.offset + self.weight.float())).to(x.dtype)


class Rotation(nn.Module):
    """Cosine and sine of positions, for the features of a head that turn."""

    def __init__(self, size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base
        frequencies = base ** (-torch.arange(0, size, 2).float() / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.frequencies.float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of every head, as many as there are angles."""
    size = cos.shape[-1]
    head, rest = x[..., :size], x[..., size:]
    first, second = head.chunk(2, -1)
    head = head * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([head, rest], -1)


class Mixer(nn.Module):
    """Attention with grouped heads; what a port may get wrong is a method of its own."""

    def __init__(self, width: int = 48, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.groups, 1)

    def turn(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return turned(q, *angles), turned(k, *angles)

    def bias(self, queries: int, keys: int) -> Tensor:
        """What is added to the scores: causal, the last query sits beside the last key."""
        seen = torch.ones(queries, keys).tril(keys - queries).bool()
        return torch.zeros(queries, keys).masked_fill(~seen, -torch.inf)

    def shares(self, scores: Tensor) -> Tensor:
        """How much of each value a query takes."""
        return scores.softmax(-1)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None, past: list | None = None
    ) -> Tensor:
        rows, length, _ = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(rows, length, heads, self.size).transpose(1, 2)

        q, k, v = (
            split(self.query(x), self.heads),
            split(self.key(x), self.groups),
            split(self.value(x), self.groups),
        )
        if angles is not None:
            q, k = self.turn(q, k, angles)
        if past is not None:
            past.append((k, v))
            k, v = torch.cat([k for k, _ in past], 2), torch.cat([v for _, v in past], 2)
        scores = q @ self.spread(k).transpose(-1, -2) / math.sqrt(self.size)
        scores = scores.float() + self.bias(length, k.shape[2])
        y = self.shares(scores).to(x.dtype) @ self.spread(v)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Gated(nn.Module):
    def __init__(self, width: int = 48, inner: int = 96) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(
        self, mixer: nn.Module, norm: Callable[[], nn.Module], feed: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.before, self.mixer, self.between, self.feed = norm(), mixer, norm(), feed()
        self.share = 1.0

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None, past: list | None = None
    ) -> Tensor:
        x = x + self.share * self.mixer(self.before(x), angles, past)
        return x + self.share * self.feed(self.between(x))


class Language(nn.Module):
    """A decoder of a few layers."""

    def __init__(
        self,
        mixer: Callable[[], nn.Module] = Mixer,
        norm: Callable[[], nn.Module] = lambda: RootNorm(48),
        feed: Callable[[], nn.Module] = Gated,
        rotation: nn.Module | None = None,
        layers: int = 3,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 48)
        self.rotation = rotation
        self.stack = nn.ModuleList(Layer(mixer(), norm, feed) for _ in range(layers))
        self.last = norm()
        self.head = nn.Linear(48, VOCABULARY, bias=False)

    def forward(self, words: Tensor, past: list[list] | None = None, begin: int = 0) -> Tensor:
        x = self.table(words)
        angles = None
        if self.rotation is not None:
            positions = torch.arange(begin, begin + words.shape[1])[None].expand_as(words)
            angles = self.rotation(positions, x.dtype)
        for number, layer in enumerate(self.stack):
            x = layer(x, angles, None if past is None else past[number])
        return self.head(self.last(x))


def read_once(model: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        model(*inputs)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
