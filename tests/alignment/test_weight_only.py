"""Weights stored as integers, in a model that computes with floats: what is named, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.comparison.table.table import Table
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run


class Codes(torch.Tensor):
    """A weight as torchao holds it: integers, scales and zero points behind a float's interface."""

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> Any:
        del scale, zero_point
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.float32)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> None:
        self.qdata, self.scale, self.zero_point = qdata, scale, zero_point
        self.target_dtype = torch.uint8

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale", "zero_point"], None

    def numbers(self) -> torch.Tensor:
        size = self.qdata.shape[1] // self.scale.shape[1]
        zero, scale = (part.repeat_interleave(size, 1) for part in (self.zero_point, self.scale))
        return (self.qdata.float() - zero.float()) * scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.numbers() if isinstance(a, Codes) else a for a in args]
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*plain, **(kwargs or {}))


class KernelCodes(torch.Tensor):
    """A weight of four bits as torchao's `Int4OpaqueTensor` holds it, in the CPU kernel's order."""

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale_and_zero: torch.Tensor) -> Any:
        shape = (qdata.shape[0], 2 * qdata.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, qdata: torch.Tensor, scale_and_zero: torch.Tensor) -> None:
        self.qdata, self.scale_and_zero = qdata, scale_and_zero

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale_and_zero"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = args
            group = 2 * weight.qdata.shape[1] // weight.scale_and_zero.shape[0]
            result = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, weight.qdata, group, weight.scale_and_zero
            )
            return result + bias
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return args[0]


