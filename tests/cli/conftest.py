"""Two small runs on disk, one with a planted fault, and a way to run commands on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into
from support.commands import Said

LAYERS = 3
CLASSES = {"norm": "RMSNorm", "mlp.up": "Linear", "mlp.act": "SiLU", "mlp": "MLP"}


@pytest.fixture
def driftline(command: Callable[..., Said]) -> Callable[..., Said]:
    """A command line is read as it is typed: `driftline("compare", …)`."""
    return command


def write_run(path: Path, *, fault_at: str = "", noise: float = 0.0, steps: int = 1) -> Path:
    """A run of a little decoder; a fault doubles one site's output and all that follow."""
    writer = RunWriter(path, command=["python", "infer.py"])
    writer.topology(tree())
    generator = np.random.default_rng(5)
    nudge = np.random.default_rng(6)
    for step in range(steps):
        scale = 1.0
        for site, class_name in sites():
            values = generator.standard_normal((2, 8)).astype(np.float32)
            values += (noise * nudge.standard_normal(values.shape)).astype(np.float32)
            if site == fault_at:
                scale = 2.0
            record_into(
                writer,
                TensorKey.of(site, "output", step=step),
                (values * scale).astype(np.float32),
                class_name=class_name,
            )
    writer.close()
    return path


def sites() -> list[tuple[str, str]]:
    return [
        (f"model.layers.{layer}.{name}", class_name)
        for layer in range(LAYERS)
        for name, class_name in CLASSES.items()
    ]


def tree() -> dict[str, Any]:
    def layer(n: int) -> dict[str, Any]:
        site, ids = f"model.layers.{n}", f"0_0_{n}"
        mlp = {"name": "mlp", "site": f"{site}.mlp", "class": "MLP", "ids": f"{ids}_1"}
        mlp["children"] = [
            {"name": "up", "site": f"{site}.mlp.up", "class": "Linear", "ids": f"{ids}_1_0"},
            {"name": "act", "site": f"{site}.mlp.act", "class": "SiLU", "ids": f"{ids}_1_1"},
        ]
        norm = {"name": "norm", "site": f"{site}.norm", "class": "RMSNorm", "ids": f"{ids}_0"}
        return {"name": str(n), "site": site, "class": "Layer", "ids": ids, "children": [norm, mlp]}

    layers = [layer(n) for n in range(LAYERS)]
    return {
        "schema": 1,
        "order": [],
        "roots": [
            {
                "site": "(root)",
                "class": "Toy",
                "ids": "",
                "children": [
                    {
                        "name": "model",
                        "site": "model",
                        "class": "Decoder",
                        "ids": "0",
                        "children": [
                            {
                                "name": "layers",
                                "site": "model.layers",
                                "class": "ModuleList",
                                "ids": "0_0",
                                "children": layers,
                            }
                        ],
                    }
                ],
            }
        ],
    }


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write_run(tmp_path / "ref")


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return write_run(tmp_path / "clean", noise=1e-6)


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    return write_run(tmp_path / "faulty", fault_at="model.layers.1.mlp.act")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda name, **how: write_run(tmp_path / name, **how)
