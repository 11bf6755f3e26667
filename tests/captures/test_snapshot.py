"""Every kind of tensor becomes bytes in C order, or a reason why not; never an exception."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from driftline.captures.torch.framework import capture
from driftline.captures.torch.tensors import (
    Refusal,
    Snapshot,
    every_nth,
    on_device,
    snapshot,
    undisturbed,
)
from driftline.runs.memory import MemorySink


def _take(tensor: torch.Tensor, **options: Any) -> Snapshot:
    with undisturbed():
        shot = snapshot(tensor, **options)
    assert isinstance(shot, Snapshot), shot
    return shot


def _reason(tensor: torch.Tensor) -> str:
    with undisturbed():
        shot = snapshot(tensor)
    assert isinstance(shot, Refusal)
    return shot.reason


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_every_dtype_are_those_in_memory(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    raw = torch.arange(6 * width, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).reshape(2, 3)
    shot = _take(tensor)
    assert (shot.dtype, shot.shape, shot.elements) == (str(dtype).removeprefix("torch."), (2, 3), 6)
    assert shot.data is not None and shot.data.tobytes() == raw.numpy().tobytes()
    turned = _take(tensor.t())
    assert turned.shape == (3, 2)
    expected = raw.numpy().reshape(2, 3, width).transpose(1, 0, 2)
    assert turned.data is not None and turned.data.tobytes() == expected.tobytes()


def test_packed_four_bit_floats_count_elements_not_bytes() -> None:
    raw = torch.tensor([[0x21, 0x43], [0x65, 0x07]], dtype=torch.uint8)
    shot = _take(raw.view(torch.float4_e2m1fn_x2))
    assert (shot.dtype, shot.shape, shot.elements) == ("float4_e2m1fn_x2", (2, 4), 8)
    assert every_nth(shot, 3).tolist() == [0x41, 0x07]


def test_small_integers_that_fill_a_byte_are_stored_as_bytes() -> None:
    shot = _take(torch.arange(4, dtype=torch.uint8).view(torch.uint4))
    assert (shot.dtype, shot.shape) == ("uint8", (4,))


def test_views_scalars_and_empty_tensors_have_their_logical_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    _warm_up()
    cases = {
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "strided": torch.arange(12.0).reshape(3, 4)[::2, 1::2],
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.ones(2)),
        "inference": _made_in_inference_mode(),
        "graph": torch.ones(3, requires_grad=True) * 2,
    }
    for name, tensor in cases.items():
        shot = _take(tensor)
        plain = tensor.detach().clone().resolve_conj().resolve_neg().contiguous().numpy()
        assert shot.shape == tuple(tensor.shape), name
        assert shot.data is not None and shot.data.tobytes() == plain.tobytes(), name
    assert cases["graph"].requires_grad


@pytest.mark.parametrize("name", ["conjugate", "negative"])
def test_what_a_device_reads_are_the_values_of_a_view_that_changes_signs(name: str) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    view = z.conj() if name == "conjugate" else z.conj().imag
    assert (view.is_conj(), view.is_neg()) == (name == "conjugate", name == "negative")
    shot = on_device(view)
    assert isinstance(shot, Snapshot) and shot.owner is not None
    assert not shot.owner.is_conj() and not shot.owner.is_neg()
    assert torch.equal(shot.owner, view)


def _warm_up() -> None:
    """Ordinary tensors of a known dtype go a shorter way: what is not ordinary must not."""
    for dtype in (torch.float32, torch.complex64):
        _take(torch.ones(2, dtype=dtype))


def _made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3) * 2


def test_a_contiguous_host_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    shot = _take(tensor)
    tensor.add_(1)
    assert shot.data is not None and shot.data.view(np.float32).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("bits1x8", "uint8"),
        ("bits2x4", "uint8"),
        ("bits4x2", "uint8"),
        ("bits8", "uint8"),
        ("bits16", "uint16"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_bits_without_a_meaning_are_stored_as_unsigned(dtype, stored, turned) -> None:
    signed = torch.arange(6, dtype=getattr(torch, stored.removeprefix("u"))).reshape(2, 3)
    plain = signed.view(getattr(torch, stored))
    plain = plain.t() if turned else plain
    shot = _take(plain.view(getattr(torch, dtype)))
    assert shot.dtype == stored and shot.shape == tuple(plain.shape)
    assert shot.data is not None
    assert bytes(shot.data) == plain.contiguous().numpy().tobytes()


def test_zeros_without_memory_are_stored_as_zeros() -> None:
    shot = _take(torch._efficientzerotensor((2, 3)))
    assert shot.dtype == "float32" and shot.shape == (2, 3)
    assert shot.data is not None and bytes(shot.data) == bytes(24)


def test_what_has_no_plain_values_is_refused_with_a_reason() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    _warm_up()
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    cases = {
        "sparse_coo": torch.eye(2).to_sparse(),
        "sparse_csr": torch.eye(2).to_sparse_csr(),
        "meta": torch.ones(2, device="meta"),
        "quantised": quantised,
        "FakeTensor": fake,
        "freed": freed,
        "lazy": nn.LazyLinear(2).weight,
        "a nested tensor": torch.nested.nested_tensor([torch.ones(2)]),
        "NestedTensor": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    }
    for word, tensor in cases.items():
        assert word in _reason(tensor)
    assert _take(torch.ones(2, device="meta"), values=False).shape == (2,)


def test_plain_subclasses_are_stored() -> None:
    class Labelled(torch.Tensor):
        pass

    shot = _take(torch.ones(2).as_subclass(Labelled))
    assert shot.data is not None and shot.data.view(np.float32).tolist() == [1, 1]


def test_refusals_become_one_event_each_and_the_program_goes_on() -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    model, sink = nn.Sequential(Sparse()), MemorySink()
    with capture(model, sink):
        for _ in range(3):
            model(torch.eye(2))
    told = [e for e in sink._events if e["kind"] == "refused"]
    assert [e["details"]["site"] for e in told] == ["0", "(root)"]
    assert "sparse_coo" in told[0]["message"]
    assert len([r for r in sink.run().records if r.key.port == "input"]) == 6


def test_inside_vmap_nothing_is_stored_and_nothing_changes() -> None:
    model = nn.Linear(3, 3)
    data = torch.randn(4, 3)
    plain = torch.func.vmap(model)(data)
    sink = MemorySink()
    with capture(model, sink):
        seen = torch.func.vmap(model)(data)
    assert torch.equal(plain, seen)
    assert "torch.func" in sink._events[0]["message"]


def test_tracing_and_export_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    x = torch.ones(1, 3)
    plain = str(torch.jit.trace(model, x).graph.copy())
    sink = MemorySink()
    with capture(model, sink):
        seen = str(torch.jit.trace(model, x).graph.copy())
        exported = torch.export.export(model, (x,))
    import re

    strip = re.compile(r"___torch_mangle_\d+\.|, scope.*|\d+")
    assert strip.sub("", plain) == strip.sub("", seen)
    assert torch.equal(exported.module()(x), model(x))


def test_scripted_modules_are_captured_like_any_other() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    plain = model(torch.ones(1, 3))
    sink = MemorySink()
    with capture(model, sink):
        seen = model(torch.ones(1, 3))
    assert torch.equal(plain, seen)
    assert {r.key.site for r in sink.run().records} == {"(root)"}
    assert not [e for e in sink._events if e["kind"] == "capture-fault"]


def test_a_sample_keeps_every_nth_element_and_a_description_none() -> None:
    model = nn.Identity()
    kept: dict[str, Any] = {}
    for keep in ("sample(4)", "describe", "digest", "summary"):
        sink = MemorySink()
        with capture(model, sink, keep=keep, ports="output"):
            model(torch.arange(10.0))
        kept[keep] = next(iter(sink.run().tensors()))
    assert kept["sample(4)"].record.sample_stride == 3
    assert kept["sample(4)"].raw().view(np.float32).tolist() == [0, 3, 6, 9]
    assert kept["describe"].record.digest == "" and kept["describe"].record.shape == (10,)
    assert kept["digest"].record.digest and kept["digest"].record.blob is None
    assert kept["summary"].record.summary.max == 9


def test_device_meshes_give_their_local_part_and_say_how_it_lies(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        shot = _take(tensor)
    finally:
        dist.destroy_process_group()
    assert shot.shape == (4, 2)
    assert "Shard" in shot.placement or "S(0)" in shot.placement
