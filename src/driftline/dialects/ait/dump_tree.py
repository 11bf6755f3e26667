"""The folder tree of `ait llm dump`, as a sink for `dump --layout ait` and `DumpConfig`.

    {dump_path}/ait_dump/torch_tensors/{device}_{pid}/model_tree.json
    {dump_path}/ait_dump/torch_tensors/{device}_{pid}/{token}/{module path}/{file}.pth

Each file is one `torch.save` of one plain CPU tensor, loadable with `weights_only=True`. Names are
made by `file_stem`; docs/seed-differences.md lists where they go beyond the original. A tensor that
was reduced to a summary or a description is a line of its module's `statistics.csv`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from driftline.runs.files.owned_file import OwnedFile, print_to_stderr, write_file
from driftline.runs.records import Phase, Port, Record, TensorKey, usual_moment, usual_phase
from driftline.runs.sidecars.calls import Call, CallTensor
from driftline.runs.sinks import JSON, Bytes

TENSORS = Path("ait_dump") / "torch_tensors"
EVENTS = "driftline_events.jsonl"
STATISTICS = "statistics.csv"
STATISTICS_COLUMNS = (
    *("NodeName", "NodeType", "InputOutput", "Index", "DataType", "Shape"),
    *("Max", "Min", "Mean", "L2Norm"),
)
# Pieces below this size are collected and written together.
_SMALL = 1 << 16
SHEET = "driftline_"
"""Before the names of our own files in ait's tree."""
ROOT = "root"
RUN_ROOT = "(root)"
"""What a run calls the model itself."""
_UNSAFE = re.compile(r"[^0-9A-Za-z_.+@=-]")
_LONGEST_NAME = 200  # a file system allows 255 bytes; suffix and extension come on top


def module_folder(site: str) -> str:
    """ait's name of a module path: `root`, `root.layers.0.mlp`; an operator follows after `@`.

    >>> module_folder("(root)"), module_folder("layers.0"), module_folder("layers.0/aten.add")
    ('root', 'root.layers.0', 'root.layers.0@aten.add')
    """
    module, _, operator = site.partition("/")
    name = ROOT if module in ("", RUN_ROOT) else f"{ROOT}.{module}"
    return _safe(f"{name}@{operator}" if operator else name)


def file_stem(key: TensorKey, alias: str = "", *, alone: bool = False) -> str:
    """Name of a tensor's file without `.pth`.

    Args:
        key: The tensor's address.
        alias: Position of an argument that is known by name; ait counts positions.
        alone: The port is one bare tensor, not a tuple: ait then writes no number for outputs.

    >>> file_stem(TensorKey.of("a", "output"), alone=True)
    'output'
    >>> file_stem(TensorKey.of("a", "output", "1.0"))
    'output_1_0'
    >>> file_stem(TensorKey.of("a", "input", "hidden_states"), alias="0")
    'input_0'
    >>> file_stem(TensorKey.of("a", "input", "mask", visit=2))
    'input_mask.visit2'
    >>> file_stem(TensorKey.of("a", "input", "cache.1"))  # a name of ours: read back as it is
    'input_cache.1'
    """
    slot = alias or key.slot
    # The original counts positions and joins them with underscores.
    if slot[:1].isdigit():
        slot = slot.replace(".", "_")
    stem = key.port if alone and key.port == "output" else f"{key.port}_{slot}"
    # The original would overwrite the first call's file; further calls get a suffix.
    if key.visit:
        stem += f".visit{key.visit}"
    if key.phase != usual_phase(key.port):
        stem += f".{key.phase}"
    if key.moment != usual_moment(key.port):
        stem += f".{key.moment}"
    return _safe(stem)


def _safe(name: str) -> str:
    """The name as one path component: without separators or special names, not too long."""
    # Names come from a model and may hold separators.
    plain = _UNSAFE.sub("_", name)
    if len(plain) > _LONGEST_NAME:
        plain = plain[:_LONGEST_NAME]
    return "_" if plain in ("", ".", "..") else plain


