"""A torch tensor as host bytes: without a copy where possible, refused with a reason otherwise.

The snapshot of a plain host tensor is a window on live memory: it must be read, or copied, before
the program goes on. Nothing here touches autograd, random state or the program's dispatch modes;
callers hold `undisturbed()` around a group of snapshots. Knows nothing of names and sinks.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from driftline.captures.recorder import Pending, Refusal, Snapshot, every_nth
from driftline.captures.torch.distributed import (
    is_awaited,
    is_distributed,
    placement_of,
    placement_of_plain,
    when_there,
)
from driftline.numerics.dtypes import DTYPES

__all__ = [
    "Pending",
    "Refusal",
    "Snapshot",
    "dtype_name",
    "every_nth",
    "is_zero",
    "snapshot",
    "undisturbed",
]

_NAMES: dict[torch.dtype, str] = {}
"""torch dtype to our name, filled as dtypes are met; an empty name is a refusal."""

_SIMPLE: dict[torch.dtype, tuple[str, int]] = {}
"""Name and bytes per element of the dtypes met; those whose elements torch counts as we do."""

LARGEST_EXPANSION = 256 << 20
"""Bytes up to which a view that repeats its elements (`expand`) is written out like any tensor. A
larger one is summarised from its elements: a mask of 10^6 x 10^6 would take 4 TB."""
_CPU = "cpu"
_STRIDED = torch.strided
_is_functional: Callable[[torch.Tensor], bool] = torch.__dict__["_is_functional_tensor"]
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_NoFunction: Any = torch._C.DisableTorchFunction
_NoDispatch: Any = torch._C._DisableTorchDispatch
is_zero: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is zeros without memory, as tangents and second derivatives have them."""
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_set_grad: Callable[[bool], None] = torch._C._set_grad_enabled
# Subclasses may run code of their own when they are asked anything.
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_NOTHING = -1
recording: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class undisturbed:
    """Hide what happens inside from the program's modes and from autograd."""

    __slots__ = ("_dispatch", "_function", "_grad")

    def __enter__(self) -> None:
        self._function = _NoFunction()
        self._function.__enter__()
        self._dispatch = _NoDispatch()
        self._dispatch.__enter__()
        # The cheaper query first: grad mode is off in inference, and then nothing is to be
        # restored.
        self._grad = _grad_enabled()
        if self._grad:
            _set_grad(False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._grad:
            _set_grad(True)
        self._dispatch.__exit__(kind, error, trace)
        self._function.__exit__(kind, error, trace)


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype; empty when its bytes mean nothing to us.

    torch's own sub-byte integers (`uint4`, `int3`, ...) use a whole byte per element and are stored
    so; its bits without a meaning (`bits8`, `bits4x2`, `bits16`, ...) are stored as unsigned.
    """
    name = _NAMES.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("torch.")
        # torch's int4 and uint4 use a byte per element; ours pack two.
        if name not in DTYPES or (name in ("int4", "uint4")):
            if name == "bits16":
                name = "uint16"
            elif name.startswith(("uint", "bits")):
                name = "uint8"
            elif name.startswith("int"):
                name = "int8"
            else:
                name = ""
        _NAMES[dtype] = name
    return name


def snapshot(tensor: torch.Tensor, *, values: bool = True) -> Snapshot | Refusal | Pending:
    """Snapshot of one tensor.

    Args:
        tensor: Any tensor.
        values: Whether its bytes are wanted, or only dtype, shape and device.
    """
    # The fast path: a plain host tensor needs none of the checks below.
    if values and type(tensor) in _ORDINARY and _is_simple(tensor):
        simple = _SIMPLE.get(tensor.dtype)
        if simple is not None:
            name, size = simple
            count = tensor.numel()
            address = tensor.data_ptr()
            # A freed storage has the address 0; the slow path gives the reason.
            if address and count:
                return Snapshot(
                    name,
                    tuple(tensor.shape),
                    address,
                    count * size,
                    _CPU,
                    None,
                    count,
                    placement_of_plain(tensor),
                    tensor,
                )
    return _any_snapshot(tensor, values=values)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether the values just lie there, in host memory: nothing to refuse, nothing to undo."""
    return not (
        tensor.layout is not _STRIDED
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or _is_wrapped(tensor)
        or _is_functional(tensor)
        or not tensor.is_contiguous()
    )


def _any_snapshot(tensor: torch.Tensor, *, values: bool) -> Snapshot | Refusal | Pending:
    placement = ""
    if type(tensor) in _ORDINARY:
        placement = placement_of_plain(tensor)
    else:
        plain = _plain(tensor)
        if isinstance(plain, Refusal | Pending):
            return plain
        tensor, placement = plain
    reason = _refusal(tensor, values=values)
    if reason:
        return Refusal(reason)
    dtype = dtype_name(tensor.dtype)
    if not dtype:
        return Refusal(f"{tensor.dtype} elements are not understood")
    shape = tuple(tensor.shape)
    count = tensor.numel()
    device = tensor.device
    on_host = device.type == _CPU
    address, length, owner, repeats = 0, _NOTHING, tensor, 1
    if values:
        if count * tensor.element_size() > LARGEST_EXPANSION:
            tensor = _unrepeated(tensor)
            repeats = count // max(1, tensor.numel())
            count = tensor.numel()
        owner = _in_order(tensor, on_host=on_host)
        length = count * owner.element_size()
        if length:
            address = owner.data_ptr()
            if address == 0:
                return Refusal("its storage has been freed or is not in memory")
    if dtype == "float4_e2m1fn_x2":  # torch counts bytes of two elements each
        count *= 2
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    # From now on this dtype takes the fast path.
    elif values and owner.dtype is tensor.dtype:
        _SIMPLE[tensor.dtype] = dtype, owner.element_size()
    return Snapshot(
        dtype,
        shape,
        address,
        length,
        _CPU if on_host else str(device),
        None if on_host else device.index,
        count,
        placement,
        owner,
        repeats,
    )


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements that a view repeats, each once; the tensor itself if it repeats none.

    Only axes of stride 0 repeat; other views that overlap themselves are rare and small.
    """
    once = tensor
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            once = once.detach().narrow(axis, 0, 1)
    return once


def on_device(tensor: torch.Tensor) -> Snapshot | Refusal | None:
    """Describe a tensor of a device whose values are taken there; `owner` is a plain tensor.

    None for what only the way over the host understands: zeros without memory, packed halves of
    bytes, large views that repeat their elements, results that are still under way.
    """
    placement = ""
    if type(tensor) in _ORDINARY:
        placement = placement_of_plain(tensor)
    else:
        plain = _plain(tensor)
        if isinstance(plain, Pending):
            return None
        if isinstance(plain, Refusal):
            return plain
        tensor, placement = plain
    reason = _refusal(tensor, values=True)
    if reason:
        return Refusal(reason)
    dtype = dtype_name(tensor.dtype)
    if not dtype:
        return Refusal(f"{tensor.dtype} elements are not understood")
    if is_zero(tensor) or DTYPES[dtype].bits < 8:
        return None
    large = tensor.numel() * tensor.element_size() > LARGEST_EXPANSION
    if large and _unrepeated(tensor) is not tensor:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    # torch computes nothing with complex32; its bytes are read as integers.
    if tensor.dtype is torch.complex32:
        tensor = tensor.detach().view(torch.int32)
    device = tensor.device
    on_host = device.type == _CPU  # only where a test pretends
    return Snapshot(
        dtype,
        tuple(tensor.shape),
        0,
        _NOTHING,
        _CPU if on_host else str(device),
        None if on_host else device.index,
        tensor.numel(),
        placement,
        tensor,
    )


def address_alike(tensor: torch.Tensor, dtype: torch.dtype, shape: object, device: int) -> int:
    """Where the values of a plain tensor of a device lie that is like one described before.

    0 if it is another kind of tensor. Those without memory of their own (of vmap, of a graph that
    is traced, sparse ones) have no address, and say so or raise. Whether a CUDA graph is being
    recorded is not asked.

    Raises:
        RuntimeError: It has no single address, or no single shape.
    """
    if (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.get_device() == device
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return tensor.data_ptr()
    return 0


def as_before(tensor: torch.Tensor, shot: Snapshot, dtype: torch.dtype) -> bool:
    """Whether a tensor of a device is described by what was said of one at the same place."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shot.shape
        and tensor.layout is _STRIDED
        and tensor.get_device() == (-1 if shot.device_index is None else shot.device_index)
        and not (
            tensor.is_neg()
            or tensor.is_nested
            or _is_wrapped(tensor)
            or _is_functional(tensor)
            or is_zero(tensor)
            # A graph that is being recorded must not get a copy among its kernels.
            or (tensor.is_cuda and recording())
        )
        and placement_of_plain(tensor) == ""
    )


