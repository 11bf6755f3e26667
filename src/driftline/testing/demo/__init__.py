"""The programs of `driftline demo`, which have never heard of Driftline, and what is planted there.

They are copied to the user's folder and run there; nothing imports them.
"""

from __future__ import annotations

from pathlib import Path

TORCH_PROGRAM = Path(__file__).with_name("infer.py")
NUMPY_PROGRAM = Path(__file__).with_name("layers.py")
FAULTY_LAYER = 5
CULPRIT = f"layers.{FAULTY_LAYER}.mlp.act_fn"
"""The site that the torch tour must name."""
NUMPY_CULPRIT = f"{FAULTY_LAYER:02}_activation"
