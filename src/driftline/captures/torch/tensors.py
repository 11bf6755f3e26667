"""Read a torch tensor as host bytes, without a copy if possible, or refuse it with a reason.

The snapshot of a plain host tensor refers to live memory, so it must be read or copied before the
program continues. Nothing here changes autograd or random state, or is seen by the program's
dispatch modes; callers hold `undisturbed()` around a group of snapshots. This file knows nothing
about names and sinks.
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
"""Our names of the torch dtypes seen so far; an empty name means that the dtype is refused."""

_SIMPLE: dict[torch.dtype, tuple[str, int]] = {}
"""Name and bytes per element of the dtypes seen so far that the fast path can read.

Dtypes whose elements torch counts differently from us are not in it.
"""

LARGEST_EXPANSION = 256 << 20
"""Largest size in bytes at which a view that repeats its elements (`expand`) is written out.

A larger view is summarised from the elements that it repeats: a mask of 10^6 x 10^6 would take
4 TB.
"""
_CPU = "cpu"
_STRIDED = torch.strided
_is_functional: Callable[[torch.Tensor], bool] = torch.__dict__["_is_functional_tensor"]
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_NoFunction: Any = torch._C.DisableTorchFunction
_NoDispatch: Any = torch._C._DisableTorchDispatch
is_zero: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is zeros without memory, which occur as tangents and second derivatives."""
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_set_grad: Callable[[bool], None] = torch._C._set_grad_enabled
# Other subclasses may run code of their own at any access.
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_NOTHING = -1
recording: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class undisturbed:
    """Hide operations in the context from the program's modes and from autograd."""

    __slots__ = ("_dispatch", "_function", "_grad")

    def __enter__(self) -> None:
        self._function = _NoFunction()
        self._function.__enter__()
        self._dispatch = _NoDispatch()
        self._dispatch.__enter__()
        # In inference grad mode is off already, and nothing has to be restored.
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
    """Our name of a torch dtype; empty if we do not understand its bytes.

    torch's sub-byte integers (`uint4`, `int3`, ...) use a whole byte per element and are stored as
    8-bit integers. Its uninterpreted bits (`bits8`, `bits4x2`, `bits16`, ...) are stored as
    unsigned integers.
    """
    name = _NAMES.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("torch.")
        # torch's int4 and uint4 use one byte per element; ours pack two elements into a byte.
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
        values: Whether its bytes are needed, or only dtype, shape and device.
    """
    # The fast path: a plain host tensor needs none of the checks below.
    if values and type(tensor) in _ORDINARY and _is_simple(tensor):
        simple = _SIMPLE.get(tensor.dtype)
        if simple is not None:
            name, size = simple
            count = tensor.numel()
            address = tensor.data_ptr()
            # A freed storage has address 0; the slow path returns the reason.
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
    """Whether a tensor's values are in host memory in C order and can be read as they are."""
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

    Only axes of stride 0 are treated as repeated; other self-overlapping views are rare and small.
    """
    once = tensor
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            once = once.detach().narrow(axis, 0, 1)
    return once


def on_device(tensor: torch.Tensor) -> Snapshot | Refusal | None:
    """Describe a tensor whose values are read on its device.

    Returns:
        A snapshot without bytes, whose `owner` is a plain tensor; a refusal; or None for tensors
        that only the path through the host supports: zeros without memory, dtypes narrower than a
        byte, large views that repeat their elements, results that have not arrived.
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
    # torch does not compute with complex32, so its bytes are read as integers.
    if tensor.dtype is torch.complex32:
        tensor = tensor.detach().view(torch.int32)
    device = tensor.device
    on_host = device.type == _CPU  # only in tests, which treat CPU tensors as a device's
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