def _statistics_line(record: Record) -> str:
    """NodeName, NodeType, InputOutput, Index, DataType, Shape, Max, Min, Mean, L2Norm."""
    key, summary = record.key, record.summary
    figures = ["N/A"] * 4
    if summary is not None:
        figures = [repr(float(f)) for f in (summary.max, summary.min, summary.mean, summary.l2)]
    position = (record.alias or key.slot).rpartition(".")[2]
    cells = [
        module_folder(key.site),
        _safe(record.class_name),
        key.port.capitalize(),
        position if position.isdigit() else "0",
        f"torch.{record.dtype}",
        f'"{list(record.shape)}"',
        *figures,
    ]
    return ",".join(cells)


def find_file(folder: Path, call: Call, port: str, tensor: CallTensor) -> str:
    """The path of a call's tensor in the tree of a process, from the dump's folder on; empty if the
    tensor was not kept.
    """
    key = TensorKey(
        call.site,
        cast("Port", port),
        tensor.slot,
        call.step,
        call.visit,
        phase=cast("Phase", call.phase),
        moment=usual_moment(port),
    )
    place = folder / str(call.step) / module_folder(call.site)
    stems = [file_stem(key, tensor.alias)]
    # A bare output has no number in its file name.
    if port == "output" and tensor.slot == "0":
        stems.insert(0, file_stem(key, alone=True))
    for stem in stems:
        if (place / f"{stem}.pth").is_file():
            return str((place / f"{stem}.pth").relative_to(folder.parent.parent.parent))
    return ""


