"""Networks in the shapes that engines meet, in plain torch: residual, depthwise, transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two convolutions with batch norms, and a way around them, as in resnet18."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += around
        return self.relu(out)


class Resnet18(nn.Module):
    """The graph of resnet18, with a quarter of its channels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        into = width
        for index in range(4):
            out = width << index
            blocks = [BasicBlock(into, out, 1 if index == 0 else 2), BasicBlock(out, out, 1)]
            setattr(self, f"layer{index + 1}", nn.Sequential(*blocks))
            into = out
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(into, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    """Expand, filter every channel by itself, project; as in mobilenet_v2."""

    def __init__(self, into: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = into * expand
        self.around = stride == 1 and into == out
        self.conv = nn.Sequential(
            nn.Conv2d(into, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.around else self.conv(x)


class Mobilenet(nn.Module):
    """The graph of mobilenet_v2, with fewer blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)
            ),
            InvertedResidual(16, 16, 1, 1),
            InvertedResidual(16, 24, 2, 4),
            InvertedResidual(24, 24, 1, 4),
            InvertedResidual(24, 32, 2, 4),
            InvertedResidual(32, 32, 1, 4),
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.features(x).mean([2, 3])))


class Rectified(nn.Module):
    """A convolution with its norm and rectifier in its own code, as torchvision writes them."""

    def __init__(self, into: int, out: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four ways from one value to a concatenation."""

    def __init__(self, into: int, pooled: int) -> None:
        super().__init__()
        self.branch1 = Rectified(into, 8, 1)
        self.branch5 = nn.Sequential(Rectified(into, 6, 1), Rectified(6, 8, 5, padding=2))
        self.branch3 = nn.Sequential(
            *(Rectified(into, 8, 1), Rectified(8, 12, 3, padding=1)),
            Rectified(12, 12, 3, padding=1),
        )
        self.branch_pool = Rectified(into, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.branch_pool(functional.avg_pool2d(x, 3, 1, 1))
        return torch.cat([self.branch1(x), self.branch5(x), self.branch3(x), pooled], 1)


class InceptionNet(nn.Module):
    """The blocks of inception_v3, a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Rectified(3, 8, 3, 2), Rectified(8, 16, 3, padding=1))
        self.maxpool = nn.MaxPool2d(3, 2)
        self.mixed = nn.Sequential(Inception(16, 4), Inception(32, 8))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(self.maxpool(self.stem(x)))
        return self.fc(torch.flatten(self.dropout(self.avgpool(x)), 1))


class Excitation(nn.Module):
    """Channels are scaled by what a small network makes of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, channels // 4, 1)
        self.relu = nn.ReLU()
        self.fc2 = nn.Conv2d(channels // 4, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))


class GatedResidual(nn.Module):
    """The block of mobilenet_v3: one activation is called twice."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        hidden = into * 3
        self.around = stride == 1 and into == out
        self.expand = nn.Conv2d(into, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.act = nn.Hardswish()
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.excitation = Excitation(hidden)
        self.project = nn.Conv2d(hidden, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        y = self.bn3(self.project(self.excitation(y)))
        return x + y if self.around else y


class GatedNet(nn.Module):
    """The graph of mobilenet_v3, with fewer blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()
        )
        self.blocks = nn.Sequential(
            GatedResidual(8, 8, 1), GatedResidual(8, 16, 2), GatedResidual(16, 16, 1)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Tagger(nn.Module):
    """A recurrent network of two layers in both directions; nobody reads its last states."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.rnn = layer(32, 24, 2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(48)
        self.drop = nn.Dropout(0.1)
        self.mid = nn.Linear(48, 24)
        self.act = nn.Tanh()
        self.head = nn.Linear(24, 7)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.rnn(self.embed(ids))
        return self.head(self.act(self.mid(self.drop(self.norm(y)))))


class Attention(nn.Module):
    """Self-attention with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (
            layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = torch.softmax(scores, -1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class EncoderLayer(nn.Module):
    """An encoder's layer with norms in front."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A transformer's encoder with a classifier."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(EncoderLayer(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def _alive(model: nn.Module) -> nn.Module:
    """Statistics and weights of norms as training leaves them: none is 0 or 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2.0)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            module.weight.data.uniform_(0.7, 1.3)
            module.bias.data.normal_(0, 0.1)
    return model.eval()


def resnet18() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return _alive(Resnet18()), torch.randn(2, 3, 64, 64)


def mobilenet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return _alive(Mobilenet()), torch.randn(2, 3, 32, 32)


def encoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(2)
    return _alive(Encoder()), torch.randint(0, 100, (2, 12))


def inception() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return _alive(InceptionNet()), torch.randn(2, 3, 48, 48)


def gated() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    return _alive(GatedNet()), torch.randn(2, 3, 32, 32)


def tagger() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    return _alive(Tagger()), torch.randint(0, 50, (2, 11))


NETWORKS = {
    "resnet18-shaped": resnet18,
    "mobilenet-shaped": mobilenet,
    "inception-shaped": inception,
    "encoder": encoder,
    "mobilenet_v3-shaped": gated,
    "LSTM tagger": tagger,
}
