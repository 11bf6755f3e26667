"""Programs that generate pictures or learn codes for them."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.third_party.catalogue import Use, program
from benchmarks.third_party.faults import attribute, rolled, scaled, tensor_changed


@program(
    "diffusers",
    "sine and cosine of the time exchanged",
    attribute("time_proj", "flip_sin_to_cos", False),
    ("time_proj",),
    "autocast",
)
def diffusers_unet(use: Use) -> None:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    model = use.ready(model.eval())
    scheduler = DDPMScheduler(num_train_timesteps=50)
    scheduler.set_timesteps(2)
    sample = use.drawn(1, 3, 16, 16)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for time in scheduler.timesteps:
            noise = model(sample, time).sample
            sample = scheduler.step(noise.float(), time, sample, generator=generator).prev_sample


@program(
    "diffusers",
    "the output of an attention is divided by two",
    attribute("decoder.mid_block.attentions.0", "rescale_output_factor", 2.0),
    ("decoder.mid_block.attentions.0",),
)
def diffusers_autoencoder(use: Use) -> None:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        codes = model.encode(use.drawn(1, 3, 32, 32)).latent_dist.mode()
        model.decode(codes)


@program(
    "diffusers",
    "shift and scale of an adaptive norm exchanged",
    rolled("transformer_blocks.1.norm1.linear", "weight", 0, 32),
    ("transformer_blocks.1.norm1.linear",),
    "bfloat16",
)
def diffusers_dit(use: Use) -> None:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=100,
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 4, 8, 8), torch.tensor([7, 30]), torch.tensor([1, 5]))


@program(
    "denoising-diffusion-pytorch",
    "the schedule of noise is another",
    scaled("", "sqrt_alphas_cumprod", 0.8),
    ("",),
)
def denoising_diffusion(use: Use) -> None:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    network = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    diffusion = use.ready(GaussianDiffusion(network, image_size=16, timesteps=20))
    pictures = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(5)
    diffusion(pictures).backward()


@program(
    "vector-quantize-pytorch",
    "codes of the codebook in another order",
    tensor_changed("1._codebook", "embed", lambda codes: codes.roll(1, -1)),
    ("1._codebook",),
)
def vector_quantize(use: Use) -> None:
    from vector_quantize_pytorch import VectorQuantize

    class First(nn.Module):
        def forward(self, results: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return results[0]

    model = nn.Sequential(
        nn.Linear(12, 16),
        VectorQuantize(dim=16, codebook_size=32),
        First(),
        nn.Linear(16, 12),
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 20, 12))
