"""Dumps of one small model by two programs: as torch modules, and as ATB operations.

    model = toy_decoder(layers=12)
    torch_twin(folder / "torch", model, prompt)                     # an `ait` torch dump
    atb_twin(folder / "atb", model, prompt)                         # the same model as ATB dump
    atb_twin(folder / "bad", model, prompt, error=Error(layer=7))   # wrong from one operation on
    atb_twin(folder / "int8", model, prompt, quantised=True)        # int8 matrices with scales

The ATB side is computed separately, in numpy and in its own precision, from the model's weights. It
can fuse the projections, answer a prompt token by token (`then`), run once before that to warm up,
and have an operation that the topology does not know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from support.atb import AtbDump, Generation, Operation, Value
from support.atb_files import AnyArray, Keep
from support.toy_decoder import Cache, ToyDecoder, toy_decoder

__all__ = ["Error", "atb_twin", "torch_twin", "toy_decoder"]


class Error(NamedTuple):
    """A planted fault: the output of one operation of one layer is multiplied.

    Attributes:
        layer: Index of the layer, from 0.
        kind: Type of the operation.
        nth: Index among the operations of that type in the layer.
        factor: The factor.
    """

    layer: int
    kind: str = "LinearOperation"
    nth: int = 0
    factor: float = 1.25


def torch_twin(
    folder: Path,
    model: nn.Module,
    prompt: AnyArray,
    *,
    then: Sequence[int] = (),
    pid: int = 4300,
    root: str = "ait_dump",
) -> Path:
    """Write the dump of the torch hooks of `ait` for a prompt and the tokens after it.

    Returns:
        The dump's root.
    """
    base = folder / root / "torch_tensors" / f"cpu_{pid}"
    modules = list[tuple[str, nn.Module]](cast(Any, model).named_modules())
    names = {module: f"root.{name}" if name else "root" for name, module in modules}
    token = 0

    def save(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        place = base / str(token) / names[module]
        place.mkdir(parents=True, exist_ok=True)
        for index, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                torch.save(value.detach().clone(), place / f"input_{index}.pth")
        torch.save(output.detach().clone(), place / "output.pth")

    hooks = [cast(Any, module).register_forward_hook(save) for module in names]
    cache: Cache = []
    try:
        with torch.no_grad():
            for token, tokens in enumerate(_rounds(prompt, then)):  # noqa: B007 - `save` reads it
                model(cast(Any, torch).from_numpy(tokens), cache)
    finally:
        for hook in hooks:
            hook.remove()
    (base / "model_tree.json").write_text(json.dumps(_tree("root", model)))
    return folder / root


def _tree(name: str, module: nn.Module) -> dict[str, Any]:
    children = [_tree(f"{name}.{key}", child) for key, child in module.named_children()]
    return {"name": name, "type": type(module).__name__, "children": children}


def _rounds(prompt: AnyArray, then: Sequence[int]) -> list[AnyArray]:
    rows = np.atleast_2d(prompt).astype(np.int64)
    return [rows, *(np.full((len(rows), 1), token, np.int64) for token in then)]


def atb_twin(
    folder: Path,
    model: ToyDecoder,
    prompt: AnyArray,
    *,
    then: Sequence[int] = (),
    generation: Generation = "G3",
    dtype: Any = np.float16,
    quantised: bool = False,
    packed: bool = False,
    scaled: str = "parameter",
    fused: bool = False,
    flat: bool = False,
    order: str = "qkv",
    swapped: bool = False,
    turned: bool = False,
    warm_up: bool = False,
    error: Error | None = None,
    extra_operation: bool = False,
    time: int = 3,
    keep: Keep = "data",
    device: int = 0,
    pid: int = 4242,
    stamp: str = "20240701_120000",
) -> AtbDump:
    """Write the dump of an ATB program that computes the same model.

    Args:
        folder: The output folder.
        model: The model whose weights are used.
        prompt: Token ids, one sequence or a batch of them.
        then: Tokens that follow; each is one execution of a second graph.
        generation: The generation of the probe.
        dtype: The number format of the computation.
        quantised: Use int8 matrices, with their scales as further inputs.
        packed: Store those scales as words of 64 bits with a float32 in the low half.
        scaled: Where the input's scale is: the `parameter` of the operator that quantises, an
            `input` of it (its parameter then has the default), or, with a scale per `token`, an
            output of it.
        fused: Use one matrix for q, k and v and one for gate and up, followed by a split.
        flat: Put all tokens on one axis, as ATB models do.
        order: Order of an attention's projections, in execution and in a fused matrix.
        swapped: Plant a fault: exchange the matrices of q and k.
        turned: Store matrices as [in, out], which the parameters say.
        warm_up: Run both graphs once before, with other tokens, as execution 0.
        error: A fault to plant.
        extra_operation: Add an operation before all others that the model file does not know.
        time: When tensors are captured; see `AtbDump`.
        keep: Values, descriptions or statistics.
        device: Device number.
        pid: Process id.
        stamp: Time in the name of the root folder.
    """
    dump = AtbDump(folder, generation, device, pid, stamp, time, keep)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    program = _Program(weights, np.dtype(dtype), quantised, fused, flat, error, order)
    program.packed = packed
    program.scaled = scaled
    program.turned = turned
    if swapped:
        program.swap("q_proj", "k_proj")
    first = 0
    if extra_operation:
        plain = np.zeros((2, 2), dtype)
        dump.execute([Operation("TransdataOperation", [Value("t", plain)], [Value("u", plain)])])
        first = 1
    rounds = [(int(number > 0), tokens) for number, tokens in enumerate(_rounds(prompt, then))]
    per_graph = len(model.layers) + 3
    counts = [0, 0]
    named: set[int] = set()
    if warm_up:
        rounds = [*((graph, np.zeros_like(tokens)) for graph, tokens in rounds[:2]), *rounds]
    for graph, tokens in rounds:
        if graph == 0:
            program.cache.clear()
        operations = program.execute(tokens)
        at = first + graph * per_graph
        dump.execute(operations, counts[graph], at)
        if generation != "G4":
            dump.operation_csv(operations, counts[graph], at)
        if graph not in named:
            named.add(graph)
            name = ("ToyModel_prefill", "ToyModel_decode")[graph] if then else "ToyModel"
            dump.topology(name, operations, at, weights=program.weight_names, first_node=at - first)
        counts[graph] += 1
    return dump


@dataclass
class _Program:
    """The same decoder, operation by operation, in numpy."""

    weights: dict[str, AnyArray]
    dtype: np.dtype[Any]
    quantised: bool
    fused: bool
    flat: bool
    error: Error | None
    order: str = "qkv"
    packed: bool = False
    scaled: str = "parameter"
    turned: bool = False
    cache: dict[int, tuple[AnyArray, AnyArray]] = field(
        default_factory=dict[int, tuple[AnyArray, AnyArray]]
    )
    weight_names: list[str] = field(default_factory=list[str])
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _layer: int = -1
    _shape: tuple[int, ...] = ()

    def swap(self, one: str, other: str) -> None:
        """Exchange the weights of all projections of two names."""
        for name in [name for name in self.weights if one in name]:
            twin = name.replace(one, other)
            self.weights[name], self.weights[twin] = self.weights[twin], self.weights[name]

    def execute(self, tokens: AnyArray) -> list[Operation]:
        """The outermost operations of one execution."""
        self._shape = tokens.shape
        ids = Value("tokens", tokens.reshape(-1) if self.flat else tokens)
        table = self._weight("embed_tokens.weight")
        x = self._value("embedded", table.values[ids.values])
        operations = [Operation("WordEmbedding", [table, ids], [x])]
        layers = sum(name.endswith("q_proj.weight") for name in self.weights)
        for layer in range(layers):
            operation, x = self._one_layer(layer, x)
            operations.append(operation)
        self._layer = -1
        leaves: list[Operation] = []
        normed = self._norm(leaves, "norm", x)
        head = self._linear(leaves, "lm_head", normed)
        del head
        return [*operations, leaves[0], _around("LmHead", leaves[1:])]

    def _one_layer(self, layer: int, x: Value) -> tuple[Operation, Value]:
        self._layer = layer
        self._counts.clear()
        name = f"layers.{layer}"
        leaves: list[Operation] = []
        normed = self._norm(leaves, f"{name}.input_layernorm", x)
        parts = self._projected(leaves, f"{name}.self_attn", self.order, normed)
        q, k, v = (parts[self.order.index(part)] for part in "qkv")
        mixed = self._attend(leaves, layer, q, k, v)
        out = self._linear(leaves, f"{name}.self_attn.o_proj", mixed)
        x = self._sum(leaves, x, out)
        normed = self._norm(leaves, f"{name}.post_attention_layernorm", x)
        gate, up = self._projected(leaves, f"{name}.mlp", ("gate", "up"), normed)
        wide = gate.values.astype(np.float32)
        active = self._emit(
            leaves, "ActivationOperation", [gate], wide / (1 + np.exp(-wide)), {"activationType": 1}
        )
        product = self._emit(
            leaves, "ElewiseOperation", [active, up], active.values * up.values, {"elewiseType": 9}
        )
        x = self._sum(leaves, x, self._linear(leaves, f"{name}.mlp.down_proj", product))
        return _around("Decoder_layer", leaves), x

    def _projected(
        self, leaves: list[Operation], base: str, parts: Sequence[str], x: Value
    ) -> list[Value]:
        names = [f"{base}.{part}_proj" for part in parts]
        if not self.fused:
            return [self._linear(leaves, name, x) for name in names]
        joined = f"{base}.{''.join(parts)}"
        self.weights[f"{joined}.weight"] = np.concatenate(
            [self.weights[f"{name}.weight"] for name in names]
        )
        whole = self._linear(leaves, joined, x)
        pieces = np.split(whole.values, len(parts), axis=-1)
        outputs = [self._value(f"{joined}.{n}", piece) for n, piece in enumerate(pieces)]
        param = {"splitDim": -1, "splitNum": len(parts)}
        leaves.append(Operation("SplitOperation", [whole], outputs, param))
        return outputs

    def _linear(self, leaves: list[Operation], name: str, x: Value) -> Value:
        weight = self._weight(f"{name}.weight")
        matrix = self.weights[f"{name}.weight"].astype(np.float32)
        wide = x.values.astype(np.float32)
        if not self.quantised or self._layer < 0:
            rounded = weight.values.astype(np.float32)
            weight = self._lying(weight)
            param = {"hasBias": False, "transposeA": False, "transposeB": not self.turned}
            return self._emit(leaves, "LinearOperation", [x, weight], wide @ rounded.T, param)
        coded, scale, more = self._coded(leaves, name, x)
        steps = np.abs(matrix).max(1) / 127
        codes = Value(f"{name}.weight.int8", np.rint(matrix / steps[:, None]).astype(np.int8))
        product = (steps if more else steps * scale).astype(np.float32)
        stored = product.view(np.uint32).astype(np.uint64) if self.packed else product
        scales = Value(f"{name}.scale", stored)
        self.weight_names += [codes.name, scales.name]
        result = coded.values.astype(np.float32) @ codes.values.T.astype(np.float32)
        return self._emit(
            leaves,
            "LinearOperation",
            [coded, self._lying(codes), scales, *more],
            result * product * (scale if more else 1),
            {"hasBias": False, "outDataType": 1, "transposeB": not self.turned},
        )

    def _lying(self, matrix: Value) -> Value:
        if not self.turned:
            return matrix
        return Value(matrix.name, np.ascontiguousarray(matrix.values.T))

    def _coded(
        self, leaves: list[Operation], name: str, x: Value
    ) -> tuple[Value, AnyArray, list[Value]]:
        """The codes of an input, their scale, and further inputs of the product with them."""
        wide = x.values.astype(np.float32)
        largest = np.abs(wide).max(-1, keepdims=True) if self.scaled == "token" else abs(wide).max()
        scale = np.asarray(largest / np.float32(127) + np.float32(1e-12))
        small = np.clip(np.rint(wide / scale), -127, 127).astype(np.int8)
        coded = Value(f"{name}.int8", small)
        said = float(scale.reshape(-1)[0]) if self.scaled == "parameter" else 1.0
        inputs, outputs, kind = [x], [coded], 6
        if self.scaled == "input":
            inputs += [
                Value(f"{name}.input_scale", scale.reshape(1)),
                Value(f"{name}.input_offset", np.zeros(1, np.int8)),
            ]
            self.weight_names += [value.name for value in inputs[1:]]
            kind = 17
        if self.scaled == "token":
            outputs.append(Value(f"{name}.token_scale", scale[..., 0]))
            kind = 19
        param = {"elewiseType": kind, "quantParam": {"inputScale": said, "inputOffset": 0}}
        leaves.append(Operation("ElewiseOperation", inputs, outputs, param))
        return coded, scale, outputs[1:]

    def _norm(self, leaves: list[Operation], name: str, x: Value) -> Value:
        weight = self._weight(f"{name}.weight")
        wide = x.values.astype(np.float32)
        scale = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        param = {"layerType": 1, "normParam": {"epsilon": 1e-05, "quantType": 0}}
        return self._emit(
            leaves, "RmsNormOperation", [x, weight], wide * scale * weight.values, param
        )

    def _attend(self, leaves: list[Operation], layer: int, q: Value, k: Value, v: Value) -> Value:
        batch, length = self._shape
        query, keys, values = (
            value.values.astype(np.float32).reshape(batch, length, -1) for value in (q, k, v)
        )
        if layer in self.cache:
            before = self.cache[layer]
            keys = np.concatenate((before[0], keys), 1)
            values = np.concatenate((before[1], values), 1)
        self.cache[layer] = (keys, values)
        scores = query @ keys.swapaxes(1, 2) / query.shape[-1] ** 0.5
        seen = np.tri(length, keys.shape[1], keys.shape[1] - length)
        scores = np.where(seen == 0, -1e4, scores)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (share / share.sum(-1, keepdims=True)) @ values
        shaped = mixed.reshape(q.values.shape)
        return self._emit(leaves, "SelfAttentionOperation", [q, k, v], shaped, {"headNum": 1})

    def _sum(self, leaves: list[Operation], a: Value, b: Value) -> Value:
        return self._emit(
            leaves, "ElewiseOperation", [a, b], a.values + b.values, {"elewiseType": 8}
        )

    def _emit(
        self,
        leaves: list[Operation],
        kind: str,
        inputs: Sequence[Value],
        result: AnyArray,
        param: dict[str, Any],
    ) -> Value:
        nth = self._counts.get(kind, 0)
        self._counts[kind] = nth + 1
        wrong = self.error
        if wrong is not None and wrong[:3] == (self._layer, kind, nth):
            result = result * wrong.factor
        output = self._value(f"{self._layer}.{kind}.{nth}", result)
        leaves.append(Operation(kind, inputs, [output], param))
        return output

    def _value(self, name: str, values: AnyArray) -> Value:
        return Value(name, np.ascontiguousarray(values).astype(self.dtype))

    def _weight(self, name: str) -> Value:
        if name not in self.weight_names:
            self.weight_names.append(name)
        return self._value(name, self.weights[name])


def _around(kind: str, leaves: Sequence[Operation]) -> Operation:
    """A container; its inputs are the leaves' inputs from outside, its outputs the last leaf's."""
    made = {value.name for leaf in leaves for value in leaf.outputs}
    inputs: dict[str, Value] = {}
    for leaf in leaves:
        for value in leaf.inputs:
            if value.name not in made:
                inputs.setdefault(value.name, value)
    return Operation(kind, list(inputs.values()), leaves[-1].outputs, None, list(leaves))
