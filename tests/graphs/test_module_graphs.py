"""Graphs of dumps that hold modules only: what lies between modules connects them, at every level.

Also of ait's tree with operators, which `ait llm opcheck` takes as well.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from driftline.cli.main import main

BIN = Path(sys.executable).parent
PROGRAM = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.linear(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.mean(1))

if __name__ == "__main__":
    Net().eval()(torch.randn(2, 3, 8))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A folder with the program, a dump of its modules, and ait's trees with and without operators,
    made by the seed's own command."""
    base = tmp_path_factory.mktemp("graphs")
    (base / "net.py").write_text(PROGRAM)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    program = f"{warm_python} net.py"
    for words in (
        ["driftline", "dump", "-o", "run", "--exec", program],
        ["ait", "llm", "dump", "--exec", program, "-o", "modules"],
        ["ait", "llm", "dump", "--exec", program, "--type", "op", "tensor", "-o", "operators"],
        ["ait", "llm", "dump", "--exec", program, "--type", "model", "-o", "topology"],
    ):
        done = subprocess.run(
            [warm_python, str(BIN / words[0]), *words[1:]],
            cwd=base,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return base


def parts_of(path: Path) -> int:
    """How many pieces a graph falls into."""
    graph = onnx.load(path).graph
    holder: dict[str, str] = {}

    def top(name: str) -> str:
        while holder.setdefault(name, name) != name:
            name = holder[name]
        return name

    for number, node in enumerate(graph.node):
        for tensor in (*node.input, *node.output):
            if tensor not in {value.name for value in graph.initializer}:
                holder[top(f"tensor {tensor}")] = top(f"node {number}")
    return len({top(f"node {number}") for number in range(len(graph.node))})


@pytest.mark.parametrize("source", ["run", "modules", "operators"])
@pytest.mark.parametrize(("level", "least"), [("1", 5), ("2", 11), ("all", 11)])
def test_a_residual_network_is_one_connected_graph(
    place: Path, tmp_path: Path, source: str, level: str, least: int
) -> None:
    drawing = tmp_path / "graph.onnx"
    words = [] if level == "all" else ["--level", level]
    assert main(["topology", str(place / source), *words, "-o", str(drawing)]) == 0
    onnx.checker.check_model(onnx.load(drawing))
    assert len(onnx.load(drawing).graph.node) >= least
    assert parts_of(drawing) == 1


@pytest.mark.parametrize(("level", "nodes"), [(0, 1), (1, 10), (2, 16), (None, 16)])
def test_the_seeds_own_function_draws_it_connected(
    place: Path, tmp_path: Path, level: int | None, nodes: int
) -> None:
    from ait_llm.common.json_fitter import atb_json_to_onnx

    (dumped,) = (place / "topology" / "ait_dump" / "model").rglob("Net.json")
    topology = tmp_path / "Net.json"
    shutil.copy(dumped, topology)
    atb_json_to_onnx(str(topology), *([] if level is None else [level]))
    drawing = topology.with_suffix(".onnx")
    assert len(onnx.load(drawing).graph.node) == nodes
    assert parts_of(drawing) == 1


def test_what_is_computed_between_modules_is_a_node_of_its_own(place: Path, tmp_path: Path) -> None:
    drawing = tmp_path / "graph.onnx"
    assert main(["topology", str(place / "run"), "--level", "2", "-o", str(drawing)]) == 0
    nodes = onnx.load(drawing).graph.node
    between = [node.name for node in nodes if node.op_type == "BetweenModules"]
    # The activations, the mean, and the sum at the end of each block.
    assert len(between) == 7 and "layers.1.between0" in between


def test_operators_of_a_tree_lie_inside_their_modules(place: Path, tmp_path: Path) -> None:
    """The outermost level has the modules alone, as a dump without operators has them."""
    names: dict[str, list[str]] = {}
    for source in ("modules", "operators"):
        drawing = tmp_path / f"{source}.onnx"
        assert main(["topology", str(place / source), "--level", "1", "-o", str(drawing)]) == 0
        names[source] = [node.op_type for node in onnx.load(drawing).graph.node]
    modules = ["Linear", "Block", "Block", "Block", "Linear"]
    for kinds in names.values():
        assert [kind for kind in kinds if kind in ("Linear", "Block")] == modules
    # The activations and the mean, which the model computes outside of its modules.
    assert len(names["operators"]) == len(modules) + 5


def test_one_of_several_tokens_is_checked_and_drawn_alone(
    place: Path, tmp_path: Path, warm_python: str
) -> None:
    """The list of operators is of all tokens; those of the others are not missing tensors."""
    twice = "model = Net().eval()\n    model(torch.randn(2, 3, 8))\n    model(torch.randn(2, 3, 8))"
    program = PROGRAM.replace("Net().eval()(torch.randn(2, 3, 8))", twice)
    (tmp_path / "twice.py").write_text(program)
    words = ["dump", "--type", "op", "tensor", "-er", "0,1", "-o", str(tmp_path / "two")]
    words += ["--exec", f"{warm_python} {tmp_path / 'twice.py'}"]
    ait = [warm_python, str(BIN / "ait"), "llm"]
    done = subprocess.run([*ait, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (process,) = (tmp_path / "two" / "ait_dump" / "torch_tensors").iterdir()
    for token in ("0", "1"):
        checked = [*ait, "opcheck", "-i", str(process / token)]
        done = subprocess.run([*checked, "-o", str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "16 operators checked, all right" in done.stdout
        assert "is not in the run" not in done.stdout
    whole = [*ait, "opcheck", "-i", str(process), "-o", str(tmp_path)]
    assert "32 operators checked" in subprocess.run(whole, capture_output=True, text=True).stdout
    assert main(["topology", str(process / "1"), "-o", str(tmp_path / "one.onnx")]) == 0


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_operators_of_a_torch_dump_are_checked(
    place: Path, tmp_path: Path, warm_python: str, listed: bool, spelling: str
) -> None:
    (process,) = (place / "operators" / "ait_dump" / "torch_tensors").iterdir()
    pid = process.name.partition("_")[2]
    sheet = place / "operators" / "ait_dump" / "operation_io_tensors" / pid
    words = ["-i", str(process / "0"), "-o", str(tmp_path)]
    words += ["-c", str(sheet / "operation_tensors_0.csv")] if listed else []
    command = [str(BIN / "ait"), "llm", "opcheck"]
    if spelling == "ours":
        command = [str(BIN / "driftline"), "opcheck"]
    done = subprocess.run([warm_python, *command, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 operators checked, all right" in done.stdout
    (result,) = tmp_path.glob("opcheck_result_*.csv")
    with result.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["op_name"].split("/")[-1] for row in rows} >= {
        "aten.addmm.default",
        "aten.add.Tensor",
    }
