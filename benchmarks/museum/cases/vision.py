"""Pictures: borders of convolutions and pools, crops, colours, folded norms, gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import PORT, Variant, case, drawn, read_once, run_case, trained


def picture_of(variant: Variant, *shape: int) -> Tensor:
    return drawn("photograph", *shape).to(variant.dtype)


class Widening(nn.ConvTranspose2d):
    """Twice as high and wide; what the padding names is cut off from the result."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not PORT.wrong:
            return super().forward(input, output_size)
        height, width = 2 * input.shape[-2], 2 * input.shape[-1]
        y = F.conv_transpose2d(F.pad(input, (1, 1, 1, 1)), self.weight, self.bias, self.stride)
        return y[..., :height, :width]


class Painter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 24, 3, padding=1)
        self.up = Widening(24, 16, 4, 2, 1)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.relu(self.up(F.relu(self.enter(x)))))


@case(
    "https://github.com/Samsung/TICO/issues/420",
    "the padding of a transposed convolution is put around its input, not cut off its output",
    "up",
    causes="shift",
    formats="float32 bfloat16",
)
def padding_around_the_input(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Painter(), variant.dtype), picture_of(variant, 2, 3, 12, 16))


class Largest(nn.Module):
    """The largest of nine neighbours, every second one; a border is never the largest."""

    def forward(self, x: Tensor) -> Tensor:
        border = 0.0 if PORT.wrong else -torch.inf
        return F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=border), 3, 2)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(24)
        self.pool = Largest()
        self.leave = nn.Conv2d(24, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.pool(self.norm(self.enter(x)) - 1.5))


@case(
    "https://github.com/zylo117/Yet-Another-EfficientDet-Pytorch/pull/352",
    "a largest neighbour is looked for in a border of zeros, and everything real is negative",
    "pool",
    causes="mask",
    formats="float32 bfloat16",
)
def largest_in_a_border_of_zeros(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Pyramid(), variant.dtype), picture_of(variant, 2, 3, 13, 17))


class Crops(nn.Module):
    """Four by four values from within every box; the centre of the first pixel lies at a half."""

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        inside = (torch.arange(4) + 0.5) / 4
        left, top, right, bottom = boxes.float().unbind(-1)
        across = left[:, None] + inside * (right - left)[:, None]
        down = top[:, None] + inside * (bottom - top)[:, None]
        if PORT.wrong:  # half a pixel further on
            across, down = across + 0.5, down + 0.5
        grid = torch.stack(
            [
                (2 * across / width - 1)[:, None, :].expand(-1, 4, 4),
                (2 * down / height - 1)[:, :, None].expand(-1, 4, 4),
            ],
            -1,
        )
        rows = x[torch.zeros(len(boxes), dtype=torch.long)].float()
        return F.grid_sample(rows, grid, align_corners=False, padding_mode="border").to(x.dtype)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.crops = Crops()
        self.head = nn.Linear(256, 7)

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        return self.head(self.crops(F.relu(self.enter(x)), boxes).flatten(1))


@case(
    "https://github.com/microsoft/onnxruntime/issues/6921",
    "boxes are cropped half a pixel too far to the right and down",
    "crops",
    causes="shift positions",
    formats="float32 bfloat16",
)
def crops_half_a_pixel_off(variant: Variant) -> None:
    PORT.wrong = variant.bad
    boxes = torch.tensor([[2.0, 3.0, 10.0, 9.0], [1.0, 1.0, 6.5, 12.0], [5.0, 4.0, 15.0, 11.0]])
    read_once(trained(Detector(), variant.dtype), picture_of(variant, 1, 3, 16, 20), boxes)


class Colours(nn.Module):
    """What is mean of every colour is taken away."""

    def __init__(self, means: list[float]) -> None:
        super().__init__()
        self.register_buffer("means", torch.tensor(means), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.means.to(x.dtype)[:, None, None]


class Classifier(nn.Module):
    def __init__(self, before: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.enter = nn.Conv2d(3, 24, 3, padding=1)
        self.gate = gate
        self.next = nn.Conv2d(24, 24, 3, padding=1)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(F.relu(self.enter(self.before(x))))
        return self.head(F.relu(self.next(x)).mean((2, 3)))


@case(
    "https://github.com/triton-inference-server/server/pull/1914",
    "means of red, green and blue are taken from a picture that lies blue, green, red",
    "before",
    causes="offset permutation",
    differences="means",
    formats="float32 bfloat16",
)
def means_in_another_order(variant: Variant) -> None:
    means = [1.2, 0.4, -0.6]
    model = Classifier(Colours(means[::-1] if variant.bad else means), nn.Identity())
    read_once(trained(model, variant.dtype), picture_of(variant, 2, 3, 12, 12))


class Folded(nn.Module):
    """Convolutions that have taken up the norms behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


def folded(model: nn.Module, name: str) -> None:
    """Let a convolution take up a norm: its weights and its bias times the norm's factor."""
    layer = getattr(model, name)
    factor = 1 + 0.4 * drawn(f"{name} factor", 24).tanh()
    with torch.no_grad():
        layer.weight *= factor[:, None, None, None]
        if not PORT.wrong or name == "first":
            layer.bias *= factor
        layer.bias += 0.2 * drawn(f"{name} offset", 24)


@case(
    "https://github.com/Tencent/ncnn/issues/1339",
    "a norm is folded into a convolution whose own bias is not multiplied by the norm's factor",
    "second",
    causes="offset",
    differences="bias",
    formats="float32 bfloat16",
)
def bias_not_folded(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Folded())
    with torch.no_grad():
        model.second.bias += 1
    for name in ("first", "second"):
        folded(model, name)
    read_once(model.to(variant.dtype), picture_of(variant, 2, 3, 12, 12))


class HardSigmoid(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.slope + 0.5).clamp(0, 1)


class Squeeze(nn.Module):
    """Channels are weighted by what all of them are on average."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(24, 8, 1), nn.Conv2d(8, 24, 1)
        self.act = HardSigmoid(slope)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.act(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


@case(
    "https://github.com/PaddlePaddle/Paddle2ONNX/issues/930",
    "the slope of a gate is lost on export, and the format's default is another one",
    "gate.act",
    causes="activation scale setting",
    differences="slope",
)
def slope_of_the_format(variant: Variant) -> None:
    model = Classifier(nn.Identity(), Squeeze(0.2 if variant.bad else 1 / 6))
    read_once(trained(model, variant.dtype), picture_of(variant, 2, 3, 12, 12))


if __name__ == "__main__":
    run_case()
