"""Folders with what the documents' commands take: programs, runs, dumps of other tools, a model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from driftline.formats.ascend.ge.graph_text import GraphNode
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into
from support.atb import AtbDump, Operation, Value
from support.ge import GeDump

DATA = Path(__file__).parents[1] / "data"
DEMO = Path(__file__).parents[2] / "src" / "driftline" / "testing" / "demo" / "infer.py"
PROGRAM = """
import argparse, torch
options = argparse.ArgumentParser()
options.add_argument("--dtype", default="float32")
dtype = getattr(torch, options.parse_args().dtype)
torch.manual_seed(0)
torch.set_num_threads(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, x):
        return self.model(x)


net = Wrapped().to(dtype).eval()
with torch.no_grad():
    for _ in range(2):
        net(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(dtype))
"""
SMALL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
with torch.no_grad():
    model(torch.randn(4, 16))
"""
LABELS = """
import numpy
from driftline import gen_id, set_label, set_task_id

set_task_id()
data_id = gen_id()
set_label("pta", data_id, data_val=numpy.ones(4))
set_label("acl", data_id, data_val=numpy.ones(4))
"""
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
NODES = [
    GraphNode("x", "Data"),
    GraphNode("Add_2", "Add", (("x", 0), ("x", 0)), ("add_2-aten.add.Tensor.OUTPUT.0",)),
    GraphNode("Relu_1", "Relu", (("Add_2", 0),), ("relu_1-aten.relu.default.OUTPUT.0",)),
]


def tools(place: Path, python: str) -> Path:
    """`python`, `bash` scripts and `driftline` as in an environment that is activated."""
    place.mkdir(parents=True)
    for name, words in (
        ("driftline", f'"{python}" -m driftline'),
        ("python", f'"{python}"'),
        ("torchrun", f'"{python}" -m torch.distributed.run'),
    ):
        (place / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (place / name).chmod(0o755)
    return place


TORCH_TRAINING = """
import numpy, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

net, weights = Net(), numpy.load("w.npz")
with torch.no_grad():
    for name in ("first", "last"):
        getattr(net, name).weight.copy_(torch.from_numpy(weights[name].T))
        getattr(net, name).bias.zero_()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    net(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
"""
PADDLE_TRAINING = """
import numpy, paddle
from paddle import nn

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

net, weights = Net(), numpy.load("w.npz")
for name in ("first", "last"):
    getattr(net, name).weight.set_value(weights[name])
{hook}
optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
for _ in range(2):
    net(paddle.ones([2, 6])).square().sum().backward()
    optimizer.step()
"""
HOOK = """
from driftline import register_saving_hook
net = register_saving_hook(net, path="./tmp_tensors", target_class_names=["Linear", "LayerNorm"])
"""


def programs(place: Path, *, demo: bool = False) -> None:
    if demo:
        shutil.copy(DEMO, place / "infer.py")
    else:
        (place / "infer.py").write_text(PROGRAM)
    (place / "label.py").write_text(LABELS)
    (place / "run.sh").write_text("python infer.py\n")
    (place / "label.sh").write_text("python label.py\n")


def examples(place: Path) -> None:
    """The programs of the pages for kinds of users."""
    for file in (DEMO.parents[4] / "examples" / "users").iterdir():
        if file.is_file():
            shutil.copy(file, place)


def two_revisions(place: Path) -> None:
    """A repository whose branch has another activation than main."""
    (place / "infer.py").write_text(SMALL)
    revisions(place)
    (place / "infer.py").write_text(SMALL.replace("nn.GELU()", "nn.ReLU()"))
    name = ("-c", "user.name=Cook", "-c", "user.email=cook@example.com")
    for words in (
        ("checkout", "--quiet", "my-branch"),
        (*name, "commit", "--quiet", "--all", "--message=quicker"),
        ("checkout", "--quiet", "main"),
    ):
        subprocess.run(["git", *words], cwd=place, check=True, timeout=60)


def good_and_bad(place: Path) -> None:
    """The same with the two commits called GOOD and BAD, a run of the good one and one of now."""
    two_revisions(place)
    for words in (("tag", "GOOD", "main"), ("tag", "BAD", "my-branch")):
        subprocess.run(["git", *words], cwd=place, check=True, timeout=60)
    for name in ("ref", "cand"):
        dump = ["dump", "-o", name, "--", sys.executable, "infer.py"]
        command = [sys.executable, "-m", "driftline", *dump]
        subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=110)


