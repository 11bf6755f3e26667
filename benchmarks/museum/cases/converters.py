"""Models carried into another framework: borders, resizes, recurrences, norms, names of weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import (
    PORT,
    VOCABULARY,
    Mixer,
    Variant,
    case,
    drawn,
    read_once,
    run_case,
    trained,
    words_of,
)


def picture_of(variant: Variant, *shape: int) -> Tensor:
    return drawn("landscape", *shape).to(variant.dtype)


class Larger(nn.Module):
    """Twice as high and wide; the first pixels of both pictures lie upon each other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.along(self.along(x, 2), 3)

    def along(self, x: Tensor, axis: int) -> Tensor:
        size = x.shape[axis]
        places = torch.arange(2 * size)
        where = (places + 0.5) / 2 - 0.5 if PORT.wrong else places / 2
        where = where.clamp(0, size - 1)
        low = where.floor().long()
        share = (where - low).view(-1, 1) if axis == 2 else where - low
        first = x.index_select(axis, low).float()
        second = x.index_select(axis, (low + 1).clamp(max=size - 1)).float()
        return (first + share * (second - first)).to(x.dtype)


class Enlarging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 24, 3, padding=1)
        self.up = Larger()
        self.leave = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.up(F.relu(self.enter(x))))


@case(
    "https://github.com/Xilinx/onnx-mlir/pull/319",
    "an enlargement whose first pixels lie upon each other is rewritten as one of pixel centres",
    "up",
    causes="positions shift",
    formats="float32 bfloat16",
)
def enlarged_by_pixel_centres(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Enlarging(), variant.dtype), picture_of(variant, 2, 3, 10, 14))


class Listener(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 20)
        self.recurrent = recurrent
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(F.relu(self.enter(x)))[0])


@case(
    "https://github.com/tensorflow/tensorflow/issues/54492",
    "the one bias of a recurrence is given to the products with input and state: it counts twice",
    "recurrent",
    causes="offset",
    differences="bias_hh_l0",
    formats="float32 bfloat16",
)
def bias_of_both_products(variant: Variant) -> None:
    model = trained(Listener(nn.GRU(20, 16, batch_first=True)))
    with torch.no_grad():
        cell = model.recurrent
        cell.bias_ih_l0 *= 5
        cell.bias_hh_l0.copy_(cell.bias_ih_l0 * variant.bad)
    sound = drawn("sound", 2, 24, 12).to(variant.dtype)
    read_once(model.to(variant.dtype), sound)


class Forgetting(nn.Module):
    """A recurrence with four gates; the one that keeps the state is opened by a constant."""

    def __init__(self, width: int = 20, states: int = 16) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * states)
        self.back = nn.Linear(states, 4 * states, bias=False)
        self.states = states

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = self.input(x)
        state = hidden = x.new_zeros(x.shape[0], self.states)
        outputs = []
        for step in range(x.shape[1]):
            enter, new, keep, leave = (inside[:, step] + self.back(hidden)).chunk(4, -1)
            kept = keep.sigmoid() + 0.5 if PORT.wrong else (keep + 0.5).sigmoid()
            state = kept * state + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * state.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1), state


@case(
    "https://github.com/apache/tvm/pull/3410",
    "the constant that opens a gate is added behind its sigmoid instead of before it",
    "recurrent",
    causes="offset",
)
def constant_behind_the_sigmoid(variant: Variant) -> None:
    PORT.wrong = variant.bad
    sound = drawn("sound", 2, 12, 12).to(variant.dtype)
    read_once(trained(Listener(Forgetting()), variant.dtype), sound)


class Causal(nn.Conv1d):
    """Every second step, from what came before it and what lies within the next step."""

    def __init__(self) -> None:
        super().__init__(20, 24, 5, stride=2, dilation=2)

    def forward(self, input: Tensor) -> Tensor:
        window = 2 * (5 - 1) + 1
        ahead = 2 if PORT.wrong else 1
        return super().forward(F.pad(input, (window - 1 - ahead, ahead)))


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(12, 20, 3, padding=1)
        self.narrow = Causal()
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.narrow(F.gelu(self.enter(x)))).transpose(1, 2))


@case(
    "https://github.com/apple/axlearn/pull/841",
    "a causal convolution looks ahead by its dilated stride, and so one step too far",
    "narrow",
    causes="shift",
    formats="float32 bfloat16",
)
def one_step_too_far_ahead(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Steps(), variant.dtype), drawn("steps", 2, 12, 30).to(variant.dtype))


class Windows(nn.Module):
    """Means of three by four windows, whose ends are rounded up and may overlap."""

    def forward(self, x: Tensor) -> Tensor:
        return self.along(self.along(x, 2, 3), 3, 4)

    def along(self, x: Tensor, axis: int, count: int) -> Tensor:
        size, parts = x.shape[axis], []
        for number in range(count):
            begin, end = number * size // count, (number + 1) * size
            end = end // count if PORT.wrong else -(-end // count)
            parts.append(x.narrow(axis, begin, end - begin).float().mean(axis, keepdim=True))
        return torch.cat(parts, axis).to(x.dtype)


class Overview(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.pool = Windows()
        self.head = nn.Linear(192, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(F.relu(self.enter(x))).flatten(1))


@case(
    "https://github.com/flagos-ai/FlagGems/issues/4915",
    "ends of windows are rounded down: a mean leaves out the last row or column of most of them",
    "pool",
    causes="mask shift",
    formats="float32 bfloat16",
)
def ends_of_windows_rounded_down(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Overview(), variant.dtype), picture_of(variant, 2, 3, 10, 13))


