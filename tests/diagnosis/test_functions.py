"""An activation that differs by less than rounding is found by its error's shape."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from driftline.diagnosis.evidence.other_function import on_the_grid
from driftline.testing.faults import FAULTS, Setting
from driftline.testing.faults.trials import METHODS, planted


def test_gelu_for_its_tanh_form_is_found_in_fp16_although_noise_is_larger() -> None:
    setting = Setting("bert", "fp16", 3, FAULTS["activation"], 1)
    pair = planted(setting)
    found = METHODS["replay"](setting, pair)
    assert found.exact, found
    assert found.cause == "activation"
    assert found.wrong == 0


def test_the_right_function_in_fp16_is_no_other() -> None:
    setting = Setting("gpt2", "fp16", 3)
    assert not METHODS["replay"](setting, planted(setting)).detected


def test_gelu_for_its_tanh_form_is_found_in_bfloat16_by_the_numbers_it_rounds_to() -> None:
    setting = Setting("bert", "bf16", 3, FAULTS["activation"], 1)
    pair = planted(setting)
    found = METHODS["replay"](setting, pair)
    assert found.exact, found
    assert found.cause == "activation"
    assert found.wrong == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_right_function_is_no_other_fused_or_in_steps(dtype: torch.dtype) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = functional.gelu(x.double()).numpy()
    fused = functional.gelu(x)
    steps = x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    wrong = functional.gelu(x, approximate="tanh")
    name = str(dtype).removeprefix("torch.")
    given = x.double().numpy(), exact
    for right in (fused, steps):
        made = right.double().numpy()
        assert on_the_grid(*given, made, fused.double().numpy(), name) is None
    found = on_the_grid(*given, wrong.double().numpy(), fused.double().numpy(), name)
    assert found is not None
    assert found.other == "gelu (tanh)"