def revisions(place: Path) -> None:
    """The folder as a git repository with the branches that the page names."""
    name = ("-c", "user.name=Cook", "-c", "user.email=cook@example.com")
    for words in (
        ("init", "--quiet", "--initial-branch=main"),
        ("add", "infer.py"),
        (*name, "commit", "--quiet", "--message=infer"),
        ("branch", "my-branch"),
    ):
        subprocess.run(["git", *words], cwd=place, check=True, timeout=60)


def ascend(place: Path) -> None:
    zeros = Value("x", np.zeros(4, np.float32))
    ones = Value("w", np.ones((4, 4), np.float32))
    share = Value("p", np.full(4, 0.25, np.float32))
    operators = [
        Operation("SoftmaxOperation", [zeros], [share], {"axes": [-1]}),
        Operation("LinearOperation", [zeros, ones], [zeros], {"hasBias": False}),
    ]
    dump = AtbDump(place, "G2")
    dump.execute(operators)
    shutil.copy(dump.operation_csv(operators), place)
    some = next(path for path in sorted(place.rglob("*.bin")) if "outtensor" in path.name)
    shutil.copy(some, place / "x.bin")
    torch.save(torch.full((4,), 0.25), place / "x.pth")
    for name in ("ge_dump", "fx_dump"):
        shutil.copytree(DATA / "ascend" / name, place / name)
    unfused, fused = GeDump(place / "unfused_ge"), GeDump(place / "fused_ge")
    unfused.operator("Add", "Add_2", [X, X], [X + X])
    unfused.operator("Relu", "Relu_1", [X + X], [np.maximum(X + X, 0)])
    fused.operator("AutomaticBufferFusionOp", "Add_2Relu_1", [X], [np.maximum(X + X, 0)])
    for graph in (unfused, fused):
        graph.graph_text(NODES)


def hooks(place: Path) -> None:
    for tree in ("tmp_tensors", "tmp_tensors_0"):
        folder = place / tree / "tensors" / "rank_0"
        folder.mkdir(parents=True)
        for step in range(2):
            name = f"tensor_idx_{step}_layer_class_Linear_layer_name_linear_0_micro_step_{step}"
            np.save(folder / f"{name}.npy", np.arange(4, dtype=np.float32) + step)


def paddle_programs(place: Path) -> None:
    """One model in torch (reference.py) and in Paddle (train.py, and hooked.py with its hook)."""
    dice = np.random.default_rng(0)
    weights = {"first": (6, 8), "last": (8, 3)}
    np.savez(
        place / "w.npz", **{n: dice.standard_normal(s, np.float32) for n, s in weights.items()}
    )
    (place / "reference.py").write_text(TORCH_TRAINING)
    (place / "train.py").write_text(PADDLE_TRAINING.format(hook=""))
    (place / "hooked.py").write_text(PADDLE_TRAINING.format(hook=HOOK))


def files(place: Path) -> None:
    np.save(place / "a.npy", np.ones(4, np.float32))
    torch.save(torch.ones(4), place / "b.pt")


def decoder(place: Path) -> None:
    fixtures = DATA / "aiu" / "fixtures"
    for name in ("tiny-llama", "M"):
        shutil.copytree(fixtures / "tiny-llama", place / name)
    shutil.copy(fixtures / "share_gpt_tiny.json", place / "share_gpt.json")


def msprobe(place: Path) -> None:
    for name in ("bench", "npu"):
        shutil.copytree(DATA / "msprobe" / "L0_tensor", place / name)