class AitTree:
    """A sink that writes ait's tree; the docstring of the module shows its layout."""

    def __init__(self, dump_path: str | Path, *, device: str = "", max_bytes: int = 0) -> None:
        """
        Args:
            dump_path: Folder that will hold `ait_dump`.
            device: `cpu`, `cuda0`; empty: taken from the first tensor or the active accelerator.
            max_bytes: Stop writing tensors after this many bytes; 0 for no limit.
        """
        self._root = Path(dump_path) / TENSORS
        self._device = device.replace(":", "")
        self._max_bytes = max_bytes
        self._folder: Path | None = None
        self._pid = os.getpid()
        self._bare: tuple[TensorKey, Path] | None = None
        self._tree: Mapping[str, JSON] | None = None
        self._lock = threading.RLock()
        self._bytes = 0
        self._tensors = 0
        self._broken = False
        self._capped = False
        self._told_of_repeats = False
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
        with self._lock:
            if self._broken or self._capped:
                return
            self._ensure_folder(record.device)
            if data is None or record.kept not in ("full", "sample"):
                self._describe(record)
                return
            # Checked before the write, so that the limit is never exceeded.
            if self._max_bytes and self._bytes + data.nbytes > self._max_bytes:
                self._capped = True
                self.event(
                    "limit", f"stopped before {record.key}: {self._max_bytes} bytes are reached"
                )
                return
            tensor = _tensor(record, data)
            if tensor is None:
                self.event("refused", f"{record.key}: torch cannot hold {record.dtype} in a file")
                return
            if self._save(tensor, self._path_of(record)):
                self._bytes += data.nbytes
                self._tensors += 1

    def _describe(self, record: Record) -> None:
        """A tensor without values is a line of its module's statistics.csv."""
        key = record.key
        if key.port not in ("input", "output") or self._folder is None:
            return
        # Lines of the original cannot express a second call or another moment.
        if key.visit or key.phase != usual_phase(key.port) or key.moment != usual_moment(key.port):
            if not self._told_of_repeats:
                self._told_of_repeats = True
                self.event(
                    "refused", f"{STATISTICS} has a line for the first call of a module only"
                )
            return
        path = self._folder / str(key.step) / module_folder(key.site) / STATISTICS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            heading = "" if path.exists() else f"{','.join(STATISTICS_COLUMNS)}\n"
            with OwnedFile(path, "append") as file:
                file.append_all(f"{heading}{_statistics_line(record)}\n".encode())
            self._tensors += 1
        except OSError as problem:
            self._give_up(problem)

    def event(self, kind: str, message: str, **details: JSON) -> None:
        line = json.dumps({"kind": kind, "message": message, **details})
        with self._lock:
            if self._folder is None:
                # The folder's name needs the device, which the first tensor brings.
                self._early_events.append(line)
                return
            self._append_events([line])

    def describe(self, **facts: JSON) -> None:
        """Do nothing: the original's tree cannot hold provenance."""

    def topology(self, tree: Mapping[str, JSON]) -> None:
        with self._lock:
            self._tree = tree
            if self._folder is not None:
                self._write_tree()

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        """Add text to a file of this process; at the end, the launcher moves it into ait's tree."""
        with self._lock:
            self._ensure_folder("cpu")
            if self._folder is None or self._broken:
                return
            try:
                place = self._folder / f"{SHEET}{name}"
                with OwnedFile(place, "replace" if anew else "append") as file:
                    file.append_all(text.encode("ascii", "backslashreplace"))
            except OSError as problem:
                self._give_up(problem)

    def open(self) -> None:
        """Create the folder even if there is no tensor, as for `--type model`."""
        with self._lock:
            self._ensure_folder("cpu")

    def step_done(self, step: int) -> None:
        """Do nothing: every tensor is already in its file."""

    def flush(self) -> None:
        """Do nothing: every tensor is already in its file."""

    def close(self) -> None:
        """Do nothing: every tensor is already in its file."""

    def _path_of(self, record: Record) -> Path:
        """The file of a record; the first output of a call has no number until a second comes."""
        assert self._folder is not None
        key = record.key
        folder = self._folder / str(key.step) / module_folder(key.site)
        # Any other tensor in between means that the call is over.
        bare, self._bare = self._bare, None
        if key.port == "output":
            if key.slot == "0" and not record.alias:
                path = folder / f"{file_stem(key, alone=True)}.pth"
                self._bare = (key, path)
                return path
            if bare is not None and key._replace(slot="0") == bare[0]:
                with contextlib.suppress(OSError):
                    # A second output shows that the first belongs to a tuple,
                    # which is numbered.
                    bare[1].replace(folder / f"{file_stem(bare[0])}.pth")
        return folder / f"{file_stem(key, record.alias)}.pth"

    def _ensure_folder(self, device: str) -> None:
        if self._folder is not None and self._pid == os.getpid():
            return
        self._pid = os.getpid()  # a forked child writes its own folder
        self._bare = None
        name = _safe((self._device or _main_device(device)).replace(":", ""))
        count = 0
        while True:
            # Two models of one process, or an old process of the same number, never share a folder.
            suffix = f".{count}" if count else ""
            folder = self._root / f"{name}_{os.getpid()}{suffix}"
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                count += 1
            except OSError as problem:
                self._give_up(problem)
                break
        self._folder = folder
        self._append_events(self._early_events)
        self._early_events = []
        self._write_tree()

    def _save(self, tensor: Any, path: Path) -> bool:
        if self._broken:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with OwnedFile(path, "replace") as file:
                stream = _Stream(file)
                sys.modules["torch"].save(tensor, stream)
                stream.flush()
            if stream.problem is not None:
                raise stream.problem
            return True
        except (OSError, RuntimeError) as problem:  # torch reports a full disk as RuntimeError
            # torch reports every failed write in the same words.
            reason = _disk_problem(path) or problem
            with contextlib.suppress(OSError):
                path.unlink()  # which also makes room to say so
            self._give_up(reason)
            return False

    def _give_up(self, problem: Exception) -> None:
        """Stop writing and report it once; the user's program continues."""
        if not self._broken:
            self._broken = True
            reason = problem.strerror if isinstance(problem, OSError) else None
            sentence = f"the ait tree is incomplete from here on: {reason or problem}"
            print_to_stderr(sentence)
            self.event("disk", sentence)

    def _append_events(self, lines: list[str]) -> None:
        if not lines or self._folder is None:
            return
        try:
            with OwnedFile(self._folder / EVENTS) as file:
                file.append_all("".join(line + "\n" for line in lines).encode())
        except OSError as problem:
            self._give_up(problem)

    def _write_tree(self) -> None:
        if self._tree is None or self._folder is None:
            return
        try:
            text = json.dumps(model_tree(self._tree), indent=2)
            write_file(self._folder / "model_tree.json", f"{text}\n".encode())
        except OSError as problem:
            self._give_up(problem)


