"""Labels on disk, and the files of the Ascend library that labels point to.

    {store}/labels-{pid}-{random}.jsonl                    one per process: no file is shared
    {store}/{pta|acl}_tensor/{id}_{pid}-{random}_{n}.safetensors

Each label is one JSON line and at most one tensor file, appended and never rewritten. The line is
written after its tensor, in one piece, so a killed process leaves only complete labels. Which
labels are compared is decided in `report`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline import settings
from driftline.errors import BadFile, BadInput
from driftline.formats.registry import open_file
from driftline.formats.tensors import safetensors
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.local_files import open_inside, reason_of
from driftline.runs.files.mapped_file import map_range
from driftline.runs.files.owned_file import OwnedFile

STORE = "cmp_dump_data"
_LINES = "labels-*.jsonl"
_STRANGE = re.compile(r"[^\w.-]+")
# A damaged file without line ends must not fill the memory.
_LONGEST_LINE = 1 << 20


class Value(NamedTuple):
    """A tensor's bytes in C order, and what they mean."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class Label(NamedTuple):
    """One call of `set_label`.

    Attributes:
        task: The round it belongs to; empty when `set_task_id` was never called.
        source: pta or acl.
        data_id: As the caller gave it.
        time: Nanoseconds of the day it was set.
        process: The process that set it, `{pid}-{random}`.
        number: The nth label of that process.
        pid: Id of that process; the Ascend library uses it in the names of its dump folders.
        dtype: Element type; empty for a label that only names a file.
        shape: Of the value.
        file: The value's file, inside the store; empty for a label that only names a file.
        tensor_path: As the caller gave it.
        roots: The dump folders that were set at that time, by the name of their variable.
        folder: The working directory at that time.
    """

    task: str
    source: str
    data_id: str
    time: int
    process: str
    number: int
    pid: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    tensor_path: str = ""
    roots: Mapping[str, str] = {}
    folder: str = ""


class LabelWriter:
    """Writes the labels of one process. Not thread-safe: the caller holds a lock."""

    def __init__(self, folder: Path) -> None:
        """Create the store if it does not exist.

        Raises:
            OSError: It cannot be written.
        """
        self.folder = folder
        self.process = f"{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = OwnedFile(folder / f"labels-{self.process}.jsonl")
        self._count = 0

    def add(
        self, task: str, source: str, data_id: str, value: Value | None, tensor_path: str
    ) -> None:
        """Write one label; its value first.

        Raises:
            OSError: The disk refuses.
        """
        number = self._count
        self._count += 1
        line: dict[str, Any] = {
            "task": task,
            "source": source,
            "id": data_id,
            "time": time.time_ns(),
            "process": self.process,
            "number": number,
            "pid": os.getpid(),
        }
        if value is not None:
            name = f"{file_stem(data_id)}_{self.process}_{number}.safetensors"
            file = f"{source}_tensor/{name}"
            _write_value(self.folder / file, value)
            line |= {"dtype": value.dtype, "shape": list(value.shape), "file": file}
        else:
            line["tensor_path"] = tensor_path
            # The Ascend library's folders are known now, and may be gone from the
            # environment later.
            line["roots"] = dict(settings.old_dump_roots())
            line["folder"] = str(Path.cwd())
        text = json.dumps(line).encode("ascii") + b"\n"
        # A short write means a full disk; the system reports it only on the next one.
        if self._lines.append(text) != len(text):
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self._lines.close()


def file_stem(text: str) -> str:
    """Text as a part of a file name: no separators, no leading dot, not too long.

    >>> file_stem("../x"), file_stem("layer 3/attn:0"), file_stem("...")
    ('x', 'layer_3_attn_0', 'label')
    """
    # Forty characters: process and number are added to make the name unique.
    return _STRANGE.sub("_", text).strip("._-")[:40] or "label"


def _write_value(path: Path, value: Value) -> None:
    """Write a safetensors file; types unknown to that format are written as bytes."""
    dtype = DTYPES[value.dtype]
    plain = dtype.safetensors != "U8" or value.dtype == "uint8"
    entry: dict[str, Any] = {
        "dtype": dtype.safetensors,
        "shape": list(value.shape) if plain else [value.data.nbytes],
        "data_offsets": [0, value.data.nbytes],
    }
    header = json.dumps({"tensor": entry}).encode("ascii")
    # safetensors wants the data aligned to eight bytes.
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(exist_ok=True)
    with OwnedFile(path, "new") as out:
        out.append_all(len(header).to_bytes(8, "little") + header)
        out.append_all(value.data.data)


def read_labels(folder: Path) -> list[Label]:
    """Every complete label of a store, in the order in which they were set.

    Invalid lines are skipped: the last line of a killed process may be cut.
    """
    labels = [label for path in sorted(folder.glob(_LINES)) for label in _lines_of(folder, path)]
    # Clocks of several processes may agree; process and number make the order definite.
    return sorted(labels, key=lambda label: (label.time, label.process, label.number))


def _lines_of(folder: Path, path: Path) -> Iterator[Label]:
    try:
        # The store may be untrusted: links must not lead out of it.
        stream = os.fdopen(open_inside(folder.resolve(), path), "rb")
    except OSError:
        return
    with stream:
        while text := stream.readline(_LONGEST_LINE):
            # A line without an end was cut by a killed process.
            if text.endswith(b"\n"):
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    yield _label(json.loads(text))