def _refusal(tensor: torch.Tensor, *, values: bool) -> str:
    if tensor.is_nested:
        return "a nested tensor has no single shape"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensors are not stored"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}) has no plain values; dequantise it to see it"
    # A description needs no memory, so these refusals concern values only.
    if values:
        if tensor.is_meta:
            return "a tensor on the meta device has no values"
        if _is_wrapped(tensor):
            return "inside torch.func (vmap, grad) a tensor has no memory of its own"
        if _is_functional(tensor):
            return "a functional tensor exists only while a graph is traced"
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being recorded; run the model without CUDA graphs to see it"
    return ""


def _plain(tensor: Any) -> tuple[torch.Tensor, str] | Refusal | Pending:
    """The ordinary tensor behind a subclass."""
    kind = type(tensor)
    if is_distributed(tensor):
        text = placement_of(tensor)
        local: Any = tensor._local_tensor
        if is_awaited(local):
            return Pending(when_there(local), text)
        if type(local) not in _ORDINARY:
            return Refusal(f"a DTensor whose local part is a {type(local).__name__}")
        return local, text
    if is_awaited(tensor):
        return Pending(when_there(tensor), placement_of_plain(tensor))
    if torch.nn.parameter.is_lazy(tensor):
        return Refusal("a lazy parameter has no values yet")
    dispatch = getattr(kind, "__torch_dispatch__", None)
    # Subclasses with a dispatch of their own (quantised, sparse, fake) may hold anything.
    if dispatch is not None and dispatch is not torch._C._disabled_torch_dispatch_impl:
        return Refusal(f"a {kind.__name__} decides itself what its values are")
    return torch.Tensor.as_subclass(tensor, torch.Tensor), ""


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of what is scattered the device may have to make one first."""
    try:
        return tensor.cpu()
    # Copied in parts: the device may need a contiguous copy of the whole first.
    except torch.OutOfMemoryError:
        if not tensor.dim():
            raise
        return torch.stack([_to_host(part) for part in tensor])  # smaller ones


def _in_order(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    """The tensor itself, or a copy of it, with its values in host memory in C order."""
    if is_zero(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if not on_host:
        tensor = _to_host(tensor.detach())
    if tensor.dtype is torch.complex32:  # copying it would print torch's warning in the program
        tensor = tensor.detach().view(torch.int32)
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def stored_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A parameter as the tensors that hold it: `weight.qdata`, `weight.scale` of a quantised one.

    torch's protocol for wrapper subclasses says which attributes these are; an ordinary tensor is
    itself.
    """
    if type(tensor) in _ORDINARY or is_distributed(tensor):
        return [(name, tensor)]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    try:
        names: list[str] = list(flatten()[0]) if flatten is not None else []
    except Exception:  # the class is somebody else's: what it cannot say is not asked again
        names = []
    held = {attribute: getattr(tensor, attribute, None) for attribute in names}
    inner = {slot: part for slot, part in held.items() if isinstance(part, torch.Tensor)}
    if {"qdata", "scale_and_zero"} <= inner.keys():
        inner = _four_bits(inner["qdata"], inner["scale_and_zero"]) or inner
    return [(f"{name}.{slot}", part) for slot, part in inner.items()] or [(name, tensor)]


