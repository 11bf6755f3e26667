"""Norms in coarse formats: right ones in steps are no fault, wrong ones are found below noise."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from small_models import gpt2, replayed, run_of, tokens, twin

from driftline.diagnosis.api import diagnose
from driftline.diagnosis.result import Diagnosis

FORMATS = [torch.bfloat16, torch.float16]
SITE = "transformer.h.2.ln_1"


def in_steps(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Statistics in float32, then three roundings: right, and what many programs do."""
    wide = input.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
    return wide.to(input.dtype) * self.weight + self.bias


def in_low_precision(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Statistics in the format of the input: every token gets a factor of its own."""
    x = input - input.mean(-1, keepdim=True)
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
    return x * self.weight + self.bias


def told(dtype: torch.dtype, plant: Any, seed: int = 0) -> Diagnosis:
    reference, ids = gpt2(seed), tokens(seed)
    theirs = run_of(twin(reference, dtype, plant), ids)
    return diagnose(run_of(reference, ids), theirs, replay=replayed(reference, theirs, ids))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_norm_that_is_right_but_rounds_three_times_is_no_fault(
    dtype: torch.dtype, seed: int
) -> None:
    def plant(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.forward = types.MethodType(in_steps, module)

    found = told(dtype, plant, seed)
    assert found.verdict == "pass", str(found)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_norm_whose_statistics_are_rounded_is_found_and_named(dtype: torch.dtype) -> None:
    def plant(model: Any) -> None:
        module = model.get_submodule(SITE)
        module.forward = types.MethodType(in_low_precision, module)

    found = told(dtype, plant)
    assert found.first_site == SITE, str(found)
    assert found.cause == "norm-precision", found.evidence


def test_an_epsilon_far_below_noise_is_found_by_its_lean() -> None:
    """Its effect is a tenth of the rounding of bfloat16."""
    reference = gpt2(0)
    spread: list[float] = []
    reference.get_submodule(SITE).register_forward_pre_hook(
        lambda _, args: spread.append(float(args[0].var(-1).mean()))
    )
    with torch.no_grad():
        reference(tokens(0))

    def scaled(model: Any) -> None:
        model.get_submodule(SITE).eps += 2 * 0.15 * 2.0**-8 * spread[0]

    found = told(torch.bfloat16, scaled)
    assert found.first_site == SITE, str(found)
    assert found.cause == "scale"
    assert [s.site for s in found.sites if s.status == "introduced"] == [SITE]
