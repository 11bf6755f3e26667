"""The documents' blocks for graph mode: as printed, with stand-ins for torchair and its hardware.

The stand-in backend runs the model and writes what the compiler's configuration asks for, in the
layouts of the real one, so that what follows reads real files.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

TORCHAIR = """
from pathlib import Path
from types import SimpleNamespace

import torch


class CompilerConfig:
    def __init__(self):
        self.debug = SimpleNamespace(
            graph_dump=SimpleNamespace(type=None, path=None), data_dump=SimpleNamespace(type=None)
        )
        self.dump_config = SimpleNamespace(enable_dump=False, dump_mode=None, dump_path=None)
        self.fusion_config = SimpleNamespace(fusion_switch_file=None)


def get_npu_backend(*, compiler_config):
    def backend(graph, examples):
        def run(*inputs):
            dump(compiler_config, graph, inputs)
            return graph(*inputs)
        return run
    return backend


def dump(config, graph, inputs):
    from support.ge_twins import traced, write_twins
    import shutil, tempfile
    given = [value for value in inputs if isinstance(value, torch.Tensor)]
    def whole_graph(*tensors):
        rest = iter(tensors)
        return graph(*(next(rest) if isinstance(v, torch.Tensor) else v for v in inputs))

    whole = config.fusion_config.fusion_switch_file is None
    fused = [["add", "relu"]] if whole and config.dump_config.enable_dump else []
    with tempfile.TemporaryDirectory() as folder:
        twins = write_twins(traced(whole_graph, *given), given, Path(folder), fused=fused)
        if config.dump_config.enable_dump:
            assert (config.debug.graph_dump.type, config.dump_config.dump_mode) == ("txt", "all")
            assert config.debug.graph_dump.path == config.dump_config.dump_path
            shutil.copytree(twins.ge, config.dump_config.dump_path, dirs_exist_ok=True)
        if config.debug.data_dump.type == "npy":
            for place in Path(twins.fx).glob("**/gm_*_dump"):
                shutil.copytree(place, place.name)
"""
PROGRAM = """
import torch, torch_npu, torchair
from ait_llm.dump import torchair_dump

class Model(torch.nn.Module):
    def forward(self, x, y):
        return torch.relu(x + y) @ y.T

model = Model()
{config}
npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend, dynamic=True)
model(torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 12).reshape(3, 4))
"""
GE = 'config = torchair_dump.get_ge_dump_config(dump_path="dump")'
FX = "config = torchair_dump.get_fx_dump_config()"
PLAIN = (
    'config = torchair_dump.get_ge_dump_config(dump_path="dump", '
    'fusion_switch_file="fusion_switch.json")'
)
SWITCH = """
{
  "Switch": {
    "GraphFusion": {
      "ALL": "off"
    },
    "UBFusion": {
      "ALL": "off"
    }
  }
}
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path), str(ROOT / "compat" / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "torchair.py").write_text(TORCHAIR)
    (tmp_path / "torch_npu.py").write_text("")
    (tmp_path / "fusion_switch.json").write_text(SWITCH)
    return tmp_path


def inferred(python: str, desk: Path, config: str, code: int = 0) -> str:
    (desk / "infer.py").write_text(PROGRAM.format(config=config))
    done = subprocess.run([python, "infer.py"], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def compared(mine: Path, golden: Path) -> list[dict[str, str]]:
    line = f"ait llm compare --my-path {mine} --golden-path {golden}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = Path.cwd().glob("ait_cmp_report_*.csv")
    with report.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if not row["cmp_fail_reason"]]


def test_a_graph_dump_is_compared_with_its_fx_dump(desk: Path, warm_llama: str) -> None:
    inferred(warm_llama, desk, GE)
    inferred(warm_llama, desk, FX)
    (ge,), (fx,) = (desk / "dump").glob("dump_*"), desk.glob("gm_*_dump")
    rows = compared(ge, fx)
    assert rows and all(float(row["cosine_similarity"]) > 0.999999 for row in rows)


@pytest.mark.slow
def test_a_fused_graph_dump_is_compared_with_one_without_fusions(
    desk: Path, warm_llama: str
) -> None:
    inferred(warm_llama, desk, GE)
    (fused,) = (desk / "dump").glob("dump_*")
    inferred(warm_llama, desk, PLAIN)
    (plain,) = set((desk / "dump").glob("dump_*")) - {fused}
    rows = compared(fused, plain)
    assert any("AddRelu" in row["my_data_path"] or "Add" in row["my_data_path"] for row in rows)
    assert all(float(row["cosine_similarity"]) > 0.999999 for row in rows)


def test_what_is_wrong_is_said_in_a_sentence(desk: Path, warm_llama: str) -> None:
    assert "no fusion switch file 'nowhere.json'" in inferred(
        warm_llama, desk, PLAIN.replace("fusion_switch.json", "nowhere.json"), code=1
    )
    assert "dump_mode is one of" in inferred(
        warm_llama, desk, 'config = torchair_dump.get_ge_dump_config(dump_mode="some")', code=1
    )
    (desk / "torchair.py").write_text("raise ImportError('no NPU here')")
    (desk / "alone.py").write_text(
        "from ait_llm.dump import torchair_dump\ntorchair_dump.get_fx_dump_config()\n"
    )
    done = subprocess.run([sys.executable, "alone.py"], capture_output=True, text=True)
    assert "torchair cannot be imported: no NPU here" in done.stderr
