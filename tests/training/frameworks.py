"""One small training, by three frameworks, each with the same faults to plant."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import driftline

STEPS = 4
FAULTS = {
    "clip": (0, "gradients", "clip"),
    "coupled": (0, "update", "class of the optimizer: AdamW → Adam"),
    "norms": (0, "update", "AdamW weight_decay: 0.0 → 0.3"),
    "eps": (0, "update", "AdamW eps: 1e-08 → 0.01"),
    "betas": (1, "update", "AdamW betas: (0.9, 0.999) → (0.5, 0.99)"),
    "frozen": (0, "gradients", "trained → frozen"),
    "unregistered": (0, "update", "updated → not in the optimizer"),
    "groups": (0, "update", "AdamW lr: 0.001 → 0.003, for 1 parameter: "),
}
"""Fault → step and stage where it shows, and words that name it."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.norm(self.embed(tokens))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def model_of(fault: str) -> Net:
    torch.manual_seed(0)
    model = Net()
    if fault == "frozen":
        model.norm.requires_grad_(False)
    return model


def optimizer_of(model: Net, fault: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if fault == "unregistered":
        parameters = [p for p in parameters if p is not model.head.weight]
    decayed = [p for p in parameters if p.ndim > 1]
    bare = [p for p in parameters if p.ndim <= 1]
    if fault == "groups":
        decayed, bare = decayed[1:], [*bare, decayed[0]]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.3},
        {"params": bare, "weight_decay": 0.3 if fault == "norms" else 0.0, "lr": 3e-3},
    ]
    kind = torch.optim.Adam if fault == "coupled" else torch.optim.AdamW
    return kind(
        groups,
        lr=1e-3,
        eps=1e-2 if fault == "eps" else 1e-8,
        betas=(0.5, 0.99) if fault == "betas" else (0.9, 0.999),
    )


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "tokens": torch.randint(0, 32, (4, 6), generator=generator),
            "labels": torch.randint(0, 8, (4, 6), generator=generator),
        }
        for _ in range(STEPS)
    ]


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def with_accelerate(path: Path, fault: str) -> Path:
    from accelerate import Accelerator

    model = model_of(fault)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler()
    model, optimizer = accelerator.prepare(model, optimizer_of(model, fault))
    with driftline.capture(model, path):
        for batch in batches():
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            if fault != "clip":
                # On a CPU accelerate does not know of the scale.
                accelerator.scaler.unscale_(optimizer.optimizer)
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    return path


def with_transformers(path: Path, fault: str) -> Path:
    from transformers import Trainer, TrainingArguments

    class Unshuffled(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = model_of(fault)
    data = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in batches()
        for row in range(4)
    ]
    arguments = TrainingArguments(
        output_dir=str(path.parent / "trainer"),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        max_grad_norm=0.3,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    optimizer = optimizer_of(model, fault)
    trainer = Unshuffled(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    scale = trainer.accelerator.scaler = scaler()

    def unscale(*_: Any) -> None:
        # Clipping asks for gradients without their scale; a program may forget that.
        if fault != "clip":
            scale.unscale_(optimizer)

    trainer.accelerator.unscale_gradients = unscale
    with quiet(), driftline.capture(model, path):
        trainer.train()
    return path


def with_lightning(path: Path, fault: str) -> Path:
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(fault)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, fault)

        def on_after_backward(self) -> None:
            if fault == "clip":
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if fault == "clip" else 0.3,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler())],
        default_root_dir=str(path.parent),
    )
    with quiet(), driftline.capture(module.model, path):
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return path