_HASHED_AT_ONCE = 1 << 22
"""Number of elements that are hashed together.

What is computed in between lies in the program's device memory, 16 MiB for each step.
"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def order_free_sum(tensor: torch.Tensor, *, as_bfloat16: bool = False) -> torch.Tensor:
    """The sum of `captures.weight_facts.order_free`, computed on the tensor's device.

    Args:
        tensor: A contiguous tensor.
        as_bfloat16: Hash its elements as they are rounded to bfloat16.

    Returns:
        One int64 on the device; nothing waits for it.
    """
    flat = tensor.detach().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in flat.split(_HASHED_AT_ONCE):
        if as_bfloat16:
            rounded = block.float().bfloat16()
            # Devices differ in the bits of a NaN, so every one becomes the standard NaN.
            block = torch.where(rounded.isnan(), torch.nan, rounded)
        bits = block.view(_BITS[block.element_size()])
        # torch has no arithmetic of unsigned numbers; int32 overflows to the same bits, and a shift
        # that repeats the sign is cut off.
        if bits.dtype is torch.int64:
            hashes = (bits ^ ((bits >> 29) & 0x7FFFFFFFF)).to(torch.int32)
        elif bits.dtype is torch.int16:
            hashes = bits.to(torch.int32) & 0xFFFF
        else:
            hashes = bits.to(torch.int32)
        # Not in place: of 32 bits, `hashes` is still the program's own memory.
        hashes = hashes * (0x9E3779B1 - (1 << 32))
        hashes ^= (hashes >> 15) & 0x1FFFF
        hashes *= 0x85EBCA77 - (1 << 32)
        hashes ^= (hashes >> 13) & 0x7FFFF
        total += (hashes.to(torch.int64) & 0xFFFFFFFF).sum()
    return total


def address_alike(tensor: torch.Tensor, dtype: torch.dtype, shape: object, device: int) -> int:
    """Address of a plain device tensor's values, if it is of the same kind as an earlier one.

    Tensors without memory of their own (inside vmap, in a graph that is traced, sparse ones) have
    no address: the result is 0, or torch raises. This function does not check whether a CUDA graph
    is being recorded.

    Args:
        tensor: The tensor.
        dtype: The earlier tensor's dtype.
        shape: The earlier tensor's shape.
        device: The earlier tensor's device index; -1 for the CPU.

    Returns:
        The address; 0 if the tensor differs in kind.

    Raises:
        RuntimeError: The tensor has no single address, or no single shape.
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
    """Whether the snapshot of an earlier tensor of the same place also describes this one."""
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
            # Our copies must not become part of a CUDA graph that is being recorded.
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
    # A description needs no memory, so these tensors are refused only if values are needed.
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
    """The ordinary tensor of a subclass instance, with its placement; or why there is none."""
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
    # Subclasses with a dispatch of their own (quantised, sparse, fake) may store their values in
    # any form.
    if dispatch is not None and dispatch is not torch._C._disabled_torch_dispatch_impl:
        return Refusal(f"a {kind.__name__} decides itself what its values are")
    return torch.Tensor.as_subclass(tensor, torch.Tensor), ""


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory."""
    try:
        return tensor.cpu()
    # If the tensor is not contiguous, the device first makes a contiguous copy of it. Copies of
    # parts need less memory.
    except torch.OutOfMemoryError:
        if not tensor.dim():
            raise
        return torch.stack([_to_host(part) for part in tensor])


def _in_order(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    """The tensor itself, or a copy of it, with its values in host memory in C order."""
    if is_zero(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if not on_host:
        tensor = _to_host(tensor.detach())
    if tensor.dtype is torch.complex32:  # copying complex32 would make torch print a warning
        tensor = tensor.detach().view(torch.int32)
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def stored_dtype(tensor: torch.Tensor) -> str:
    """The type of the numbers that store a parameter: that of the codes of a quantised weight.

    Codes of four bits may be kept in bytes, two or one in each. Only attributes are read.
    """
    if type(tensor) in _ORDINARY or getattr(tensor, "__tensor_flatten__", None) is None:
        return str(tensor.dtype).removeprefix("torch.")
    codes: Any = getattr(tensor, "qdata", None)
    if type(codes) is not torch.Tensor:
        return str(tensor.dtype).removeprefix("torch.")
    name = str(codes.dtype).removeprefix("torch.")
    declared = str(getattr(tensor, "target_dtype", "")).removeprefix("torch.")
    if declared in ("int4", "uint4"):
        return declared
    halves = codes.dtype in (torch.int8, torch.uint8) and 2 * codes.numel() == tensor.numel()
    return "int4" if halves else name


def stored_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The named tensors that store a parameter, such as `weight.qdata` and `weight.scale`.

    For a wrapper subclass, such as a quantised weight, torch's `__tensor_flatten__` names the
    attributes that hold them. An ordinary tensor is returned as it is.
    """
    if type(tensor) in _ORDINARY or is_distributed(tensor):
        return [(name, tensor)]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    try:
        names: list[str] = list(flatten()[0]) if flatten is not None else []
    except Exception:  # the class belongs to another library and may not support this
        names = []
    held = {attribute: getattr(tensor, attribute, None) for attribute in names}
    inner = {slot: part for slot, part in held.items() if isinstance(part, torch.Tensor)}
    if {"qdata", "scale_and_zero"} <= inner.keys():
        inner = _four_bits(inner["qdata"], inner["scale_and_zero"]) or inner
    return [(f"{name}.{slot}", part) for slot, part in inner.items()] or [(name, tensor)]


def _four_bits(words: torch.Tensor, pairs: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Codes [out, in], scales and zero points of a weight packed for torch's 4-bit CPU kernel.

    The order of the packed codes depends on the machine's vector width. To find it, torch packs
    the index of every element, four bits at a time. The unpacked codes are checked by packing them
    again, which must give the same words. A value of such a weight is `(code - 8) * scale + zero`.

    Args:
        words: The packed codes, two to a byte.
        pairs: Scale and zero of each group.

    Returns:
        The unpacked parts by name; None if the weight is not packed in this way.
    """
    is_plain = type(words) is torch.Tensor and type(pairs) is torch.Tensor
    shapes = tuple(words.shape), tuple(pairs.shape)
    fits = is_plain and (len(shapes[0]), len(shapes[1])) == (2, 3) and words.dtype == torch.uint8
    if not fits or words.device.type != _CPU or shapes[1][1:] != (shapes[0][0], 2):
        return None
    rows, columns = shapes[0][0], 2 * shapes[0][1]
    # The kernel packs rows in blocks of 64; if that does not divide them, all rows are one block.
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
        except (AttributeError, RuntimeError):  # another version of torch packs differently
            return None


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The two codes of each byte, the lower half first."""
    return torch.stack([words & 15, words >> 4], -1)
