"""Tensors out of a run into files that other programs read: `.npy`, `.pt` or `.safetensors`.

    {folder}/rank0/step0/{site}/output_0.npy       a file per tensor; .pt likewise
    {folder}/rank0/step0.safetensors               a file per rank and step
    {folder}/driftline_tensors.jsonl               which file holds which key; see `exported`

Values are never changed. An element type that the target has no name for is widened to one that
holds every value of it exactly (numpy: bfloat16 and the small floats become float32, int4 int8);
safetensors takes the plain bytes instead, and the list says what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from driftline.formats.exported import LIST, SCHEMA, line_of
from driftline.numerics.dtypes import DTYPES, unpack_nibbles, value_table
from driftline.registry import require
from driftline.runs.key import usual_moment, usual_phase
from driftline.runs.record import Record
from driftline.runs.run import Storage, kept_elements
from driftline.runs.sink import JSON

_UNSAFE = re.compile(r"[^0-9A-Za-z_.+@=()-]")
_LONGEST_NAME = 120
_HEADER_UNIT = 8

Values = Callable[[Record], Storage]
Array = np.ndarray[Any, np.dtype[Any]]


class TensorList:
    """The list of keys, written line by line."""

    def __init__(self, folder: Path, source: str, facts: Mapping[str, JSON]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / LIST).open("w", encoding="utf-8")
        self._write({"schema": SCHEMA, "converted_from": source, "facts": facts})

    def tensor(self, record: Record, file: str, name: str, stored: str) -> None:
        self._write(line_of(record, file, name, stored))

    def topology(self, rank: int, process: int, tree: Mapping[str, Any]) -> None:
        self._write({"topology": tree, "rank": rank, "process": process})

    def event(self, event: Mapping[str, Any]) -> None:
        self._write({"event": dict(event)})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def widened(raw: Storage, record: Record) -> Array:
    """Shaped values; what numpy has no type for comes as a wider type, exactly."""
    dtype = DTYPES[record.dtype]
    count = kept_elements(record)
    values: Array
    if dtype.bits == 4:
        codes = unpack_nibbles(raw.view(np.uint8), count)
        if dtype.kind == "float":
            values = value_table(dtype.name).astype(np.float32)[codes]
        elif dtype.kind == "int":
            signed = codes.view(np.int8)
            values = np.where(signed > 7, signed - 16, signed).astype(np.int8)
        else:
            values = codes
    elif dtype.name == "bfloat16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif dtype.name == "complex32":
        values = raw.view("<f2").astype(np.float32).view(np.complex64)
    elif dtype.kind == "float" and dtype.bits == 8:
        # Powers of two down to 2**-127 and 448 alike are numbers of float32.
        values = value_table(dtype.name).astype(np.float32)[raw.view(np.uint8)]
    else:
        values = raw
    return values if record.kept == "sample" else values.reshape(record.shape)


def safe_name(text: str) -> str:
    """One path component: no separators, no surprises, not too long."""
    plain = _UNSAFE.sub("_", text)[:_LONGEST_NAME]
    return f"_{plain}" if plain.strip(".") == "" else plain


class FilePerTensor:
    """Writes `.npy` or `.pt` files below a folder."""

    def __init__(self, folder: Path, suffix: str, listed: TensorList) -> None:
        self.folder = folder
        self.suffix = suffix
        self._listed = listed
        self._taken: set[str] = set()
        self._torch: Any = require("torch", install="driftline[torch]") if suffix == ".pt" else None

    def put(self, record: Record, raw: Storage) -> int:
        """Write one tensor; returns how many bytes of values it has in its file.

        Raises:
            OSError: The disk refused.
        """
        name = self._name(record)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._torch is None:
            array = widened(raw, record)
            np.save(path, array, allow_pickle=False)
            stored, size = array.dtype.name, array.nbytes
        else:
            tensor = self._tensor(record, raw)
            try:
                self._torch.save(tensor, path)
            except RuntimeError as trouble:  # what torch makes of a full disk
                raise OSError(0, str(trouble).splitlines()[0][:160]) from trouble
            stored, size = str(tensor.dtype).removeprefix("torch."), int(tensor.nbytes)
        self._listed.tensor(record, name, "", stored)
        return size

    def _tensor(self, record: Record, raw: Storage) -> Any:
        dtype = getattr(self._torch, record.dtype, None)
        shape = tuple(record.shape) if record.kept == "full" else (-1,)
        if DTYPES[record.dtype].bits == 4:
            if record.dtype in ("int4", "uint4") or not shape or shape[-1] % 2 or shape[-1] < 0:
                return self._torch.from_numpy(widened(raw, record).copy())
            shape = (*shape[:-1], shape[-1] // 2)
        if raw.nbytes == 0:
            return self._torch.empty(tuple(record.shape), dtype=dtype)
        owned = self._torch.frombuffer(bytearray(raw.tobytes()), dtype=self._torch.uint8)
        return owned.view(dtype).reshape(shape)

    def _name(self, record: Record) -> str:
        key = record.key
        rank = f"rank{key.rank}" + (f".p{key.process}" if key.process else "")
        stem = f"{key.port}_{key.slot}"
        stem += f".visit{key.visit}" if key.visit else ""
        stem += f".{key.phase}" if key.phase != usual_phase(key.port) else ""
        stem += f".{key.moment}" if key.moment != usual_moment(key.port) else ""
        plain = f"{rank}/step{key.step}/{safe_name(key.site)}/{safe_name(stem)}"
        name, count = plain + self.suffix, 1
        while name in self._taken:
            count += 1
            name = f"{plain}~{count}{self.suffix}"
        self._taken.add(name)
        return name


def write_safetensors(
    folder: Path, records: Iterable[Record], values: Values, listed: TensorList
) -> int:
    """Write the tensors of one rank, a file per step; returns how many bytes of values.

    Raises:
        OSError: The disk refused.
    """
    by_step: dict[int, list[Record]] = {}
    for record in records:
        by_step.setdefault(record.key.step, []).append(record)
    return sum(_one_file(folder, step, some, values, listed) for step, some in by_step.items())


def _one_file(
    folder: Path, step: int, records: Sequence[Record], values: Values, listed: TensorList
) -> int:
    key = records[0].key
    rank = f"rank{key.rank}" + (f".p{key.process}" if key.process else "")
    file = f"{rank}/step{step}.safetensors"
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for record in records:
        name = str(record.key).partition("/")[2].partition("/")[2]
        dtype = DTYPES[record.dtype]
        size = dtype.byte_count(kept_elements(record))
        plain = dtype.safetensors != "U8" or dtype.name == "uint8"
        shape = list(record.shape) if record.kept == "full" else [kept_elements(record)]
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": shape if plain else [size],
            "data_offsets": [at, at + size],
        }
        listed.tensor(record, file, name, record.dtype if plain else "bytes")
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_UNIT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for record in records:
            stream.write(cast("Any", np.ascontiguousarray(values(record))).view(np.uint8).data)
    return at
