"""The same forward pass dumped by msprobe, as its manual says: tensors of modules, in and out.

python dump_with_msprobe.py --dtype bfloat16 --output DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from infer_llama import build, chosen_dtype, prompt
from msprobe.pytorch import PrecisionDebugger


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--output", type=Path, required=True)
    output: Path = options.parse_known_args()[0].output
    output.mkdir(parents=True, exist_ok=True)
    config = output / "config.json"
    config.write_text(
        json.dumps(
            {
                "task": "tensor",
                "dump_path": str(output),
                "rank": [],
                "step": [],
                "level": "L0",
                "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
            }
        )
    )
    torch.set_num_threads(1)
    model = build(chosen_dtype())
    debugger = PrecisionDebugger(config_path=str(config))
    with torch.no_grad():
        debugger.start(model)
        model(prompt())
        debugger.stop()
        debugger.step()


if __name__ == "__main__":
    main()
