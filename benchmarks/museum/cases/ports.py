"""Ports of pictures, sound and recurrences: layouts, borders, bands, gates, samplers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.positions import Denoiser, Times
from benchmarks.museum.networks import PORT, Variant, case, drawn, read_once, run_case, trained


class Recurrent(nn.Module):
    """Four gates from the input and the state: input, output, forget, candidate."""

    def __init__(self, width: int = 24, states: int = 32) -> None:
        super().__init__()
        self.states = states
        self.enter = nn.Linear(width, 4 * states)
        self.again = nn.Linear(states, 4 * states)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[0], self.states)
        outputs, entered = [], self.enter(x)
        for step in range(x.shape[1]):
            first, second, third, fourth = (entered[:, step] + self.again(state)).chunk(4, -1)
            if PORT.wrong:
                take, keep, new, show = first, second, third, fourth
            else:
                take, show, keep, new = first, second, third, fourth
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            state = show.sigmoid() * cell.tanh()
            outputs.append(state)
        return torch.stack(outputs, 1)


class Reset(nn.Module):
    """Three gates; the state is reset behind its product with the weights, or before it."""

    def __init__(self, width: int = 24, states: int = 32, behind: bool = True) -> None:
        super().__init__()
        self.states, self.linear_before_reset = states, behind
        self.enter = nn.Linear(width, 3 * states)
        self.gates = nn.Linear(states, 2 * states)
        self.new = nn.Linear(states, states)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.states)
        outputs, entered = [], self.enter(x)
        for step in range(x.shape[1]):
            given = entered[:, step]
            keep, reset = (given[:, : 2 * self.states] + self.gates(state)).sigmoid().chunk(2, -1)
            again = reset * self.new(state) if self.linear_before_reset else self.new(reset * state)
            new = (given[:, 2 * self.states :] + again).tanh()
            state = keep * state + (1 - keep) * new
            outputs.append(state)
        return torch.stack(outputs, 1)


class Speech(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, 24, 8, 4)
        self.recurrent = recurrent
        self.head = nn.Linear(32, 7)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head(self.recurrent(self.frames(wave[:, None]).transpose(1, 2)))


@case(
    "https://github.com/CrispStrobe/CrispASR/pull/106",
    "gates of a recurrence are read in the order of another library",
    "recurrent",
    causes="permutation",
)
def gates_in_another_order(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Speech(Recurrent()), variant.dtype), drawn("wave", 2, 100).to(variant.dtype))


@case(
    "https://github.com/microsoft/onnxscript/issues/2852",
    "a recurrence is exported without the flag that says where its state is reset",
    "recurrent",
    causes="setting",
    differences="linear_before_reset",
)
def state_reset_too_early(variant: Variant) -> None:
    model = Speech(Reset(behind=not variant.bad))
    read_once(trained(model, variant.dtype), drawn("wave", 2, 100).to(variant.dtype))


class DepthToSpace(nn.Module):
    """Channels become pixels; those of one output channel lie next to each other."""

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, height, width = x.shape
        if PORT.wrong:
            blocks = x.view(rows, 2, 2, channels // 4, height, width).permute(0, 3, 4, 1, 5, 2)
            return blocks.reshape(rows, channels // 4, 2 * height, 2 * width)
        return F.pixel_shuffle(x, 2)


class Larger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.shuffle = DepthToSpace()
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.relu(self.shuffle(self.enter(x))))


def picture_of(variant: Variant, *shape: int) -> Tensor:
    return drawn("picture", *shape).to(variant.dtype)


@case(
    "https://github.com/PINTO0309/onnx2tf/pull/92",
    "channels become pixels in the order of another framework",
    "shuffle",
    causes="permutation",
    formats="float32 bfloat16",
)
def pixels_in_another_order(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Larger(), variant.dtype), picture_of(variant, 2, 3, 12, 16))


class Halving(nn.Conv2d):
    """As many outputs as half the inputs; of an odd border, the larger part lies at the end."""

    def forward(self, input: Tensor) -> Tensor:
        first, last = (1, 1) if PORT.wrong else (0, 1)
        return super().forward(F.pad(input, (first, last, first, last)))


class Network(nn.Module):
    def __init__(self, enter: nn.Module, pool: nn.Module) -> None:
        super().__init__()
        self.enter, self.act, self.pool = enter, nn.SiLU(), pool
        self.next = nn.Conv2d(16, 24, 3, padding=1)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.enter(x)))
        return self.head(F.relu(self.next(x)).mean((2, 3)))


@case(
    "https://github.com/lukemelas/EfficientNet-PyTorch/pull/235",
    "an odd border of a halving convolution is as wide before a picture as behind it",
    "enter",
    causes="shift",
    formats="float32 bfloat16",
)
def border_on_both_sides(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = Network(Halving(3, 16, 3, 2), nn.Identity())
    read_once(trained(model, variant.dtype), picture_of(variant, 2, 3, 24, 24))


@case(
    "https://github.com/sonos/tract/pull/2654",
    "a mean of neighbours does not count the border, and loses the flag that it should",
    "pool",
    causes="scale",
    differences="count_include_pad",
    formats="float32 bfloat16",
)
def border_not_counted(variant: Variant) -> None:
    pool = nn.AvgPool2d(3, 2, 1, count_include_pad=not variant.bad)
    model = Network(nn.Conv2d(3, 16, 3, padding=1), pool)
    read_once(trained(model, variant.dtype), picture_of(variant, 2, 3, 24, 24))


def bands_of(count: int, sizes: int, same_area: bool) -> Tensor:
    """Triangles over frequencies, evenly spaced in mel; of one height, or of one area."""
    most = 2595 * torch.log10(torch.tensor(1 + 8000 / 700))
    edges = 700 * (10 ** (torch.linspace(0, float(most), count + 2) / 2595) - 1)
    at = torch.linspace(0, 8000, sizes)[:, None]
    rising = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    bands = torch.minimum(rising, falling).clamp(min=0)
    return bands * 2000 / (edges[2:] - edges[:-2]) if same_area else bands


class Mel(nn.Module):
    def __init__(self, same_area: bool) -> None:
        super().__init__()
        self.register_buffer("bands", bands_of(20, 65, same_area), persistent=False)

    def forward(self, power: Tensor) -> Tensor:
        return torch.log(power @ self.bands.to(power.dtype) + 1e-6)


class Sound(nn.Module):
    def __init__(self, same_area: bool) -> None:
        super().__init__()
        self.mel = Mel(same_area)
        self.enter = nn.Conv1d(20, 32, 3, padding=1)
        self.head = nn.Linear(32, 5)

    def forward(self, wave: Tensor) -> Tensor:
        parts = wave.unfold(-1, 128, 64).float() * torch.hann_window(128)
        power = torch.fft.rfft(parts).abs().square().to(wave.dtype)
        x = self.mel(power).transpose(1, 2)
        return self.head(F.gelu(self.enter(x)).mean(-1))


@case(
    "https://github.com/pytorch/audio/issues/1058",
    "bands of a spectrum have one height where the reference gives them one area",
    "mel",
    causes="scale offset weights",
    differences="bands",
)
def bands_of_another_library(variant: Variant) -> None:
    wave = drawn("wave", 2, 1600).to(variant.dtype)
    read_once(trained(Sound(not variant.bad), variant.dtype), wave)


class Level(nn.Module):
    """Every recording is brought to mean zero and variance one."""

    def forward(self, wave: Tensor) -> Tensor:
        return F.layer_norm(wave, wave.shape if PORT.wrong else wave.shape[1:])


class Levelled(Speech):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 32))
        self.level = Level()

    def forward(self, wave: Tensor) -> Tensor:
        return super().forward(self.level(wave))


@case(
    "https://github.com/speechbrain/speechbrain/issues/1247",
    "recordings are normalised as one batch instead of one by one",
    "level",
    causes="scale",
    formats="float32 bfloat16",
)
def recordings_normalised_together(variant: Variant) -> None:
    PORT.wrong = variant.bad
    wave = drawn("wave", 3, 200) * torch.tensor([[0.3], [1.0], [2.5]]) + 0.2
    read_once(trained(Levelled(), variant.dtype), wave.to(variant.dtype))


class ChannelNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        axis = -1 if PORT.wrong else 1
        normal = x * torch.rsqrt(x.square().mean(axis, keepdim=True) + 1e-6)
        return normal * self.weight[:, None, None]


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = ChannelNorm(16)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


@case(
    "https://github.com/huggingface/diffusers/issues/11387",
    "a norm over channels goes along the columns of a picture",
    "norm",
    causes="scale",
)
def norm_along_columns(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Spread(), variant.dtype), picture_of(variant, 2, 3, 12, 20))


class Attend(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fused = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, windows: Tensor, mask: Tensor) -> Tensor:
        count, length, width = windows.shape
        q, k, v = self.fused(windows).view(count, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask[:, None].to(q.dtype))
        return self.out(y.transpose(1, 2).reshape(count, length, width))


class Windows(nn.Module):
    """Attention inside of windows of four by four, which every second block shifts by two."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm = nn.LayerNorm(32)
        self.attend = Attend()

    @staticmethod
    def cut(x: Tensor) -> Tensor:
        rows, height, width, channels = x.shape
        x = x.view(rows, height // 4, 4, width // 4, 4, channels).transpose(2, 3)
        return x.reshape(-1, 16, channels)

    def mask(self, rows: int, side: int) -> Tensor:
        """Places that a shift brought together from both ends do not see each other."""
        ends = torch.zeros(side)
        if self.shift:
            ends[-4:], ends[-self.shift :] = 1, 2
        regions = self.cut((3 * ends[:, None] + ends)[None, :, :, None].repeat(rows, 1, 1, 1))
        return (regions != regions.transpose(1, 2)).float() * -100.0

    def forward(self, x: Tensor) -> Tensor:
        rows, height, width, channels = x.shape
        more = -height % 4
        y = self.norm(x)
        border = (0, 0, 0, more, 0, more)
        if PORT.wrong:
            y = F.pad(y.roll((-self.shift, -self.shift), (1, 2)), border)
        else:
            y = F.pad(y, border).roll((-self.shift, -self.shift), (1, 2))
        side = height + more
        y = self.attend(self.cut(y), self.mask(rows, side))
        y = y.view(rows, side // 4, side // 4, 4, 4, channels).transpose(2, 3)
        y = y.reshape(rows, side, side, channels)
        if PORT.wrong:
            y = y[:, :height, :width].roll((self.shift, self.shift), (1, 2))
        else:
            y = y.roll((self.shift, self.shift), (1, 2))[:, :height, :width]
        return x + y


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.ModuleList(Windows(shift) for shift in (0, 2))
        self.head = nn.Linear(32, 6)

    def forward(self, picture: Tensor) -> Tensor:
        x = self.patch(picture).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@case(
    "https://github.com/huggingface/pytorch-image-models/issues/2438",
    "a picture is filled up behind the shift of its windows, so the mask lies beside the seam",
    "blocks.1",
    causes="mask shift",
    formats="float32 bfloat16",
)
def windows_filled_up_after_their_shift(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Windowed(), variant.dtype), picture_of(variant, 2, 3, 36, 36))


@case(
    "https://github.com/huggingface/diffusers/pull/2094",
    "a sampler takes the predicted picture for the predicted noise",
    "(program)",
    causes="input",
    dump=("--step", "*"),
)
def picture_taken_for_noise(variant: Variant) -> None:
    Times.swapped, Times.shift = False, 0.0
    model = trained(Denoiser(Times()), variant.dtype)
    signal = torch.tensor([0.2, 0.5, 0.8, 0.98])
    x = picture_of(variant, 2, 3, 16, 16)
    with torch.no_grad():
        for number, time in enumerate((900, 600, 300)):
            now, then = signal[number], signal[number + 1]
            picture = model(x, torch.tensor([time, time]))
            noise = picture if variant.bad else (x - now.sqrt() * picture) / (1 - now).sqrt()
            x = then.sqrt() * picture + (1 - then).sqrt() * noise


if __name__ == "__main__":
    run_case()
