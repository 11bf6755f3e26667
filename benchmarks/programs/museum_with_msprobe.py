"""Cases of the museum dumped by msprobe, in its own environment: one variant of each, as steps.

    python museum_with_msprobe.py --variant good|control|bad --output DIR CASE ...

`control` is the right program in the candidate's number format. The root of the repository is given
by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from benchmarks.museum.networks import CASES, DTYPES, FILES, Variant
from msprobe.pytorch import PrecisionDebugger
from torch import nn


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--variant", choices=("good", "control", "bad"), required=True)
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("cases", nargs="+")
    asked = words.parse_args()
    for name in FILES:
        importlib.import_module(f"benchmarks.museum.cases.{name}")
    asked.output.mkdir(parents=True, exist_ok=True)
    config = asked.output / "config.json"
    tensors = {"scope": [], "list": [], "data_mode": ["all"]}
    plan = {"task": "tensor", "dump_path": str(asked.output), "rank": [], "step": [], "level": "L0"}
    config.write_text(json.dumps({**plan, "tensor": tensors}))
    torch.set_num_threads(1)
    debugger = PrecisionDebugger(config_path=str(config))
    call = nn.Module.__call__
    is_started = False

    def started(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The first module that the program calls is its model.
        nonlocal is_started
        if not is_started:
            is_started = True
            debugger.start(module)
        return call(module, *args, **kwargs)

    nn.Module.__call__ = started  # type: ignore[method-assign]
    for name in asked.cases:
        case = CASES[name]
        torch.manual_seed(0)
        is_started = False
        dtype = DTYPES[case.formats[0 if asked.variant == "good" else 1]]
        case.program(Variant(asked.variant == "bad", dtype))
        debugger.stop()
        debugger.step()


if __name__ == "__main__":
    main()
