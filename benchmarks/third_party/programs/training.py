"""Programs that train: loops that a package runs, and loops of one's own."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.third_party.catalogue import Use, program
from benchmarks.third_party.faults import attribute, replaced, scaled, wrapped
from benchmarks.third_party.programs.language import tiny_llama


@program(
    "lightning",
    "a layer too loud from the begin",
    scaled("decoder.2", "weight", 1.5),
    ("decoder.2",),
    dump=("--level", "modules", "gradients"),
)
def lightning_autoencoder(use: Use) -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Autoencoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4))
            self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 24))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    data = DataLoader(TensorDataset(use.drawn(24, 24)), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(use.ready(Autoencoder()), data)


@program(
    "accelerate",
    "a batch norm that computes with its running figures while it should learn them",
    wrapped("1", lambda forward, x: _frozen_norm(x)),
    ("1",),
    dump=("--level", "modules", "gradients"),
)
def accelerate_loop(use: Use) -> None:
    from accelerate import Accelerator

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    accelerator = Accelerator(cpu=True)
    model = use.ready(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(use.drawn(4, 3, 8, 8)), use.numbers(4, 4))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _frozen_norm(x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8))


@program(
    "transformers Trainer",
    "ReLU in place of SiLU in one layer",
    replaced("model.layers.1.mlp.act_fn", nn.ReLU),
    ("model.layers.1.mlp.act_fn",),
    dump=("--level", "modules", "gradients"),
)
def transformers_trainer(use: Use) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": (row := use.numbers(64, 12)), "labels": row} for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Trainer(use.ready(tiny_llama()), settings, train_dataset=rows).train()


@program(
    "pytorch-metric-learning",
    "another margin in the loss",
    attribute("loss", "margin", 0.5),
    ("loss",),
    dump=("--level", "modules", "gradients"),
)
def metric_learning(use: Use) -> None:
    from pytorch_metric_learning.losses import TripletMarginLoss

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
            self.loss = TripletMarginLoss(margin=0.1)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.embed(x), labels)

    task = use.ready(Task())
    optimizer = torch.optim.Adam(task.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        task(use.drawn(12, 12), torch.arange(12) % 3).backward()
        optimizer.step()


def _generator_and_critic(use: Use) -> tuple[Any, Any]:
    from torchvision.ops import MLP

    return use.ready(MLP(8, [32, 16])), MLP(16, [32, 1])


@program(
    "torchvision",
    "the generator of two networks has a layer too loud",
    scaled("3", "weight", 1.5),
    ("3",),
    dump=("--level", "modules", "gradients"),
)
def torchvision_adversaries(use: Use) -> None:
    generator, critic = _generator_and_critic(use)
    steps = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, critic)]
    for _ in range(2):
        made = generator(use.drawn(6, 8))
        steps[1].zero_grad()
        (critic(made.detach()).mean() - critic(use.drawn(6, 16)).mean()).backward()
        steps[1].step()
        steps[0].zero_grad()
        (-critic(made).mean()).backward()
        steps[0].step()
