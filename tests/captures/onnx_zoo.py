"""Small ONNX models, made by hand or exported by torch, for the tests of ONNX Runtime."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

F32 = TensorProto.FLOAT


def weights(rng: np.random.Generator, name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(
        (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32), name
    )


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    constants: list[onnx.TensorProto] | None = None,
    domains: tuple[str, ...] = (),
) -> Path:
    graph = helper.make_graph(
        nodes, "small", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], constants
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(name, 1) for name in domains)]
    path.write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    )
    return path


def placed(node: onnx.NodeProto, *modules: str) -> onnx.NodeProto:
    """A node with the module path that torch's exporter writes beside it."""
    scopes = ["", *modules, node.output[0]]
    for name, value in (
        ("pkg.torch.onnx.name_scopes", scopes),
        ("pkg.torch.onnx.class_hierarchy", ["Model", *(m.title() for m in modules), "aten.op"]),
    ):
        node.metadata_props.add(key=name, value=repr(list(value)))
    return node


def gelu_mlp(path: Path, *, told: bool = False, rows: int | str = "rows") -> Path:
    """Two Linears with a GELU written out: ONNX Runtime makes two Gemm-like nodes and a Gelu."""
    rng = np.random.default_rng(0)
    make = helper.make_node
    nodes = [
        make("MatMul", ["x", "first.weight"], ["one"], "n0"),
        make("Add", ["one", "first.bias"], ["two"], "n1"),
        make("Div", ["two", "root2"], ["three"], "n2"),
        make("Erf", ["three"], ["four"], "n3"),
        make("Add", ["four", "unit"], ["five"], "n4"),
        make("Mul", ["two", "five"], ["six"], "n5"),
        make("Mul", ["six", "half"], ["seven"], "n6"),
        make("MatMul", ["seven", "second.weight"], ["eight"], "n7"),
        make("Add", ["eight", "second.bias"], ["y"], "n8"),
    ]
    if told:
        where = ["first"] * 2 + ["act"] * 5 + ["second"] * 2
        nodes = [placed(node, module) for node, module in zip(nodes, where, strict=True)]
    constants = [
        weights(rng, "first.weight", 8, 16),
        weights(rng, "first.bias", 16),
        weights(rng, "second.weight", 16, 8),
        weights(rng, "second.bias", 8),
        numpy_helper.from_array(np.float32(2**0.5), "root2"),
        numpy_helper.from_array(np.float32(1), "unit"),
        numpy_helper.from_array(np.float32(0.5), "half"),
    ]
    return write(
        path, nodes, [helper.make_tensor_value_info("x", F32, [rows, 8])], ["y"], constants
    )


def some_x(rows: int = 4, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)


class Block(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down: nn.Module | None = None
        if stride != 1:
            self.down = nn.Sequential(
                nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.down is None else self.down(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + around)


class ConvNet(nn.Module):
    """A residual network small enough for a test; channels that are no multiple of 16 too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(32)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.stages = nn.Sequential(Block(32, 32), Block(32, 40, 2))
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.pool(self.relu(self.bn(self.conv(x)))))
        return self.fc(self.drop(self.squeeze(x).flatten(1)))


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = ConvNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.2)
    return model.eval(), torch.randn(2, 3, 16, 16)


def small_llama() -> tuple[nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # equal weights would be one in the export
            weight.data.uniform_(0.5, 1.5)
    return model, torch.randint(0, 128, (1, 8))


def export(model: nn.Module, given: torch.Tensor, path: Path, *, dynamo: bool = True) -> Path:
    """What `torch.onnx.export` makes of a model, without its chatter."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        torch.onnx.export(
            model,
            (given,),
            str(path),
            dynamo=dynamo,
            **({"external_data": False, "verbose": False} if dynamo else {}),
        )
    return path


def anonymous(source: Path, path: Path) -> Path:
    """The same model without a trace of where it comes from: no metadata, no names."""
    model = onnx.load(str(source))
    ends = {one.name for one in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {}

    def other(name: str) -> str:
        return name if not name or name in ends else names.setdefault(name, f"v{len(names)}")

    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
        del node.metadata_props[:]
        node.input[:] = [other(name) for name in node.input]
        node.output[:] = [other(name) for name in node.output]
    for one in (*model.graph.initializer, *model.graph.value_info):
        one.name = other(one.name)
    path.write_bytes(model.SerializeToString())
    return path


def reweighted(source: Path, path: Path, which: str, change: Any) -> Path:
    """The same model with one weight changed.

    Args:
        which: The name of the weight, or of the value that the node makes which reads it.
        change: A function of the array.
    """
    model = onnx.load(str(source))
    for node in model.graph.node:
        if which in node.output:
            stored = {tensor.name for tensor in model.graph.initializer}
            which = next(name for name in node.input if name in stored)
    for tensor in model.graph.initializer:
        if tensor.name == which:
            changed = np.ascontiguousarray(change(numpy_helper.to_array(tensor)))
            tensor.CopyFrom(numpy_helper.from_array(changed, which))
            path.write_bytes(model.SerializeToString())
            return path
    raise AssertionError(f"no weight {which}")
