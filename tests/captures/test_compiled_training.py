"""Sound models in training, compiled by inductor, against themselves in eager mode: no alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from capture_zoo import one_thread
from torch import Tensor, nn

import driftline


class Inverted(nn.Module):
    """Wide, depthwise, narrow: between two norms a rectifier, so that sizes cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.up, self.bn1, self.act = (
            nn.Conv2d(4, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
        )
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False)
        self.bn2, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.up(self.stem(x))))
        return self.head(self.act(self.bn2(self.depthwise(y))).mean((2, 3)))


def pictures() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Inverted(), {"x": torch.randn(2, 3, 12, 12)}


def text() -> tuple[nn.Module, dict[str, Any]]:
    """Two decoder layers mask one bias alike: the compiler does it once, inside the first."""
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=40, **sizes, decoder_start_token_id=0, dropout_rate=0.0, use_cache=False
    )
    ids = torch.randint(1, 40, (2, 6))
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": ids, "decoder_input_ids": ids.flip(0)}


def trained(path: Path, make: Callable[[], Any], graph: str | None, wrong: str = "") -> Path:
    torch._dynamo.reset()
    model, inputs = make()
    if wrong:
        layer = model.get_submodule(wrong)
        # The gradient alone is wrong: what the layer gives is as it was.
        layer.weight.register_hook(lambda gradient: gradient + gradient.abs().mean() + 0.01)
    called = torch.compile(model) if graph else model
    with driftline.capture(model, path, levels=("modules", "gradients"), graph=graph), one_thread():
        result = called(**inputs)
        first = result if isinstance(result, Tensor) else result[0]
        (first * torch.linspace(-9, 9, first.numel()).sin().view(first.shape)).sum().backward()
    torch._dynamo.reset()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("make", [pictures, text])
def test_a_sound_training_is_no_alarm(tmp_path: Path, make: Callable[[], Any]) -> None:
    table = driftline.compare(
        trained(tmp_path / "eager", make, None), trained(tmp_path / "kernels", make, "inductor")
    )
    assert table.verdict == "pass", table.finding


def test_terms_that_cancel_before_a_norm_cover_no_wrong_gradient(tmp_path: Path) -> None:
    """Of bn1's weight nearly nothing is left: rounding is a share of what was added up."""
    eager = trained(tmp_path / "eager", pictures, None)
    again = trained(tmp_path / "again", pictures, None)
    assert driftline.compare(eager, again).verdict == "pass"
    wrong = driftline.compare(eager, trained(tmp_path / "wrong", pictures, None, wrong="bn1"))
    assert wrong.verdict == "fail"
    assert wrong.first is not None and wrong.first.key.site == "bn1"
