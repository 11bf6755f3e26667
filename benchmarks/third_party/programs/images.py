"""Programs on images: classification, segmentation, detection, descriptors."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.third_party.catalogue import Use, program
from benchmarks.third_party.faults import (
    attribute,
    replaced,
    rolled,
    scaled,
    stale,
    tensor_changed,
    training_left_on,
)


@program(
    "timm",
    "rows of the fused query, key and value weight in another order",
    rolled("blocks.2.attn.qkv", "weight", 0, 64),
    ("blocks.2.attn.qkv",),
    "bfloat16",
)
def timm_vit(use: Use) -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10)
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 64, 64))


@program(
    "timm",
    "running variance of a batch norm too large",
    scaled("layer2.0.bn1", "running_var", 4.0),
    ("layer2.0.bn1",),
)
def timm_resnet(use: Use) -> None:
    import timm

    model = use.ready(timm.create_model("resnet18", num_classes=10).eval())
    with torch.no_grad():
        for _ in range(2):
            model(use.drawn(2, 3, 64, 64))


@program(
    "timm",
    "layer norm with a large epsilon",
    attribute("stages.1.blocks.0.norm", "eps", 0.1),
    ("stages.1.blocks.0.norm",),
    "autocast",
)
def timm_convnext(use: Use) -> None:
    import timm

    model = use.ready(timm.create_model("convnext_atto", num_classes=10).eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 64, 64))


@program(
    "timm",
    "a hard sigmoid as gate of a squeeze-and-excitation block",
    replaced("blocks.2.0.se.gate", nn.Hardsigmoid),
    ("blocks.2.0.se.gate",),
)
def timm_efficientnet(use: Use) -> None:
    import timm

    model = use.ready(timm.create_model("efficientnet_b0", num_classes=10).eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 64, 64)).softmax(-1)


@program(
    "torchvision",
    "ReLU in place of Hardswish",
    replaced("features.4.block.1.2", nn.ReLU),
    ("features.4.block.1.2",),
)
def torchvision_mobilenet(use: Use) -> None:
    from torchvision.models import mobilenet_v3_small

    model = use.ready(mobilenet_v3_small(weights=None).eval())
    with torch.inference_mode():
        model(use.drawn(2, 3, 64, 64))


@program(
    "torchvision",
    "table of relative positions moved by one",
    tensor_changed(
        "features.3.0.attn",
        "relative_position_bias_table",
        lambda table: table.roll(1, 0) * 20,
    ),
    ("features.3.0.attn",),
    "bfloat16",
)
def torchvision_swin(use: Use) -> None:
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=10,
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 64, 64))


@program(
    "torchvision",
    "a convolution pads by reflection",
    attribute("backbone.2.block.1.0", "padding_mode", "reflect"),
    ("backbone.2.block.1.0",),
)
def torchvision_lraspp(use: Use) -> None:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(1, 3, 64, 64))["out"].argmax(1)


@program(
    "segmentation-models-pytorch",
    "bilinear instead of nearest upsampling in a decoder block",
    attribute("decoder.blocks.1", "interpolation_mode", "bilinear"),
    ("decoder.blocks.1",),
)
def smp_unet(use: Use) -> None:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, decoder_channels=(64, 32, 16, 8, 8))
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(1, 3, 64, 64)).sigmoid()


@program(
    "ultralytics",
    "ReLU in place of SiLU in one convolution",
    replaced("model.4.cv1.act", nn.ReLU),
    ("model.4.cv1.act",),
    "bfloat16",
)
def ultralytics_yolo(use: Use) -> None:
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolov8n.yaml", verbose=False).eval()
    model(torch.zeros(1, 3, 64, 64))  # warm it up
    model = use.ready(model)
    with torch.no_grad():
        model(use.drawn(1, 3, 64, 64))


@program(
    "vit-pytorch",
    "scale of one attention",
    attribute("classifier.blocks.1.self_attn", "scale", 1.0),
    ("classifier.blocks.1.self_attn",),
    "autocast",
)
def vit_pytorch_cct(use: Use) -> None:
    from vit_pytorch.cct import CCT

    model = CCT(
        img_size=32,
        embedding_dim=32,
        n_conv_layers=1,
        kernel_size=3,
        stride=2,
        padding=1,
        num_layers=3,
        num_heads=2,
        mlp_ratio=2,
        num_classes=10,
        positional_embedding="learnable",
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 32, 32))


@program(
    "vit-pytorch",
    "dropout left on",
    training_left_on("transformer.layers.1.1.net.3"),
    ("transformer.layers.1.1.net.3",),
    "bfloat16",
)
def vit_pytorch_vit(use: Use) -> None:
    from vit_pytorch import ViT

    model = ViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=3,
        heads=2,
        mlp_dim=64,
        dropout=0.1,
        emb_dropout=0.1,
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 32, 32))


@program(
    "einops",
    "two axes of a picture exchanged where patches are put back",
    replaced("3", lambda: _rearranged("b (w h) c -> b c h w")),
    ("3",),
    "bfloat16",
)
def einops_mixer(use: Use) -> None:
    from einops.layers.torch import Rearrange, Reduce

    width, side = 24, 8
    model = nn.Sequential(
        nn.Conv2d(3, width, 4, 4),
        Rearrange("b c h w -> b (h w) c"),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)),
        _rearranged("b (h w) c -> b c h w"),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GELU(),
        Reduce("b c h w -> b c", "mean"),
        nn.Linear(width, 10),
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 3, 4 * side, 4 * side))


def _rearranged(pattern: str) -> nn.Module:
    from einops.layers.torch import Rearrange

    return Rearrange(pattern, h=8)


@program(
    "kornia",
    "a Gaussian blur of another width",
    attribute("0", "sigma", torch.tensor([[0.6, 0.6]])),
    ("0",),
)
def kornia_descriptors(use: Use) -> None:
    from kornia.feature import HardNet
    from kornia.filters import GaussianBlur2d

    model = nn.Sequential(GaussianBlur2d((5, 5), (1.5, 1.5)), HardNet(pretrained=False))
    model = use.ready(model.eval())
    with torch.no_grad():
        first, second = model(use.drawn(6, 1, 32, 32)), model(use.drawn(6, 1, 32, 32))
        torch.cdist(first, second).argmin(1)


@program(
    "spandrel",
    "a leaky ReLU without its slope",
    attribute("model.1.sub.1.RDB2.conv3.1", "negative_slope", 0.0),
    ("model.1.sub.1.RDB2.conv3.1",),
)
def spandrel_esrgan(use: Use) -> None:
    from spandrel.architectures.ESRGAN import ESRGAN

    model = use.ready(ESRGAN(num_filters=8, num_blocks=2).eval())
    with torch.no_grad():
        model(use.drawn(1, 3, 16, 16)).clamp(0, 1)


@program(
    "efficientnet_pytorch",
    "channels of a depthwise convolution in another order",
    rolled("_blocks.3._depthwise_conv", "weight", 0, 3),
    ("_blocks.3._depthwise_conv",),
    "autocast",
)
def efficientnet_pytorch(use: Use) -> None:
    from efficientnet_pytorch import EfficientNet

    model = use.ready(EfficientNet.from_name("efficientnet-b0", num_classes=10).eval())
    with torch.no_grad():
        model(use.drawn(1, 3, 64, 64))


@program(
    "monai",
    "a PReLU without its slope",
    tensor_changed("model.1.submodule.0.conv.unit0.adn.A", "weight", torch.zeros_like),
    ("model.1.submodule.0.conv.unit0.adn.A",),
    "bfloat16",
)
def monai_unet(use: Use) -> None:
    from monai.networks.nets import UNet

    model = use.ready(UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=1).eval())
    with torch.no_grad():
        model(use.drawn(2, 1, 32, 32)).argmax(1)


@program(
    "monai",
    "a group norm with other groups",
    attribute("down_layers.1.1.norm2", "num_groups", 2),
    ("down_layers.1.1.norm2",),
)
def monai_sliding_window(use: Use) -> None:
    from monai.inferers import sliding_window_inference
    from monai.networks.nets import SegResNet

    model = SegResNet(spatial_dims=2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))
    model = use.ready(model.eval())
    with torch.no_grad():
        sliding_window_inference(use.drawn(1, 1, 48, 48), (32, 32), 1, model)


@program(
    "timm",
    "a layer gives the features of the last picture again",
    stale("blocks.1.mlp.fc1"),
    ("blocks.1.mlp.fc1",),
    "bfloat16",
)
def timm_features(use: Use) -> None:
    import timm

    model = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=3, num_classes=0)
    model = use.ready(model.eval())
    with torch.no_grad():
        for _ in range(3):
            model(use.drawn(1, 3, 64, 64))
