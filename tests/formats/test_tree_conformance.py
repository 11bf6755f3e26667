"""Every format of many files goes through the suite that third parties subclass."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from driftline.formats import plain_folder
from driftline.formats.ait import dump
from driftline.formats.tools import decoder_output, msprobe, paddle_hook, transformers_debugger
from driftline.testing.conformance import TreeConformance

DATA = Path(__file__).parents[1] / "data"


class TestAitTorch(TreeConformance):
    format = dump

    def write(self, folder: Path) -> None:
        shutil.copytree(DATA / "ascend" / "mini_torch", folder, dirs_exist_ok=True)

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.pth"))


class TestMsprobe(TreeConformance):
    format = msprobe

    def write(self, folder: Path) -> None:
        shutil.copytree(DATA / "msprobe" / "L0_tensor", folder, dirs_exist_ok=True)

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.pt"))


class TestPaddleHook(TreeConformance):
    format = paddle_hook

    def write(self, folder: Path) -> None:
        place = folder / "tensors" / "rank_0"
        place.mkdir(parents=True)
        for at in range(5):
            name = f"tensor_idx_{at}_layer_class_Linear_layer_name_linear_{at}_micro_step_0.npy"
            np.save(place / name, np.full((2, 3), at, np.float32))

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.npy"))


class TestDecoderOutput(TreeConformance):
    format = decoder_output
    found = False  # the folder of the suite has another name
    one_file_each = False

    def write(self, folder: Path) -> None:
        for at in range(3):
            torch.save({"tokens": torch.arange(4), "logits": torch.ones(2, 5)}, folder / f"{at}.pt")

    def _dump(self, tmp_path: Path) -> Path:
        return super()._dump(tmp_path).rename(tmp_path / "dump.out")

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.pt"))


class TestTransformersDebugger(TreeConformance):
    format = transformers_debugger

    def write(self, folder: Path) -> None:
        from transformers.model_debugging_utils import model_addition_debugger_context

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        with model_addition_debugger_context(model, debug_path=str(folder), use_repr=False):
            model(torch.ones(2, 3))

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.safetensors"))


class TestPlainFiles(TreeConformance):
    format = plain_folder

    def write(self, folder: Path) -> None:
        (folder / "layers").mkdir()
        for at in range(4):
            np.save(folder / "layers" / f"{at}.npy", np.full((2, 3), at, np.float16))

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.npy"))
