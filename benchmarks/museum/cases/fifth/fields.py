"""Pictures, waves, graphs, molecules, coarse numbers, samplers."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import (
    PORT,
    Language,
    Rotation,
    Variant,
    case,
    drawn,
    read_once,
    run_case,
    trained,
    words_of,
)


class Harmonics(nn.Module):
    """A constant and the nine functions of a direction of the fourth degree."""

    def forward(self, d: Tensor) -> Tensor:
        x, y, z = d.float().unbind(-1)
        xx, yy, zz = x * x, y * y, z * z
        odd = 0.6690465435572892 * y * (7 * zz - 3)
        last = xx * (xx - 3 * yy) - yy * (3 * xx - yy)
        values = [
            torch.full_like(x, 0.28209479177387814),
            2.5033429417967046 * x * y * (xx - yy),
            1.7701307697799304 * y * z * (3 * xx - yy),
            0.9461746957575601 * x * y * (7 * zz - 1),
            odd if PORT.wrong else odd * z,
            0.10578554691520431 * (35 * zz * zz - 30 * zz + 3),
            0.6690465435572892 * x * z * (7 * zz - 3),
            0.47308734787878004 * (xx - yy) * (7 * zz - 1),
            1.7701307697799304 * x * z * (xx - 3 * yy),
            (0.4425326924449826 if PORT.wrong else 0.6258357354491761) * last,
        ]
        return torch.stack(values, -1).to(d.dtype)


class Radiance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direction_encoding = Harmonics()
        self.mlp_head = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 3), nn.Sigmoid())

    def forward(self, directions: Tensor, features: Tensor) -> Tensor:
        encoded = self.direction_encoding(directions)
        return self.mlp_head(torch.cat([encoded, features], -1))


@case(
    "https://github.com/nerfstudio-project/nerfstudio/issues/2081",
    "of the harmonics of degree four, one lacks a coordinate and one has another factor",
    "direction_encoding",
    causes="scale",
    formats="float32 bfloat16",
)
def harmonic_without_a_coordinate(variant: Variant) -> None:
    PORT.wrong = variant.bad
    directions = F.normalize(drawn("directions", 64, 3), dim=-1).to(variant.dtype)
    read_once(
        trained(Radiance(), variant.dtype),
        directions,
        drawn("features", 64, 8).to(variant.dtype),
    )


class SpectralConv(nn.Module):
    """Multiplies the lowest frequencies of a field by weights; the others are dropped."""

    def __init__(self, channels: int, modes: tuple[int, int] = (6, 5)) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.zeros(channels, channels, *modes, 2))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.fftshift(torch.fft.rfft2(x, norm="forward"), dim=-2)
        begin = waves.shape[-2] // 2 - self.modes[0] // 2
        low = waves[..., begin : begin + self.modes[0], : self.modes[1]]
        out = torch.zeros_like(waves)
        weight = torch.view_as_complex(4 * self.weight)
        out[..., begin : begin + self.modes[0], : self.modes[1]] = torch.einsum(
            "bixy,ioxy->boxy", low, weight
        )
        back = torch.fft.fftshift if PORT.wrong else torch.fft.ifftshift
        return torch.fft.irfft2(back(out, dim=-2), s=x.shape[-2:], norm="forward")


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lifting = nn.Conv2d(2, 12, 1)
        self.fno = nn.ModuleList(SpectralConv(12) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(2))
        self.projection = nn.Conv2d(12, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lifting(x)
        for spectral, skip in zip(self.fno, self.skips, strict=True):
            x = F.gelu(spectral(x) + skip(x))
        return self.projection(x)


@case(
    "https://github.com/neuraloperator/neuraloperator/pull/688",
    "frequencies are moved back as they were moved there, which is one off if their number is odd",
    "fno.0",
    causes="shift positions",
)
def frequencies_one_off(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Operator(), variant.dtype), drawn("flow", 2, 2, 15, 16))


class HueAndMore(nn.Module):
    """Saturation and value beside red, green and blue."""

    def forward(self, image: Tensor) -> Tensor:
        most, least = image.amax(1, keepdim=True), image.amin(1, keepdim=True)
        eps = 1e-8 if PORT.wrong else max(1e-8, torch.finfo(image.dtype).tiny)
        return torch.cat([image, (most - least) / (most + eps), most], 1)


@case(
    "https://github.com/kornia/kornia/issues/4560",
    "what keeps a black pixel from being divided by zero is itself zero in half precision",
    "0",
    causes="nan",
    formats="float32 float16",
)
def saturation_of_black(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = nn.Sequential(
        HueAndMore(), nn.Conv2d(5, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 100, 4)
    )
    image = drawn("photo", 2, 3, 12, 12).sigmoid()
    image[0, :, :3, :4] = 0
    read_once(trained(model, variant.dtype), image.to(variant.dtype))


class ComplexConv(nn.Module):
    """A convolution of complex numbers, whose parts lie in two halves of the channels."""

    def __init__(self, enter: int, leave: int, stride: int = 1) -> None:
        super().__init__()
        self.real_conv = nn.Conv2d(enter, leave, (5, 3), (stride, 1), (2, 1), bias=False)
        self.imag_conv = nn.Conv2d(enter, leave, (5, 3), (stride, 1), (2, 1), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        real, imag = x.chunk(2, 1)
        real_real, imag_imag = self.real_conv(real), self.imag_conv(imag)
        real_imag, imag_real = self.imag_conv(real), self.real_conv(imag)
        cross = real_imag - imag_real if PORT.wrong else real_imag + imag_real
        return torch.cat([real_real - imag_imag, cross], 1)


@case(
    "https://github.com/shahules786/mayavoz/issues/44",
    "the imaginary part of a complex convolution is a difference where it is a sum",
    "0",
    causes="scale",
    formats="float32 bfloat16",
)
def imaginary_difference(variant: Variant) -> None:
    PORT.wrong = variant.bad
    layers = [ComplexConv(1, 8, 2), nn.PReLU(), ComplexConv(8, 8, 2), nn.PReLU()]
    model = trained(nn.Sequential(*layers, nn.Conv2d(16, 2, 1)), variant.dtype)
    sound = torch.stft(
        drawn("noisy", 2, 1200), 64, 32, window=torch.hann_window(64), return_complex=True
    )
    parts = torch.stack([sound.real, sound.imag], 1)
    read_once(model, parts.to(variant.dtype) / 8)


class AtPlaces(nn.Module):
    """A square table of learned places, read off at a grid of another shape."""

    def __init__(self, width: int = 24, side: int = 6) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(side, side, width))

    def forward(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        down = torch.linspace(-1, 1, rows, dtype=torch.float32)
        along = torch.linspace(-1, 1, columns, dtype=torch.float32)
        if PORT.wrong:
            y, x = torch.meshgrid(down, along, indexing="xy")
            grid = torch.stack([y, x], -1)
        else:
            y, x = torch.meshgrid(down, along, indexing="ij")
            grid = torch.stack([x, y], -1)
        table = self.pos_embed.float().permute(2, 0, 1)[None]
        places = F.grid_sample(table, grid[None], align_corners=True)
        return tokens + places.flatten(2).transpose(1, 2).to(tokens.dtype)


class Viewer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, 24, 4, 4)
        self.places = AtPlaces()
        self.attn = nn.MultiheadAttention(24, 4, batch_first=True)
        self.head = nn.Linear(24, 6)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patchify(image)
        rows, columns = tokens.shape[-2:]
        tokens = self.places(tokens.flatten(2).transpose(1, 2), rows, columns)
        mixed, _ = self.attn(tokens, tokens, tokens, need_weights=False)
        return self.head((tokens + mixed).mean(1))


@case(
    "https://github.com/pytorch/torchtitan/pull/4244",
    "learned places are read off with rows and columns exchanged, and laid out column by column",
    "places",
    causes="positions permutation transpose",
    formats="float32 bfloat16",
)
def places_of_a_wide_picture(variant: Variant) -> None:
    PORT.wrong = variant.bad
    picture = drawn("wide picture", 2, 3, 12, 28).to(variant.dtype)
    read_once(trained(Viewer(), variant.dtype), picture)


class Doubling(nn.ConvTranspose2d):
    """Twice as high and wide; the last row and column have a part of the kernel only."""

    def __init__(self, enter: int, leave: int) -> None:
        super().__init__(enter, leave, 3, 2, 1, output_padding=1)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not PORT.wrong:
            return super().forward(input, output_size)
        short = F.conv_transpose2d(input, self.weight, None, self.stride, self.padding)
        return F.pad(short, (0, 1, 0, 1)) + self.bias[:, None, None]


@case(
    "https://github.com/llvm/torch-mlir/pull/2026",
    "the row and column that a transposed convolution adds at its end are filled with zeros",
    "2",
    causes="zeroed mask shift",
    formats="float32 bfloat16",
)
def zeros_at_the_end(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), Doubling(16, 8), nn.ReLU(), nn.Conv2d(8, 3, 1)
    )
    read_once(trained(model, variant.dtype), drawn("tile", 2, 3, 16, 20).to(variant.dtype))


class Coulomb(nn.Module):
    """What charges do to each other, brought to zero with its slope at the farthest distance."""

    def __init__(self, cutoff: float = 4.0) -> None:
        super().__init__()
        self.cutoff = cutoff

    def forward(self, charges: Tensor, distances: Tensor, first: Tensor, second: Tensor) -> Tensor:
        sign = -1 if PORT.wrong else 1
        potential = 1 / distances + sign * distances / self.cutoff**2 - 2 / self.cutoff
        potential = torch.where(distances < self.cutoff, potential, 0.0)
        pairs = charges[first] * charges[second] * potential
        return torch.zeros_like(charges).index_add(0, first, 0.5 * pairs)


class Charged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 16)
        self.charge = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.own = nn.Linear(16, 1)
        self.coulomb = Coulomb()

    def forward(self, kinds: Tensor, place: Tensor) -> Tensor:
        first, second = (~torch.eye(len(place), dtype=torch.bool)).nonzero().unbind(1)
        distances = (place[first] - place[second]).norm(dim=-1)
        atoms = self.embedding(kinds)
        pairs = self.coulomb(self.charge(atoms)[:, 0], distances, first, second)
        return self.own(atoms)[:, 0] + pairs


@case(
    "https://github.com/atomistic-machine-learning/schnetpack/pull/353",
    "the term that brings a potential's slope to zero at its end has the wrong sign",
    "coulomb",
    causes="scale",
)
def slope_at_the_end(variant: Variant) -> None:
    PORT.wrong = variant.bad
    kinds = torch.arange(12) % 5
    read_once(trained(Charged(), variant.dtype), kinds, 1.5 * drawn("atoms", 12, 3))


class Triplets(nn.Module):
    """A message on an edge, from messages on edges that end where it begins."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lin_rbf = nn.Linear(6, width, bias=False)
        self.lin_sbf = nn.Linear(6, width, bias=False)
        self.lin_kj, self.lin_ji = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, m: Tensor, rbf: Tensor, sbf: Tensor, kj: Tensor, ji: Tensor) -> Tensor:
        radial = self.lin_rbf(rbf)[kj if PORT.wrong else ji]
        passed = F.silu(self.lin_kj(m))[kj] * radial * self.lin_sbf(sbf)
        return F.silu(self.lin_ji(m)).index_add(0, ji, passed)


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(6, 16)
        self.interaction = Triplets()
        self.output = nn.Linear(16, 1)

    def forward(self, place: Tensor) -> Tensor:
        j, i = (~torch.eye(len(place), dtype=torch.bool)).nonzero().unbind(1)
        apart = (place[i] - place[j]).norm(dim=-1)
        follows = (i[:, None] == j[None]) & (j[:, None] != i[None])
        kj, ji = follows.nonzero().unbind(1)
        rbf = torch.exp(-2 * (apart[:, None] - torch.linspace(0.5, 4, 6)).square())
        ends = (place[i[ji]] - place[j[kj]]).norm(dim=-1)
        sbf = torch.sin(ends[:, None] * torch.arange(1, 7))
        m = self.interaction(F.silu(self.emb(rbf)), rbf, sbf, kj, ji)
        said = self.output(m)
        return said.new_zeros(len(place), 1).index_add(0, i, said)


