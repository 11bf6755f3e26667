"""ATB files and dump trees go through the suites that third parties subclass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from driftline.formats.ascend.atb import dump as atb_tree
from driftline.formats.ascend.atb import file
from driftline.testing.conformance import Arrays, FormatConformance, TreeConformance
from support.atb import AtbDump, Generation, Operation, Value, bin_bytes


class TestAtbBin(FormatConformance):
    format = file
    suffix = ".bin"
    one_tensor = True
    damages = 400

    def write(self, path: Path, arrays: Arrays) -> None:
        (array,) = arrays.values()
        path.write_bytes(bin_bytes(array))


class _AtbTree(TreeConformance):
    format = atb_tree
    generation: Generation = "G3"

    def write(self, folder: Path) -> None:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        linear = Operation("LinearOperation", [Value("x", x)], [Value("y", x + 1)], {"a": 1})
        layer = Operation("Decoder_layer", [Value("x", x)], [Value("y", x + 1)], children=[linear])
        dump = AtbDump(folder, self.generation)
        dump.execute([layer, layer])
        dump.topology("Toy", [layer, layer])

    def tensor_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*ensor*.bin"))


class TestOldTree(_AtbTree):
    generation: Generation = "G0"


class TestAitDump(_AtbTree):
    generation: Generation = "G2"


class TestMsitDump(_AtbTree):
    generation: Generation = "G3"


class TestAtbDumpData(_AtbTree):
    generation: Generation = "G4"


@pytest.mark.parametrize("generation", ["G0", "G1", "G2", "G2t", "G3", "G4"])
def test_every_generation_opens_at_every_level_a_user_would_type(
    tmp_path: Path, generation: Generation
) -> None:
    TestMsitDump.write(_with(generation), tmp_path)
    dump = AtbDump(tmp_path, generation)
    for level in (tmp_path, dump.root, dump.process.parent, dump.process, dump.execution(0)):
        assert atb_tree.sniff(level), level
        run = atb_tree.open(level)
        assert len(run) == 8 and not run.losses, level
        assert run.records[1].key.site == "0_Decoder_layer.0_LinearOperation"
    inside = dump.execution(0) / "1_Decoder_layer"
    assert {r.key.site for r in atb_tree.open(inside).records} == {
        "1_Decoder_layer",
        "1_Decoder_layer.0_LinearOperation",
    }


def _with(generation: Generation) -> _AtbTree:
    suite = TestMsitDump()
    suite.generation = generation
    return suite
