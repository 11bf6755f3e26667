"""The arguments of a recorded aten call are made again where the check runs."""

from __future__ import annotations

import torch

from driftline.operators.aten.calls import arguments_of


def test_a_tensor_is_made_on_the_device_of_the_check_wherever_the_program_made_it() -> None:
    recorded = {"size": [2, 3], "dtype": "torch.float32", "device": "cuda:5"}
    for param in (recorded, {k: v for k, v in recorded.items() if k != "device"}):
        arguments = arguments_of(torch.ops.aten.zeros.default, param, {}, "float32", "cpu")
        names = [argument.name for argument in torch.ops.aten.zeros.default._schema.arguments]
        assert dict(zip(names, arguments, strict=True))["device"] == torch.device("cpu")