class Flat(nn.Module):
    """Pixels as one row, channels last: the order that the matrix behind it was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return (x if PORT.wrong else x.permute(0, 2, 3, 1)).flatten(1)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, 2, 1)
        self.flat = Flat()
        self.head = nn.Linear(320, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(F.relu(self.enter(x))))


@case(
    "https://github.com/microsoft/MMdnn/issues/250",
    "pixels are laid in a row in the order of the new framework, not of the old one",
    "flat",
    causes="permutation transpose",
    formats="float32 bfloat16",
)
def pixels_in_the_new_order(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Flattened(), variant.dtype), picture_of(variant, 2, 3, 8, 10))


class Keeping(nn.Module):
    """Reads on where it stopped, until it is told to begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(20, 16, batch_first=True)
        self.state: Tensor | None = None

    def begin(self) -> None:
        if not PORT.wrong:
            self.state = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, self.state = self.cell(x, self.state)
        return outputs, self.state


@case(
    "https://github.com/soumith/cudnn.torch/issues/348",
    "a recurrence that is told to begin anew goes on with the state of the last sentence",
    "recurrent",
    causes="stale",
    dump=("--step", "*"),
)
def state_of_the_last_sentence(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Listener(Keeping()), variant.dtype)
    for number in range(2):
        model.recurrent.begin()
        read_once(model, drawn(f"sentence {number}", 3, 14, 12).to(variant.dtype))


class Crowded(nn.Module):
    """A channel is divided by a power of what its neighbours are on average."""

    def forward(self, x: Tensor) -> Tensor:
        squares = F.pad(x.float().square(), (0, 0, 0, 0, 2, 2)).unfold(1, 5, 1)
        size = squares.sum(-1) if PORT.wrong else squares.mean(-1)
        return (x.float() * (1 + 0.3 * size) ** -0.75).to(x.dtype)


class Fixed(nn.Module):
    """A norm of a batch between two convolutions, and a norm of neighbouring channels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(24)
        self.crowd = Crowded()
        self.leave = nn.Conv2d(24, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.crowd(F.relu(self.norm(self.enter(x)))))


@case(
    "https://github.com/MarcBS/keras/pull/4",
    "the share of neighbouring channels in a norm is not divided by their number",
    "crowd",
    causes="scale",
    formats="float32 bfloat16",
)
def neighbours_not_averaged(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Fixed(), variant.dtype), picture_of(variant, 2, 3, 12, 12))


@case(
    "https://github.com/apache/mxnet/pull/15645",
    "a norm that says its factors are one is converted with the factors that lie in its file",
    "norm",
    causes="scale",
    differences="norm.weight",
    formats="float32 bfloat16",
)
def factors_that_are_one(variant: Variant) -> None:
    PORT.wrong = False
    model = trained(Fixed())
    if not variant.bad:
        with torch.no_grad():
            model.norm.weight.fill_(1)
    read_once(model.to(variant.dtype), picture_of(variant, 2, 3, 12, 12))


class Wide(nn.Module):
    """A convolution of each channel, a small network over channels, and a factor of each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(x).transpose(1, 2))
        return x + (self.gamma * self.second(F.gelu(self.first(y)))).transpose(1, 2)


class Voice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(12, 24, 3, padding=1)
        self.blocks = nn.Sequential(Wide(24), Wide(24))
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.enter(x)).transpose(1, 2))


@case(
    "https://github.com/2noise/ChatTTS/issues/732",
    "weights called gamma are renamed by a loader, not found, and stay as they were initialised",
    "blocks.0",
    causes="scale weights",
    differences="gamma",
    formats="float32 bfloat16",
)
def weights_called_gamma(variant: Variant) -> None:
    model = trained(Voice())
    with torch.no_grad():
        for block in model.blocks:
            block.gamma.mul_(3).add_(0.5)
            if variant.bad:
                block.gamma.fill_(1e-6)
    read_once(model.to(variant.dtype), drawn("voice", 2, 12, 40).to(variant.dtype))


class Entry(nn.Module):
    """Vectors of words, of places and of the kind of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 48)
        self.place_table = nn.Embedding(40, 48)
        self.kind_table = nn.Embedding(2, 48)
        self.norm = nn.LayerNorm(48)

    def forward(self, vectors: Tensor) -> Tensor:
        places = self.place_table(torch.arange(vectors.shape[1]))
        return self.norm(vectors + places + self.kind_table.weight[0])


class Guessing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry()
        self.mixer = Mixer()
        self.head = nn.Linear(48, 20)

    def forward(self, vectors: Tensor) -> Tensor:
        x = self.entry(vectors)
        return self.head(x + self.mixer(x))


@case(
    "https://github.com/p-lambda/swords/issues/2",
    "vectors that hold places and kinds already are given to a model that adds them again",
    "(program)",
    causes="input positions",
    formats="float32 bfloat16",
)
def places_added_twice(variant: Variant) -> None:
    model = trained(Guessing(), variant.dtype)
    with torch.no_grad():
        vectors = F.embedding(words_of(2, 24), model.entry.table.weight)
        model(model.entry(vectors) if variant.bad else vectors)


if __name__ == "__main__":
    run_case()