def rounded(
    weight: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zero points of a weight [out, in], a scale for each group of inputs."""
    blocks = weight.reshape(weight.shape[0], -1, group)
    low, high = blocks.amin(-1), blocks.amax(-1)
    scale = (high - low) / (2**bits - 1)
    zero = torch.round(-low / scale)
    codes = torch.round(blocks / scale[..., None] + zero[..., None]).clamp(0, 2**bits - 1)
    return codes.reshape(weight.shape).to(torch.int32), scale, zero.to(torch.int32)


AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def packed(
    codes: torch.Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """Eight codes of four bits to a word, along an axis."""
    turned = codes.movedim(axis, -1).reshape(*codes.movedim(axis, -1).shape[:-1], -1, 8)
    words = torch.zeros(turned.shape[:-1], dtype=torch.int64)
    for index, place in enumerate(order):
        words |= turned[..., index].long() << (4 * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


class PackedLinear(nn.Module):
    """A layer as GPTQ or AWQ packs it; it computes with what its buffers stand for."""

    def __init__(self, linear: nn.Linear, way: str) -> None:
        super().__init__()
        codes, scale, zero = rounded(linear.weight.data, 4, 16)
        self.bias = linear.bias
        self.way = way
        self.codes = codes
        stored = codes.T.contiguous()  # [in, out]
        zeros = zero.T.contiguous()
        if way == "gptq":
            self.register_buffer("qweight", packed(stored, 0))
            self.register_buffer("qzeros", packed(zeros - 1, 1))
        else:
            self.register_buffer("qweight", packed(stored, 1, AWQ))
            self.register_buffer("qzeros", packed(zeros, 1, AWQ))
        self.register_buffer("scales", scale.T.contiguous())

    def zeros(self) -> torch.Tensor:
        order = AWQ if self.way == "awq" else tuple(range(8))
        words = self.qzeros.long() & 0xFFFFFFFF
        parts = [(words >> (4 * place)) & 15 for place in order]
        plain = torch.stack(parts, -1).reshape(words.shape[0], -1)
        return plain + 1 if self.way == "gptq" else plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.codes.shape[1] // self.scales.shape[0]
        scale = self.scales.repeat_interleave(size, 0)
        zero = self.zeros().repeat_interleave(size, 0)
        return x @ ((self.codes.T - zero) * scale) + self.bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def run_of(model: nn.Module, levels: str = "modules,params") -> Run:
    sink = MemorySink()
    given = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), driftline.capture(model, sink, levels=levels.split(",")):
        model(given)
    return sink.run()


def quantised(way: str, fault: str = "") -> Net:
    model = net()
    for number, layer in enumerate(model.layers):
        is_wrong = number == 2
        if way == "kernel":
            codes, scale, zero = rounded(layer.weight.data, 4, 32)
            if is_wrong and fault == "scale":
                scale = scale * 2
            if is_wrong and fault == "zero":
                zero = zero + 1
            words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            pairs = torch.stack([scale.t(), ((8 - zero) * scale).t()], -1).contiguous()
            layer.weight = nn.Parameter(KernelCodes(words, pairs), requires_grad=False)
            continue
        if way in ("int8", "int4"):
            codes, scale, zero = rounded(layer.weight.data, 8 if way == "int8" else 4, 64)
            if is_wrong and fault == "scale":
                scale = scale * 2
            if is_wrong and fault == "zero":
                zero = zero + 1
            held = Codes(codes.to(torch.uint8), scale, zero)
            held.target_dtype = torch.uint8 if way == "int8" else torch.uint4
            layer.weight = nn.Parameter(held, requires_grad=False)
            continue
        model.layers[number] = changed = PackedLinear(layer, way)
        if is_wrong and fault == "scale":
            changed.scales *= 2
        if is_wrong and fault == "zero":
            changed.qzeros += 0x11111111  # each of the eight in a word
    return model


@pytest.mark.parametrize("way", ["int8", "int4", "gptq", "awq", "kernel"])
def test_weights_of_integers_are_compared_as_matrices_and_pass(way: str) -> None:
    table = driftline.compare(run_of(net()), run_of(quantised(way)))
    assert table.verdict == "pass", table.finding
    weights = {row.key.site: row for row in table.rows if row.key.slot == "weight"}
    assert len(weights) == 4
    assert all("dequantise" in row.candidate_recipe for row in weights.values())
    # What rounding to nearest is, by the scales: the limit is two and a half times as much.
    assert all(0.3 < row.severity < 0.5 for row in weights.values())


@pytest.mark.parametrize("way", ["int8", "int4", "gptq", "awq", "kernel"])
@pytest.mark.parametrize("fault", ["scale", "zero"])
def test_a_wrong_scale_or_zero_point_is_named_at_its_module(way: str, fault: str) -> None:
    table: Table = driftline.compare(run_of(net()), run_of(quantised(way, fault)))
    assert table.verdict == "fail", table.finding
    assert table.first_site == "layers.2", table.finding
    assert "the parameter 'weight' of 'layers.2'" in table.finding


@pytest.mark.parametrize("way", ["int8", "int4", "gptq", "awq"])
@pytest.mark.parametrize("fault", ["scale", "zero"])
def test_one_wrong_column_is_not_hidden_by_its_weight(way: str, fault: str) -> None:
    model = quantised(way)
    layer = model.layers[2]
    if way in ("int8", "int4"):
        weight: Any = layer.weight
        if fault == "scale":
            weight.scale[5] *= 2
        else:
            weight.zero_point[5] += 1
    elif fault == "scale":
        layer.scales[:, 5] *= 2
    else:
        layer.qzeros[:, 0] += 1 << 4
    table = driftline.compare(run_of(net()), run_of(model))
    assert table.verdict == "fail", table.finding
    assert table.first_site == "layers.2", table.finding


@pytest.mark.parametrize("way", ["gptq", "awq"])
@pytest.mark.parametrize("fault", ["scale", "zero"])
def test_a_wrong_scale_or_zero_point_of_a_single_group_is_named_with_its_weights(
    way: str, fault: str
) -> None:
    model = quantised(way)
    layer = model.layers[2]
    if fault == "scale":
        layer.scales[1, 8] *= 2
    else:
        layer.qzeros[1, 1] += 1  # the lowest four bits: of output 8 in either order
    table = driftline.compare(run_of(net()), run_of(model))
    assert table.verdict == "fail", table.finding
    assert table.first_site == "layers.2", table.finding
    assert "(output 8, inputs 16 to 31)" in table.finding


@pytest.mark.parametrize("group", [16, 32, 64])
def test_a_wrong_zero_point_of_a_group_of_torchao_is_named_with_its_weights(group: int) -> None:
    model = net()
    for layer in model.layers:
        codes, scale, zero = rounded(layer.weight.data, 4, group)
        layer.weight = nn.Parameter(Codes(codes, scale, zero), requires_grad=False)
    weight: Any = model.layers[1].weight
    weight.zero_point[7, 0] += 1
    table = driftline.compare(run_of(net()), run_of(model))
    assert table.first_site == "layers.1", table.finding
    assert f"(output 7, inputs 0 to {group - 1})" in table.finding


def test_codes_of_one_input_that_are_wrong_are_named_with_it() -> None:
    model = quantised("gptq")
    model.layers[2].qweight[1] ^= 0xF << 12  # eight inputs to a word
    table = driftline.compare(run_of(net()), run_of(model))
    assert table.first_site == "layers.2", table.finding
    assert "(outputs 0 to 63, input 11)" in table.finding


def moved(weight: torch.Tensor, inputs: torch.Tensor, group: int) -> torch.Tensor:
    """A weight [out, in] after GPTQ: each input's rounding is made up for by those behind it."""
    moments = inputs.T @ inputs / len(inputs)
    moments += 0.01 * moments.diagonal().mean() * torch.eye(len(moments))
    upper = torch.linalg.cholesky(torch.linalg.inv(moments), upper=True)
    left = weight.clone()
    for place in range(weight.shape[1]):
        if place % group == 0:
            _, scale, zero = rounded(left[:, place : place + group], 4, group)
        codes = (left[:, place, None] / scale + zero).round().clamp(0, 15)
        numbers = ((codes - zero) * scale)[:, 0]
        error = (left[:, place] - numbers) / upper[place, place]
        left[:, place:] -= error[:, None] * upper[place, place:]
        left[:, place] = numbers
    return left


def test_weights_that_were_moved_to_make_up_for_rounding_pass() -> None:
    reference = net()
    model = net()
    generator = torch.Generator().manual_seed(2)
    shared = torch.randn(8, 64, generator=generator)
    inputs = torch.randn(500, 8, generator=generator) @ shared
    inputs += 0.5 * torch.randn(500, 64, generator=generator)
    for number, layer in enumerate(model.layers):
        near = moved(layer.weight.data, inputs, 16)
        layer.weight.data = near
        # Rounded once more, to the grid on which it lies: what is packed is what was moved.
        model.layers[number] = PackedLinear(layer, "gptq")
    table = driftline.compare(run_of(reference), run_of(model))
    weights = [row for row in table.rows if row.key.slot == "weight"]
    assert [row.status for row in weights] == ["pass"] * 4
    assert all(1.0 < row.metrics["worst_scale"] < 2.5 for row in weights)


class FloatCodes(torch.Tensor):
    """A weight as torchao's `Float8Tensor` holds it: small floats and a scale for every output."""

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        del scale
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.float32)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = [a.qdata.float() * a.scale if isinstance(a, FloatCodes) else a for a in args]
        return func(*plain, **(kwargs or {}))