def named_otherwise(place: Path) -> None:
    """Runs whose sites have other names, and one that is sharded over two ranks."""
    dice = np.random.default_rng(0)
    weights = {"mlp.up": (8, 4), "mlp.down": (4, 8)}
    hidden = dice.standard_normal((3, 4)).astype(np.float32)
    up = dice.standard_normal(weights["mlp.up"]).astype(np.float32)
    down = dice.standard_normal(weights["mlp.down"]).astype(np.float32)
    inner = hidden @ up.T
    for name, site in (("ref", "model.layers.{}.mlp"), ("cand", "blocks.{}.ffn")):
        writer = RunWriter(place / name)
        for layer in range(2):
            key = TensorKey.of(site.format(layer), "output")
            record_into(writer, key, hidden * (layer + 1), class_name="Mlp")
        writer.close()
    writer = RunWriter(place / "whole")
    for site, port, slot, values in (
        ("mlp.up", "param", "weight", up),
        ("mlp.up", "output", "0", inner),
        ("mlp.down", "param", "weight", down),
        ("mlp.down", "output", "0", inner @ down.T),
    ):
        record_into(writer, TensorKey.of(site, port, slot), values, class_name="Linear")  # type: ignore[arg-type]
    writer.close()
    for rank in range(2):
        half = slice(4 * rank, 4 * rank + 4)
        writer = RunWriter(place / "sharded", rank=rank, world_size=2)
        for site, port, slot, values in (
            ("mlp.up", "param", "weight", up[half]),
            ("mlp.up", "output", "0", inner[:, half]),
            ("mlp.down", "param", "weight", down[:, half]),
            ("mlp.down", "output", "0", inner[:, half] @ down[:, half].T),
        ):
            key = TensorKey.of(site, port, slot, rank=rank)  # type: ignore[arg-type]
            record_into(writer, key, np.ascontiguousarray(values), class_name="Linear")
        writer.close()


def onnx_models(place: Path) -> None:
    """The program's model as ONNX, in float and in int8, and something to run it with."""
    import logging

    import onnx
    from onnx import helper, numpy_helper
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    torch.manual_seed(0)
    nodes, weights, value = [], [], "x"
    for layer in range(2):
        linear = torch.nn.Linear(16, 16)
        path = ["", "model", f"model.layers.{layer}"]
        for number, op, made in ((0, "Gemm", f"linear_{layer}"), (1, "Tanh", f"tanh_{layer}")):
            own = f"model.layers.{layer}.{number}"
            names = [value, f"{own}.weight", f"{own}.bias"] if op == "Gemm" else [value]
            how = {"transB": 1} if op == "Gemm" else {}
            node = helper.make_node(op, names, [made], f"node_{made}", **how)
            kinds = ["Wrapped", "Model", "Sequential", "Linear" if op == "Gemm" else "Tanh", op]
            for key, told in (("name_scopes", [*path, own, made]), ("class_hierarchy", kinds)):
                node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=repr(told))
            nodes.append(node)
            value = made
        for name, tensor in linear.named_parameters():
            array = tensor.detach().numpy()
            weights.append(numpy_helper.from_array(array, f"model.layers.{layer}.0.{name}"))
    ends = [helper.make_tensor_value_info(name, 1, [4, 16]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "m", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(place / "m.onnx"))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).numpy()
    np.savez(place / "x.npz", x=x)

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": x}]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    logging.disable(logging.WARNING)
    quantize_static(
        str(place / "m.onnx"), str(place / "int8.onnx"), Once(), quant_format=QuantFormat.QDQ
    )
    logging.disable(logging.NOTSET)


def served(place: Path) -> None:
    """A Llama of transformers, and the same written as serving engines write it."""
    for name, model in (("transformers", "source"), ("served", "Served(source).eval()")):
        (place / f"infer_{name}.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
            "import torch\n"
            "from benchmarks.engines.served_models import IDS, Served, original\n"
            f"source = original('Llama')\nmodel = {model}\n"
            "with torch.no_grad():\n    model(IDS)\n"
        )


def two_runs(place: Path) -> None:
    """A reference and a candidate that is a little off."""
    for name, off in (("ref", 0.0), ("cand", 1e-3)):
        dice = np.random.default_rng(0)
        writer = RunWriter(place / name)
        for layer in range(6):
            values = dice.standard_normal((16, 32)).astype(np.float32) * np.float32(1 + off)
            key = TensorKey.of(f"model.layers.{layer}", "output")
            record_into(writer, key, values, class_name="Layer")
        writer.close()
