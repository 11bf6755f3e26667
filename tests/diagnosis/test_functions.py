"""An activation that differs by less than rounding is found by its error's shape."""

from __future__ import annotations

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