def small_floats(dtype: torch.dtype) -> Net:
    model = net()
    for layer in model.layers:
        scale = layer.weight.data.abs().amax(1, keepdim=True) / torch.finfo(dtype).max
        codes = (layer.weight.data / scale).to(dtype)
        layer.weight = nn.Parameter(FloatCodes(codes, scale), requires_grad=False)
    return model


FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("levels", ["modules", "modules,params"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_small_floats_pass(dtype: torch.dtype, levels: str) -> None:
    table = driftline.compare(run_of(net(), levels), run_of(small_floats(dtype), levels))
    assert table.verdict == "pass", table.finding
    # The least that says it: what rounding to the format does, with the allowance of all formats.
    allowed = 4 * torch.finfo(dtype).eps / 2 / 3**0.5
    outputs = [row for row in table.rows if row.key.port == "output" and row.compared]
    assert all(row.limit is not None and row.limit <= 1.001 * allowed for row in outputs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [2.0, 1.5])
def test_one_wrong_scale_of_small_floats_is_named_with_its_weights(
    dtype: torch.dtype, factor: float
) -> None:
    model = small_floats(dtype)
    weight: Any = model.layers[2].weight
    weight.scale[5] *= factor
    table = driftline.compare(run_of(net()), run_of(model))
    assert table.verdict == "fail", table.finding
    assert table.first_site == "layers.2", table.finding
    assert "(output 5, inputs 0 to 63)" in table.finding


@pytest.mark.parametrize("way", ["int8", "int4", "kernel"])
def test_without_weights_a_sound_model_passes_and_a_note_names_the_level_that_sees_them(
    way: str,
) -> None:
    table = driftline.compare(run_of(net(), "modules"), run_of(quantised(way), "modules"))
    assert table.verdict == "pass", table.finding
    assert any("--level modules,params" in note for note in table.notes)
    table = driftline.compare(run_of(net()), run_of(quantised(way)))
    assert not any("--level modules,params" in note for note in table.notes)


@pytest.mark.parametrize("way", ["int8", "int4"])
def test_without_weights_a_scale_that_is_off_by_two_is_named(way: str) -> None:
    candidate = run_of(quantised(way, "scale"), "modules")
    table = driftline.compare(run_of(net(), "modules"), candidate)
    assert table.verdict == "fail"
    assert table.first_site == "layers.2", table.finding