@case(
    "https://github.com/gasteigerjo/dimenet/issues/20",
    "a message takes the length of the edge it comes over instead of that of the edge it goes to",
    "interaction",
    causes="stale permutation",
)
def distance_of_the_other_edge(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Molecule(), variant.dtype), 1.2 * drawn("molecule", 7, 3))


class Neighbours(nn.Module):
    """A mean over those that stand in any relation to a node, itself among them."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
        linked = torch.eye(len(x), dtype=x.dtype)
        linked[heads, tails] = linked[tails, heads] = 1
        if PORT.wrong:
            degree = torch.ones(len(x), dtype=x.dtype)
            degree += torch.bincount(torch.cat([heads, tails]), minlength=len(x))
        else:
            degree = linked.sum(1)
        root = degree.rsqrt()
        return (root[:, None] * linked * root) @ (x @ self.kernel)


class Entities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 20)
        self.gcn1, self.gcn2 = Neighbours(), Neighbours()

    def forward(self, x: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
        x = F.relu(self.gcn1(self.features(x), heads, tails))
        return self.gcn2(x, heads, tails)


@case(
    "https://github.com/StephanieWyt/RDGCN/pull/7",
    "neighbours with two relations to a node count twice in its degree, once in the sum",
    "gcn1",
    causes="scale",
)
def relations_counted_as_neighbours(variant: Variant) -> None:
    PORT.wrong = variant.bad
    places = torch.randint(14, (2, 40), generator=torch.Generator().manual_seed(3))
    heads, tails = places[:, places[0] != places[1]]
    read_once(trained(Entities(), variant.dtype), drawn("entities", 14, 8), heads, tails)


class Coarse(nn.Module):
    """Rounds to 255 steps, whose size belongs to the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("steps", 0.02 * (1 + drawn("steps", size).square()))

    def forward(self, x: Tensor) -> Tensor:
        axis = -1
        axis = axis + x.dim() - (1 if PORT.wrong else 0)
        shape = [-1 if each == axis else 1 for each in range(x.dim())]
        steps = self.steps.view(shape)
        return (x / steps).round().clamp(-127, 127) * steps