class _Stream:
    """The stream that torch writes a file to. It never raises, because torch calls it from C, which
    cannot pass on an exception.

    Attributes:
        problem: Why writing stopped; None if there was no problem.
    """

    def __init__(self, file: OwnedFile) -> None:
        self._file = file
        self._small = bytearray()
        self.problem: OSError | None = None

    def write(self, data: bytes) -> int:
        # Torch writes some thirty pieces of a few bytes for each tensor.
        if len(self._small) + len(data) > _SMALL:
            self.flush()
        if len(data) > _SMALL:
            self._append(data)
        else:
            self._small += data
        return len(data)

    def flush(self) -> None:
        small, self._small = self._small, bytearray()
        self._append(small)

    def _append(self, data: bytes | bytearray) -> None:
        if self.problem is None:
            try:
                self._file.append_all(data)
            except OSError as problem:
                self.problem = problem


def _disk_problem(path: Path) -> OSError | None:
    """The system's error for a file that torch could not write; torch's message has no reason."""
    try:
        with OwnedFile(path) as file:
            file.append_all(b"\0" * (1 << 16))
    except OSError as problem:
        return problem
    return None


def model_tree(topology: Mapping[str, JSON]) -> dict[str, Any]:
    """The original's `model_tree.json` from a run's topology: name, type, children, in order of
    registration.

    Further models of a process are in an additional list, `more`.
    """
    roots = [_tree_node(root) for root in _nodes(topology.get("roots"))]
    if not roots:
        return {"name": ROOT, "type": "", "children": []}
    first = roots[0]
    return {**first, "more": roots[1:]} if len(roots) > 1 else first


def _tree_node(node: Mapping[str, JSON]) -> dict[str, Any]:
    return {
        "name": module_folder(str(node["site"])),
        "type": str(node["class"]),
        "children": [_tree_node(child) for child in _nodes(node.get("children"))],
    }


def _nodes(value: JSON) -> Sequence[Mapping[str, JSON]]:
    return cast("Sequence[Mapping[str, JSON]]", value or ())


def _main_device(device: str) -> str:
    """The device in the folder's name: the accelerator, even if the first tensor is on the CPU."""
    if device not in ("", "cpu"):
        return device
    torch = sys.modules.get("torch")
    if torch is None:
        return "cpu"
    from driftline.captures.torch.device.accelerator import accelerator

    # None if the program has not used the accelerator yet: asking would create a context.
    used = accelerator()
    return "cpu" if used is None else f"{used[0]}{used[1].current_device()}"


def _tensor(record: Record, data: Bytes) -> Any | None:
    """A plain CPU tensor that owns exactly its bytes; None if torch has no such dtype."""
    torch: Any = sys.modules["torch"]
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    shape = record.shape if record.kept == "full" else (-1,)
    if data.nbytes == 0:
        return torch.empty(record.shape, dtype=dtype)
    # A copy: `torch.save` of a view would write its whole storage.
    owned = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8)
    try:
        return owned.view(dtype).reshape(shape)
    except RuntimeError:  # packed formats: the shape counts elements, not bytes
        return None
