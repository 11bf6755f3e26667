"""Polygraphy's `CompareFunc.simple` over two of our dumps, read with the safetensors package.

python compare_with_polygraphy.py REF CAND
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from polygraphy.comparator import CompareFunc, IterationResult
from polygraphy.logger import G_LOGGER

NATIVE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensors(run: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for line in (run / "rank0" / "index.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if not entry.get("length") or entry["dtype"] not in NATIVE:
            continue
        shard = run / "rank0" / entry["shard"]
        raw = np.fromfile(shard, np.uint8, entry["length"], offset=entry["offset"])
        value = torch.from_numpy(raw).view(NATIVE[entry["dtype"]]).reshape(entry["shape"])
        found["/".join(entry[part] for part in ("site", "port", "slot"))] = value.float().numpy()
    return found


def main() -> None:
    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    reference, candidate = (IterationResult(tensors(Path(path))) for path in sys.argv[1:3])
    CompareFunc.simple(check_error_stat="max")(reference, candidate)


if __name__ == "__main__":
    main()
