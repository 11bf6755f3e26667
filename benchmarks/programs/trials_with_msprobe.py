"""Trials of the yardstick dumped by msprobe, in its own environment: one side of each, as steps.

    python trials_with_msprobe.py --jobs FILE --side reference|candidate --output DIR

FILE holds the trials as JSON lines; the models follow from them to the bit, so msprobe sees the
same numbers as every other method. The folder of `driftline` is given by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from msprobe.pytorch import PrecisionDebugger

from driftline.testing.faults import FAULTS
from driftline.testing.faults.trials import Setting, candidate_of, reference_of


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=Path, required=True)
    options.add_argument("--side", choices=("reference", "candidate"), required=True)
    options.add_argument("--output", type=Path, required=True)
    given = options.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    config = given.output / "config.json"
    config.write_text(
        json.dumps(
            {
                "task": "tensor",
                "dump_path": str(given.output),
                "rank": [],
                "step": [],
                "level": "L0",
                "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
            }
        )
    )
    torch.set_num_threads(1)
    debugger = PrecisionDebugger(config_path=str(config))
    for line in given.jobs.read_text().splitlines():
        architecture, name, seed, kind, amount, length, implementation, batch = json.loads(line)[:8]
        setting = Setting(
            *(architecture, name, seed, FAULTS[kind] if kind else None, amount),
            *(length, implementation, batch),
        )
        side = reference_of if given.side == "reference" else candidate_of
        model, inputs = side(setting)
        torch.manual_seed(5)
        with torch.no_grad():
            debugger.start(model)
            model(**inputs)
            debugger.stop()
            debugger.step()


if __name__ == "__main__":
    main()
