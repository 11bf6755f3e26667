"""Clean pairs in two number formats: neither depth nor gains make a FAIL, by any command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from two_runs import decoder, runs_of

import driftline

FORMATS = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "gain"),
    [
        (torch.bfloat16, 0.0),
        (torch.float16, 0.0),
        (torch.bfloat16, 1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_eight_layers_of_width_128_pass(
    name: str, dtype: torch.dtype, gain: float, command: Callable, tmp_path: Path
) -> None:
    pair = runs_of(decoder(name, 8, gain=gain, sharpness=1.0), tmp_path, dtype=dtype)
    for verb in ("compare", "diagnose"):
        said = command(verb, *pair)
        assert (said.code, said.word) == (0, "PASS"), said.out
    if gain:  # 0.06 of the 0.05 that the format alone allows, in layers 6 and 7
        over = [row for row in driftline.compare(*pair) if row.metrics.get("relative_l2", 0) > 0.05]
        assert over


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_24_layers_with_gains_do_not_fail(
    gain: float, dtype: torch.dtype, command: Callable, tmp_path: Path
) -> None:
    pair = runs_of(decoder("Llama", 24, width=96, gain=gain), tmp_path, dtype=dtype)
    codes = {verb: command(verb, *pair) for verb in ("compare", "diagnose")}
    assert {said.word for said in codes.values()} <= {"PASS", "INCOMPLETE"}, codes
    assert len({said.code for said in codes.values()}) == 1


@pytest.mark.parametrize("gain", [pytest.param(0.0, marks=pytest.mark.slow), 2.0])
def test_80_layers_do_not_fail(gain: float, command: Callable, tmp_path: Path) -> None:
    pair = runs_of(decoder("Qwen2", 80, width=64, gain=gain), tmp_path, tokens=16)
    codes = {verb: command(verb, *pair) for verb in ("compare", "diagnose")}
    assert {said.word for said in codes.values()} <= {"PASS", "INCOMPLETE"}, codes
    assert len({said.code for said in codes.values()}) == 1


def test_what_weights_in_the_runs_show_accuses_no_clean_layer(
    command: Callable, tmp_path: Path
) -> None:
    model = decoder("Llama", 8, width=96, gain=2.0)
    pair = runs_of(model, tmp_path, levels=("modules", "params"))
    for verb in ("compare", "diagnose"):
        assert command(verb, *pair).code != 1, verb
