"""Targets: words become a place to run, or a sentence that says what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftline.decoding.models import targets
from driftline.decoding.models.targets import Target, default_targets, parse_target, ready
from driftline.errors import BadInput, DriftlineError, NotInstalled


def test_a_target_is_read_and_said_in_the_same_words() -> None:
    text = "device=cuda:1,dtype=fp16,compile=inductor,dynamic=1,attention=eager"
    target = parse_target(text)
    assert target == Target("cuda:1", "fp16", "inductor", True, "eager")
    assert str(target) == text
    assert parse_target("") == Target("cpu", "fp32")
    assert parse_target("device=cpu", dtype="bf16").dtype == "bf16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device", "not of the form name=value"),
        ("device=", "not of the form name=value"),
        ("devise=cpu", "a target has no 'devise'"),
        ("dtype=fp8", "'fp8' is no number format"),
        ("device=cpu,device=cuda", "given twice"),
        ("dynamic=maybe", "dynamic takes 1 or 0"),
    ],
)
def test_a_misspelt_target_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_target(text)


def test_number_formats_have_one_short_name_each() -> None:
    for word in ("fp16", "float16", "half", "torch.float16", "FP16"):
        assert targets.dtype_name(word) == "fp16"


def test_the_default_is_the_cpu_in_fp32_against_the_best_device() -> None:
    reference, candidate = default_targets("bf16")
    assert reference == Target("cpu", "fp32")
    assert candidate == Target("cuda" if torch.cuda.is_available() else "cpu", "bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match=r"device=cuda was asked for.*sees no CUDA") as found:
        ready(parse_target("device=cuda,dtype=fp16"))
    assert "device=cpu" in found.value.hint


def test_a_device_or_compiler_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadInput, match="'abacus' is no device"):
        ready(Target("abacus"))
    with pytest.raises(BadInput, match="knows no backend 'inducer'") as found:
        ready(Target(compile="inducer"))
    assert "inductor" in found.value.hint
    with pytest.raises(DriftlineError):
        ready(Target("meta"))


@pytest.mark.parametrize(("device", "package"), [("aiu", "torch_sendnn"), ("npu", "torch_npu")])
def test_a_missing_device_package_is_named(device: str, package: str) -> None:
    with pytest.raises(NotInstalled, match=f"device={device} needs the package {package}"):
        ready(parse_target(f"device={device},dtype=fp16"))


def test_the_aiu_runs_what_its_own_compiler_makes() -> None:
    assert parse_target("device=aiu").compile == "sendnn"
    with pytest.raises(BadInput, match="device=aiu runs what compile=sendnn makes"):
        ready(parse_target("device=aiu,compile=inductor"))


def test_a_backend_registered_under_the_name_stands_for_the_device(stand_in: list[Any]) -> None:
    place = ready(parse_target("device=aiu,dtype=fp16"))
    assert (place.device.type, place.dtype, place.backend) == ("cpu", torch.float16, "sendnn")
