"""`.pt`/`.pth` files, loaded by torch with `weights_only=True`; files that need code are refused.

torch is imported when such a file is opened, not before. Nested dicts, lists and tuples are
flattened to names joined by dots; other values than tensors are skipped.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import functools
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from driftline.errors import BadFile
from driftline.formats.dump_run import Member
from driftline.formats.tensors.npz import names_in_zip
from driftline.numerics.dtypes import DTYPES
from driftline.registry import require
from driftline.runs.files.mapped_file import Guard

if TYPE_CHECKING:
    import torch

NAME = "torch"
INSTALL = "torch"
DEEPEST = 64
MOST_CONTAINERS = 200_000
LARGEST_EXPANSION = 1 << 30
"""Largest size of an expanded view: a few stored bytes may claim any size."""
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""torch's older layout than zips begins with this magic number, pickled with protocol 2."""


def sniff(path: Path) -> bool:
    """Whether a file is a zip with torch's `data.pkl`, or begins with the older magic number."""
    with path.open("rb") as stream:
        if stream.read(len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
            return True
    return any(name.endswith("/data.pkl") for name in names_in_zip(path))


def members(path: Path) -> list[Member]:
    """The tensors of the file, in the file's order.

    Raises:
        NotInstalled: torch is not installed.
        BadFile: The file is damaged, or would have to run code.
    """
    torch_module = require("torch", install=INSTALL)
    loaded = _load(path, torch_module)
    return [
        _member(path, part, plain)
        for name, tensor in _tensors(path, loaded, torch_module)
        for part, plain in _parts(name, tensor, torch_module)
    ]


def _parts(
    name: str, tensor: torch.Tensor, torch_module: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """The codes, scale and zero point of a quantised tensor; any other tensor unchanged."""
    scheme = str(tensor.qscheme()) if tensor.is_quantized else ""
    # Other schemes have no codes with one scale and zero point.
    if not scheme.endswith("affine") or str(tensor.dtype) not in _CODES:
        yield name, tensor
        return
    site = name or "tensor"
    if "per_channel" in scheme:
        scale, zero = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    else:
        scale = torch_module.tensor(tensor.q_scale(), dtype=torch_module.float64)
        zero = torch_module.tensor(tensor.q_zero_point())
    yield site, tensor.int_repr()
    yield f"{site}.scale", scale
    yield f"{site}.zero_point", zero


_CODES = ("torch.qint8", "torch.quint8", "torch.qint32")


def _load(path: Path, torch_module: Any) -> Any:
    load = functools.partial(torch_module.load, path, map_location="cpu", weights_only=True)
    try:
        with warnings.catch_warnings():
            # torch's warnings about a file's pickle protocol are of no use to the user.
            warnings.simplefilter("ignore")
            # Only the zip layout can be mapped; a damaged zip is not one, and fails in plain
            # loading.
            return load(mmap=True) if zipfile.is_zipfile(path) else load()
    except Exception as trouble:  # the unpickler raises anything for a damaged stream
        if "weights_only" in str(trouble) or "Unsupported global" in str(trouble):
            raise BadFile(
                f"{path} holds more than tensors ({_refused_class(str(trouble))}); "
                "loading it could run code, so it was not loaded",
                hint="save a tensor, or a dict of tensors, with torch.save",
            ) from trouble
        reason = str(trouble).splitlines()[0][:160] if str(trouble) else ""
        raise BadFile(
            f"{path} cannot be loaded: {type(trouble).__name__} {reason}".strip()
        ) from trouble


def _refused_class(message: str) -> str:
    """The name that torch refused, as far as its message contains it."""
    # The wording differs between versions of torch.
    for marker in ("GLOBAL ", "Unsupported global: "):
        if marker in message:
            words = message.split(marker, 1)[1].split()
            if words:
                return words[0].rstrip(".,:")[:80]
    return "Python objects"


def _tensors(path: Path, loaded: Any, torch_module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    left = MOST_CONTAINERS

    def walk(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal left
        if isinstance(value, torch_module.Tensor):
            yield name, cast("torch.Tensor", value)
            return
        children: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            children = list(cast(Mapping[Any, Any], value).items())
        elif isinstance(value, (list, tuple)):
            children = list(enumerate(cast(list[Any], value)))
        else:
            return
        left -= 1
        if left < 0:  # nested lists that contain each other: few bytes, but endless
            raise BadFile(f"{path} holds more than {MOST_CONTAINERS} nested containers")
        # A pickle can hold a list that contains itself.
        if id(value) in above or len(above) > DEEPEST:
            return
        for key, child in children:
            yield from walk(child, f"{name}.{key}" if name else str(key), (*above, id(value)))

    yield from walk(loaded, "", ())


def _member(path: Path, name: str, tensor: torch.Tensor) -> Member:
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    trouble = ""
    if dtype not in DTYPES or tensor.is_quantized:
        trouble = f"its element type is {dtype}, which cannot be compared"
    elif layout != "strided":
        trouble = f"it is stored as {layout}, not dense"
    elif tensor.is_meta:
        trouble = "it is on the meta device and has no values"
    # Making such a view contiguous would allocate the claimed size.
    elif tensor.nbytes > max(LARGEST_EXPANSION, tensor.untyped_storage().nbytes()):
        trouble = f"it is a view that expands {tensor.untyped_storage().nbytes()} bytes to "
        trouble += f"{tensor.nbytes}"
    shape = tuple(int(size) for size in tensor.shape)
    if not trouble and DTYPES[dtype].bits == 4 and shape:
        shape = (*shape[:-1], shape[-1] * 2)  # torch counts the bytes of packed pairs
    guard = None
    if not trouble and tensor.device.type == "cpu":
        # torch maps the file itself; the guard survives a cut file
        storage = tensor.untyped_storage()
        guard = Guard(storage.data_ptr(), storage.nbytes(), str(path))
    return Member(name, dtype, shape, functools.partial(_fetch, tensor, dtype, guard), trouble)


def _fetch(tensor: torch.Tensor, dtype: str, guard: object) -> np.ndarray[Any, np.dtype[Any]]:
    import torch

    del guard  # lives as long as the tensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = cast(Any, plain.view(torch.uint8).numpy())
    return raw.view(DTYPES[dtype].storage)