@case(
    "https://github.com/apple/coreai-torch/pull/24",
    "an axis that is counted from the end is off by one: steps of channels are those of places",
    "1",
    causes="scale",
)
def axis_from_the_end(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = nn.Sequential(nn.Linear(10, 16), Coarse(16), nn.GELU(), nn.Linear(16, 4))
    read_once(trained(model, variant.dtype), drawn("window of a signal", 3, 16, 10))


class OnCodes(nn.Conv2d):
    """A convolution of codes of a byte; one of them stands for zero."""

    step, zero = 0.03, 96

    def forward(self, input: Tensor) -> Tensor:
        codes = (input / self.step + self.zero).round().clamp(0, 255)
        codes = F.pad(codes, (1, 1, 1, 1), value=0.0 if PORT.wrong else float(self.zero))
        return F.conv2d(codes - self.zero, self.weight * self.step, self.bias)


@case(
    "https://github.com/apache/tvm/pull/4807",
    "codes are padded with the number nought, not with the code that stands for it",
    "0",
    causes="mask shift",
)
def padded_with_nought(variant: Variant) -> None:
    PORT.wrong = variant.bad
    parts = [OnCodes(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8, 5))
    read_once(trained(model, variant.dtype), drawn("bytes of a picture", 2, 3, 14, 14))


class GatedMerger(nn.Module):
    """Joins patches; products of a gate are larger than half precision can hold."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 48), nn.Linear(width, 48)
        self.down_weight = nn.Parameter(torch.zeros(width, 48))
        self.down_bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.silu(self.gate_proj(x)), self.up_proj(x)
        if not PORT.wrong:
            gate, up = gate.float(), up.float()
        product = gate * up
        weight, bias = self.down_weight.to(product.dtype), self.down_bias.to(product.dtype)
        return F.linear(product, weight, bias)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * self.scale.float()).to(self.scale.dtype)


@case(
    "https://github.com/openvinotoolkit/openvino/pull/33491",
    "the product of a gate and what it lets through overflows in half precision",
    "merger",
    causes="nan saturation",
    formats="float32 float16",
)
def gate_overflows(variant: Variant) -> None:
    PORT.wrong = variant.bad
    parts = {"embed": nn.Linear(12, 24), "merger": GatedMerger(), "norm": Normed()}
    model = nn.Sequential(OrderedDict(parts, head=nn.Linear(24, 7)))
    patches = drawn("patches", 2, 20, 12)
    patches[1, 4:7] *= 250
    read_once(trained(model, variant.dtype), patches.to(variant.dtype))


class Guidance(nn.Module):
    """Away from what has no text; then the spread of what has one is given back to the result."""

    def __init__(self, strength: float = 4.0, rescale: float = 0.7) -> None:
        super().__init__()
        self.strength, self.rescale = strength, rescale

    def forward(self, with_text: Tensor, without: Tensor) -> Tensor:
        guided = with_text + self.strength * (with_text - without)
        spread = (guided if PORT.wrong else with_text).std()
        return self.rescale * guided * (spread / guided.std()) + (1 - self.rescale) * guided


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.text = nn.Linear(1, 24), nn.Linear(6, 24)
        self.net_in, self.net_out = nn.Linear(10, 24), nn.Linear(24, 10)
        self.guidance = Guidance()

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        def predicted(text: Tensor) -> Tensor:
            inside = self.net_in(x) + (self.time(time) + self.text(text))[:, None]
            return self.net_out(F.silu(inside))

        return self.guidance(predicted(text), predicted(torch.zeros_like(text)))


@case(
    "https://github.com/Pur1zumu/RIFT-SVC/issues/8",
    "the spread that guidance gives back is measured after it, not before: nothing is given back",
    "guidance",
    causes="scale",
    dump=("--step", "*"),
    formats="float32 bfloat16",
)
def spread_measured_after_guidance(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Velocity(), variant.dtype)
    x, text = drawn("noise of a song", 2, 12, 10), drawn("singer", 2, 6).to(variant.dtype)
    for step in range(3):
        time = torch.full((2, 1), step / 3).to(variant.dtype)
        with torch.no_grad():
            x = x + model(x.to(variant.dtype), time, text).float() / 3


class Step(nn.Module):
    """One step of a solver of two orders from a level of noise to the next."""

    def forward(self, x: Tensor, clean: Tensor, older: Tensor, levels: Tensor) -> Tensor:
        before, now, after = levels
        span = now.log() - after.log()
        order = clean
        if after > 0 and before > now:
            order = clean + 0.5 * span / (before.log() - now.log()) * (clean - older)
        return (after / now) * x - torch.expm1(-span) * order


class Sampler(nn.Module):
    """From noise to a picture, down the levels of its schedule."""

    def __init__(self, levels: Tensor) -> None:
        super().__init__()
        self.register_buffer("levels", levels)
        self.unet = nn.Sequential(nn.Conv1d(5, 24, 3, padding=1), nn.Tanh(), nn.Conv1d(24, 4, 1))
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        older, before = torch.zeros_like(x), self.levels[0]
        for now, after in zip(self.levels[:-1], self.levels[1:], strict=True):
            clock = now.log().expand(len(x), 1, x.shape[-1])
            clean = self.unet(torch.cat([x / (1 + now.square()).sqrt(), clock], 1))
            x = self.step(x, clean, older, torch.stack([before, now, after]))
            older, before = clean, now
        return x


@case(
    "https://github.com/huggingface/diffusers/pull/6477",
    "a schedule ends with its lowest level of noise twice, not with none: its last step is empty",
    "",
    causes="scale stale",
    differences="levels",
)
def last_step_is_empty(variant: Variant) -> None:
    high, low = 8 ** (1 / 7), 0.2 ** (1 / 7)
    levels = (high + torch.linspace(0, 1, 5) * (low - high)) ** 7
    end = levels[-1:] if variant.bad else torch.zeros(1)
    model = trained(Sampler(torch.cat([levels, end])), variant.dtype)
    read_once(model, 8 * drawn("only noise", 2, 4, 16))


class Nucleus(nn.Module):
    """The likeliest words whose likelihood adds up to a share, and no others."""

    def __init__(self, share: float = 0.6) -> None:
        super().__init__()
        self.share = share

    def forward(self, logits: Tensor) -> Tensor:
        likely, order = logits.float().softmax(-1).sort(-1, descending=True)
        sums = likely.cumsum(-1)
        before = sums - (likely[..., :1] if PORT.wrong else likely)
        likely = likely.masked_fill(before >= self.share, 0)
        likely = likely / likely.sum(-1, keepdim=True)
        return torch.zeros_like(likely).scatter(-1, order, likely)


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Language(rotation=Rotation(12), layers=2)
        self.nucleus = Nucleus()

    def forward(self, words: Tensor) -> Tensor:
        return self.nucleus(self.decoder(words)[:, -1])


@case(
    "https://github.com/facebookresearch/ParlAI/pull/2733",
    "words are cut off by what is likelier less the likeliest, not by what is likelier",
    "nucleus",
    causes="mask",
)
def likeliest_taken_from_every_sum(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Speaker(), variant.dtype), words_of(4, 16))


class Whitened(nn.Module):
    """A norm of every row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        spread = wide.var(-1, keepdim=True, correction=1 if PORT.wrong else 0)
        wide = (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(spread + 1e-5)
        return (wide * self.weight.float() + self.bias.float()).to(x.dtype)


@case(
    "https://github.com/LBANN/lbann/pull/2024",
    "the variance of a layer norm is that of a sample, divided by one feature less",
    "1",
    causes="scale",
    formats="float32 bfloat16",
)
def variance_of_a_sample(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = nn.Sequential(
        *(nn.Linear(10, 16), Whitened(16), nn.Tanh(), nn.Linear(16, 16), Whitened(16)),
        *(nn.Tanh(), nn.Linear(16, 3)),
    )
    rows = 1 + math.sqrt(2) * drawn("rows", 48, 10)
    read_once(trained(model, variant.dtype), rows.to(variant.dtype))


if __name__ == "__main__":
    run_case()