def _label(line: Any) -> Label:
    # The caller suppresses errors and skips such lines.
    if line["source"] not in ("pta", "acl"):
        raise ValueError("neither pta nor acl")
    if any(int(size) < 0 for size in line.get("shape", ())):
        raise ValueError("a negative size")
    return Label(
        task=str(line["task"]),
        source=line["source"],
        data_id=str(line["id"]),
        time=int(line["time"]),
        process=str(line["process"]),
        number=int(line["number"]),
        pid=int(line["pid"]),
        dtype=str(line.get("dtype", "")),
        shape=tuple(int(size) for size in line.get("shape", ())),
        file=str(line.get("file", "")),
        tensor_path=str(line.get("tensor_path", "")),
        roots={str(name): str(root) for name, root in dict(line.get("roots", {})).items()},
        folder=str(line.get("folder", "")),
    )


def read_value(folder: Path, label: Label) -> npt.NDArray[Any]:
    """The value of a label as a flat array of its storage type; a view of the mapped file.

    Raises:
        BadFile: The file is missing, leads out of the store, or does not fit the label.
    """
    path = folder / label.file
    try:
        # Opened once only to prove that the path stays inside the store.
        os.close(open_inside(folder.resolve(), path))
    except OSError as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from trouble
    dtype = DTYPES.get(label.dtype)
    members = safetensors.members(path)
    if dtype is None or len(members) != 1:
        raise BadFile(f"{path} is not the tensor that its label describes")
    raw = members[0].fetch().view(np.uint8)
    count = 1
    for size in label.shape:
        count *= size
    # Types that safetensors lacks are stored as bytes; their number must fit the label.
    if raw.nbytes != dtype.byte_count(count):
        raise BadFile(f"{path} has {raw.nbytes} bytes, not those of {label.dtype} {label.shape}")
    return cast("npt.NDArray[Any]", raw.view(dtype.storage))


# Files of a `tensor_path`, in the folders of two generations of the Ascend library.


class Dumped(NamedTuple):
    """A tensor of a dumped file."""

    dtype: str
    shape: tuple[int, ...]
    trouble: str
    fetch: Any


def find_dumped(label: Label) -> Path:
    """The file that a label's `tensor_path` names.

    Raises:
        BadInput: It is in none of the folders; the message lists them.
    """
    wanted = Path(label.tensor_path)
    # The user named one file; no other folder is searched.
    if wanted.is_absolute():
        if wanted.is_file():
            return wanted
        raise BadInput(f"{wanted} does not exist")
    looked: list[str] = []
    for folder in _folders(label):
        path = folder / wanted
        looked.append(str(path))
        if _inside(folder, path):
            return path
    if logs := label.roots.get(settings.ACL_LOGS):
        tokens = Path(logs, "tensors", f"thread_{label.pid}")
        matches = [match for match in _below_a_token(tokens, wanted) if _inside(tokens, match)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(match.relative_to(tokens).parts[0] for match in matches[:8])
            raise BadInput(
                f"{len(matches)} tokens have {wanted} (in {tokens}: {names}); "
                f"begin tensor_path with one of them"
            )
        looked.append(str(tokens / "*" / wanted))
    raise BadInput(f"{wanted} does not exist; looked for {', '.join(looked)}")


def _folders(label: Label) -> Iterator[Path]:
    if home := label.roots.get(settings.ACL_HOME):
        yield Path(home, "tensors", str(label.pid), label.task)
        yield Path(home, "tensors", str(label.pid))
    if logs := label.roots.get(settings.ACL_LOGS):
        yield Path(logs, "tensors", f"thread_{label.pid}", label.task)
        yield Path(logs, "tensors", f"thread_{label.pid}")
    yield Path(label.folder)


def _below_a_token(folder: Path, wanted: PurePath) -> Iterator[Path]:
    if folder.is_dir():
        # Shorter names first, so that token 2 comes before token 10.
        for token in sorted(folder.iterdir(), key=lambda entry: (len(entry.name), entry.name)):
            yield token / wanted


def _inside(folder: Path, path: Path) -> bool:
    try:
        # A tensor path such as `../../secret` must not be read.
        return path.is_file() and path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def read_dumped(path: Path, expected: tuple[str, tuple[int, ...]] | None) -> Dumped:
    """A file of one tensor, in any format of Driftline; else raw bytes of the partner's type.

    Raises:
        DriftlineError: It cannot be read, or its size does not fit.
    """
    try:
        run = open_file(path)
    except BadFile as refused:
        # Only a file of no known format may be raw bytes; a damaged file of a format is refused.
        with path.open("rb") as stream:
            start = stream.read(9)
        if expected is None or start == b"$Version=":
            raise
        return _raw(path, expected, refused)
    # A label is for one tensor; choosing one of several would be a guess.
    if len(run) != 1:
        raise BadFile(f"{path} holds {len(run)} tensors, not one")
    record = run.records[0]
    supported = record.dtype in DTYPES
    trouble = run.lost(record)
    if not trouble and record.kept != "full":
        trouble = f"{path} holds a description of the tensor and no values"
    return Dumped(
        record.dtype if supported else "", record.shape, trouble, partial(run.raw, record)
    )


def _raw(path: Path, expected: tuple[str, tuple[int, ...]], refused: BadFile) -> Dumped:
    dtype, shape = expected
    wanted = DTYPES[dtype].byte_count(math.prod(shape))
    size = path.stat().st_size
    if size != wanted:
        raise BadFile(
            f"{refused}, and as bare bytes it has {size}, not the {wanted} of the pta label's "
            f"{dtype} {list(shape)}"
        )
    return Dumped(dtype, shape, "", partial(_bytes, path, DTYPES[dtype].storage))


def _bytes(path: Path, storage: str) -> npt.NDArray[Any]:
    # An empty file cannot be mapped.
    size = path.stat().st_size
    return map_range(path, 0, size).view(storage) if size else np.empty(0, storage)
