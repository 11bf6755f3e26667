"""GE and FX dumps go through the suite that third parties subclass."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from driftline.formats.ascend.ge import dump as ge_tree
from driftline.formats.ascend.ge import fx_dump
from driftline.formats.ascend.ge.graph_text import GraphNode
from driftline.testing.conformance import TreeConformance
from support.ge import GeDump, ge_tiles, write_fx

MATRIX = np.arange(60, dtype=np.float32).reshape(5, 12)


class TestGeDump(TreeConformance):
    format = ge_tree

    def write(self, folder: Path) -> None:
        dump = GeDump(folder)
        for number in range(4):
            dump.operator("Neg", f"Neg_{number}", [], [ge_tiles(MATRIX) if number % 2 else MATRIX])
        dump.graph_text([GraphNode("Neg_0", "Neg")])

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("Neg.*"))


class TestFxDump(TreeConformance):
    format = fx_dump

    def write(self, folder: Path) -> None:
        write_fx(folder / "data_dump" / "1" / "gm_1_dump", "neg", "aten.neg", [MATRIX], [MATRIX])
        write_fx(folder / "data_dump" / "2" / "gm_1_dump", "neg", "aten.neg", [MATRIX, 1], [MATRIX])

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.npy"))
