"""An activation that differs by less than rounding is found by its error's shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import gpt2, replayed, run_of, tokens, twin
from torch.nn import functional

from driftline.diagnosis.api import diagnose
from driftline.diagnosis.evidence.other_function import on_the_grid
from driftline.diagnosis.result import Diagnosis
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


class WrittenGelu(torch.nn.Module):
    """GELU as ports write it: every step is rounded to the format of its input."""

    def __init__(self, constant: float = 0.044715) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        inner = 0.7978845608 * (input + self.constant * input * input * input)
        return 0.5 * input * (1 + torch.tanh(inner))


@pytest.mark.parametrize("seed", [0, 1])
def test_an_activation_that_is_written_out_is_no_fault_and_a_wrong_one_is(seed: int) -> None:
    reference, ids = gpt2(seed), tokens(seed)
    for block in reference.transformer.h:
        block.mlp.act = torch.nn.GELU(approximate="tanh")

    def told(wrong: str) -> Diagnosis:
        def plant(model: Any) -> None:
            for index, block in enumerate(model.transformer.h):
                constant = 0.2 if f"transformer.h.{index}.mlp.act" == wrong else 0.044715
                block.mlp.act = WrittenGelu(constant)

        theirs = run_of(twin(reference, torch.bfloat16, plant), ids)
        return diagnose(run_of(reference, ids), theirs, replay=replayed(reference, theirs, ids))

    assert told("").verdict == "pass", str(told(""))
    found = told("transformer.h.1.mlp.act")
    assert found.first_site == "transformer.h.1.mlp.act", str(found)
