"""The seed's tree of tensors, as a sink: `dump --layout ait` and `DumpConfig` both write through it.

    {dump_path}/ait_dump/torch_tensors/{device}_{pid}/model_tree.json
    {dump_path}/ait_dump/torch_tensors/{device}_{pid}/{token}/{module path}/{file}.pth

One `torch.save` of one plain CPU tensor per file, loadable with `weights_only=True`. Names of files,
and where they go beyond the seed, are decided in `file_stem`; docs/seed-differences.md lists them.
Values only: what was reduced to a summary or a digest has no file here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from driftline.runs.key import TensorKey, usual_moment, usual_phase
from driftline.runs.record import Record
from driftline.runs.sink import JSON, Bytes

TENSORS = Path("ait_dump") / "torch_tensors"
EVENTS = "driftline_events.jsonl"
ROOT = "root"
_UNSAFE = re.compile(r"[^0-9A-Za-z_.+@=-]")
_LONGEST_NAME = 200  # a file system allows 255 bytes; suffix and extension come on top


def module_folder(site: str) -> str:
    """`root`, `root.layers.0.mlp`: the seed's name of a module path.

    >>> module_folder(""), module_folder("layers.0")
    ('root', 'root.layers.0')
    """
    return _safe(f"{ROOT}.{site}" if site else ROOT)


def file_stem(key: TensorKey, alias: str = "", *, alone: bool = False) -> str:
    """Name of a tensor's file without `.pth`.

    Args:
        key: The tensor's address.
        alias: Position of an argument that is known by name; the seed counts positions.
        alone: The port is one bare tensor, not a tuple: the seed then writes no number for outputs.

    >>> file_stem(TensorKey.of("a", "output"), alone=True)
    'output'
    >>> file_stem(TensorKey.of("a", "output", "1.0"))
    'output_1_0'
    >>> file_stem(TensorKey.of("a", "input", "hidden_states"), alias="0")
    'input_0'
    >>> file_stem(TensorKey.of("a", "input", "mask", visit=2))
    'input_mask.visit2'
    """
    slot = alias or key.slot
    stem = key.port if alone and key.port == "output" else f"{key.port}_{slot.replace('.', '_')}"
    if key.visit:
        stem += f".visit{key.visit}"
    if key.phase != usual_phase(key.port):
        stem += f".{key.phase}"
    if key.moment != usual_moment(key.port):
        stem += f".{key.moment}"
    return _safe(stem)


def _safe(name: str) -> str:
    """One path component: no separators, no surprises, not too long."""
    plain = _UNSAFE.sub("_", name)
    if len(plain) > _LONGEST_NAME:
        plain = plain[:_LONGEST_NAME]
    return "_" if plain in ("", ".", "..") else plain


@dataclass(slots=True)
class _Call:
    """The outputs of one module call, kept back until it is known whether there is only one."""

    token: tuple[str, int, int, str, str]
    waiting: list[tuple[Record, Any]] = field(default_factory=lambda: list[tuple[Record, Any]]())


class AitTree:
    """A sink that writes the seed's tree; see the module's first lines for its shape."""

    def __init__(self, dump_path: str | Path, *, device: str = "", max_bytes: int = 0) -> None:
        """
        Args:
            dump_path: Folder that will hold `ait_dump`.
            device: `cpu`, `cuda0`; empty: taken from the first tensor or the active accelerator.
            max_bytes: Stop writing tensors when that many bytes are written; 0 is no limit.
        """
        self._root = Path(dump_path) / TENSORS
        self._device = device.replace(":", "")
        self._max_bytes = max_bytes
        self._folder: Path | None = None
        self._call: _Call | None = None
        self._tree: Mapping[str, JSON] | None = None
        self._lock = threading.RLock()
        self._bytes = 0
        self._tensors = 0
        self._broken = False
        self._capped = False
        self._early_events: list[str] = []

    @property
    def bytes_written(self) -> int:
        return self._bytes

    @property
    def tensors_written(self) -> int:
        return self._tensors

    @property
    def folder(self) -> Path | None:
        """This process's folder; None before the first tensor."""
        return self._folder

    def put(self, record: Record, data: Bytes | None) -> None:
        if data is None or record.kept not in ("full", "sample") or self._broken or self._capped:
            return
        if self._max_bytes and self._bytes + data.nbytes > self._max_bytes:
            self._capped = True
            self.event("capped", f"stopped before {record.key}: {self._max_bytes} bytes are reached")
            return
        tensor = _tensor(record, data)
        if tensor is None:
            self.event("refused", f"{record.key}: torch cannot hold {record.dtype} in a file")
            return
        with self._lock:
            self._ensure_folder(record.device)
            key = record.key
            token = (key.site, key.step, key.visit, key.phase, key.port)
            if self._call is not None and self._call.token != token:
                self._write_call()
            if self._call is None:
                self._call = _Call(token)
            self._call.waiting.append((record, tensor))
            self._bytes += data.nbytes
            self._tensors += 1

    def event(self, kind: str, message: str, **details: JSON) -> None:
        line = json.dumps({"kind": kind, "message": message, **details}, ensure_ascii=False)
        with self._lock:
            if self._folder is None:
                self._early_events.append(line)
                return
            self._append_events([line])

    def describe(self, **facts: JSON) -> None:
        """The seed's tree has no place for provenance."""

    def topology(self, tree: Mapping[str, JSON]) -> None:
        with self._lock:
            self._tree = tree
            if self._folder is not None:
                self._write_tree()

    def ensure_topology(self, device: str = "cpu") -> None:
        """Write the tree even if no tensor comes: `--type model` asks for nothing else."""
        with self._lock:
            self._ensure_folder(device)

    def step_done(self, step: int) -> None:
        with self._lock:
            self._write_call()

    def close(self) -> None:
        with self._lock:
            self._write_call()

    def _ensure_folder(self, device: str) -> None:
        if self._folder is not None:
            return
        name = self._device or _main_device(device).replace(":", "")
        folder = self._root / f"{_safe(name)}_{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            self._give_up(problem)
        self._folder = folder
        self._append_events(self._early_events)
        self._early_events = []
        self._write_tree()

    def _write_call(self) -> None:
        call, self._call = self._call, None
        if call is None or self._folder is None:
            return
        alone = len(call.waiting) == 1 and call.waiting[0][0].key.slot in ("", "0")
        for record, tensor in call.waiting:
            folder = self._folder / str(record.key.step) / module_folder(record.key.site)
            stem = file_stem(record.key, record.alias, alone=alone)
            self._save(tensor, folder, stem)

    def _save(self, tensor: Any, folder: Path, stem: str) -> None:
        if self._broken:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sys.modules["torch"].save(tensor, folder / f"{stem}.pth")
        except (OSError, RuntimeError) as problem:  # torch reports a full disk as RuntimeError
            self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        """The user's program goes on; what is missing is said once."""
        if not self._broken:
            self._broken = True
            print(f"driftline: the ait tree is incomplete from here on: {problem}", file=sys.stderr)

    def _append_events(self, lines: list[str]) -> None:
        if not lines or self._folder is None:
            return
        try:
            with (self._folder / EVENTS).open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
        except OSError as problem:
            self._give_up(problem)

    def _write_tree(self) -> None:
        if self._tree is None or self._folder is None:
            return
        try:
            text = json.dumps(model_tree(self._tree), ensure_ascii=False, indent=2)
            (self._folder / "model_tree.json").write_text(text + "\n", encoding="utf-8")
        except OSError as problem:
            self._give_up(problem)


def _main_device(device: str) -> str:
    """An int input may live on the CPU while the model does not: the accelerator names the folder."""
    if device not in ("", "cpu"):
        return device
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"cuda{torch.cuda.current_device()}"
    return "cpu"


def _tensor(record: Record, data: Bytes) -> Any | None:
    """A plain CPU tensor that owns exactly its bytes, or None for what torch has no dtype for."""
    torch: Any = sys.modules["torch"]
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    shape = record.shape if record.kept == "full" else (-1,)
    if data.nbytes == 0:
        return torch.empty(record.shape, dtype=dtype)
    owned = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8)
    try:
        return owned.view(dtype).reshape(shape)
    except RuntimeError:  # packed formats: the shape counts elements, not bytes
        return None
