"""Whether torch may take float32 for less: what CUDA computes in TF32, and how to have it not.

torch convolves in TF32 unless it is told not to. It has older switches and newer ones; where a
program used the newer, the older raise when they are asked.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch


def allowed() -> list[str]:
    """What may be computed so: `products`, `convolutions`."""
    return [
        name for name, of, switch, off in _switches() if getattr(of, switch) not in (off, "none")
    ]


@contextlib.contextmanager
def switched_off() -> Generator[None]:
    """All digits of float32, and afterwards what the program has chosen."""
    before = [(of, switch, getattr(of, switch)) for _, of, switch, _ in _switches()]
    try:
        for _, of, switch, off in _switches():
            setattr(of, switch, off)
        yield
    finally:
        for of, switch, value in before:
            setattr(of, switch, value)


def _switches() -> list[tuple[str, Any, str, Any]]:
    """(name, where its switch is, what it is called, what is off)."""
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    try:
        _ = products.allow_tf32, convolutions.allow_tf32
    except RuntimeError:
        return [
            ("products", products, "fp32_precision", "ieee"),
            ("convolutions", convolutions.conv, "fp32_precision", "ieee"),
        ]
    return [
        ("products", products, "allow_tf32", False),
        ("convolutions", convolutions, "allow_tf32", False),
    ]