def _four_bits(words: torch.Tensor, pairs: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Codes [out, in], scales and zero points of a weight in the order of torch's CPU kernel.

    Which code lies where depends on the machine's vectors. So torch packs the numbers of the places
    themselves, a digit at a time, and then the codes that were found: they must give these words.
    Of such a weight a value is `(code - 8) * scale + zero`. None if it is not packed that way.
    """
    is_plain = type(words) is torch.Tensor and type(pairs) is torch.Tensor
    shapes = tuple(words.shape), tuple(pairs.shape)
    fits = is_plain and (len(shapes[0]), len(shapes[1])) == (2, 3) and words.dtype == torch.uint8
    if not fits or words.device.type != _CPU or shapes[1][1:] != (shapes[0][0], 2):
        return None
    rows, columns = shapes[0][0], 2 * shapes[0][1]
    # The kernel packs rows in blocks of 64 or fewer; other heights are a block of their own.
    height = 64 if rows % 64 == 0 else rows
    with undisturbed():
        try:
            pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
            numbers = torch.arange(height * columns, dtype=torch.int32).view(height, columns)
            places = torch.zeros(height * columns, dtype=torch.int64)
            for digit in range(0, (height * columns).bit_length(), 4):
                places |= _nibbles(pack(numbers >> digit & 15, 1)).long().view(-1) << digit
            codes = torch.empty(rows // height, height * columns, dtype=torch.uint8)
            codes[:, places] = _nibbles(words).view(codes.shape)
            codes = codes.view(rows, columns)
            if not torch.equal(pack(codes.int(), 1), words):
                return None
            scale, zero = (pairs[..., part].t().float() for part in (0, 1))
            return {"qdata": codes, "scale": scale, "zero_point": 8.0 - zero / scale}
        except (AttributeError, RuntimeError):  # another torch packs otherwise
            return None


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The two codes of each byte, the lower half first."""
    return torch.stack([words & 15, words >> 4], -1)
