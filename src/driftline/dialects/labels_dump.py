"""The file behind a `tensor_path`: where the two oldest Ascend libraries put it, how it is read.

    $ACLTRANSFORMER_HOME_PATH/tensors/{pid}/{task id}/{tensor_path}
    $ASDOPS_LOG_TO_FILE_DIR/tensors/thread_{pid}/{token}/{tensor_path}

A relative path never leads out of the folder it is looked for in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline import settings
from driftline.dialects.labels_store import Label
from driftline.errors import BadFile, BadInput
from driftline.formats.opening import open_file
from driftline.numerics.dtypes import DTYPES


class Dumped(NamedTuple):
    """A tensor of somebody's file."""

    dtype: str
    shape: tuple[int, ...]
    trouble: str
    fetch: Any


def find_dumped(label: Label) -> Path:
    """The file that a label's `tensor_path` names.

    Raises:
        BadInput: It is in none of the folders; the sentence lists them.
    """
    given = Path(label.tensor_path)
    if given.is_absolute():
        if given.is_file():
            return given
        raise BadInput(f"{given} does not exist")
    looked: list[str] = []
    for folder in _folders(label):
        path = folder / given
        looked.append(str(path))
        if _inside(folder, path):
            return path
    if logs := label.roots.get(settings.ACL_LOGS):
        tokens = Path(logs, "tensors", f"thread_{label.pid}")
        found = [each for each in _below_a_token(tokens, given) if _inside(tokens, each)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.relative_to(tokens).parts[0] for each in found[:8])
            raise BadInput(
                f"{len(found)} tokens have {given} (in {tokens}: {names}); "
                f"begin tensor_path with one of them"
            )
        looked.append(str(tokens / "*" / given))
    raise BadInput(f"{given} does not exist; looked for {', '.join(looked)}")


def _folders(label: Label) -> Iterator[Path]:
    if home := label.roots.get(settings.ACL_HOME):
        yield Path(home, "tensors", str(label.pid), label.task)
        yield Path(home, "tensors", str(label.pid))
    if logs := label.roots.get(settings.ACL_LOGS):
        yield Path(logs, "tensors", f"thread_{label.pid}", label.task)
        yield Path(logs, "tensors", f"thread_{label.pid}")
    yield Path(label.folder)


def _below_a_token(folder: Path, given: PurePath) -> Iterator[Path]:
    if folder.is_dir():
        for token in sorted(folder.iterdir(), key=lambda each: (len(each.name), each.name)):
            yield token / given


def _inside(folder: Path, path: Path) -> bool:
    try:
        return path.is_file() and path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def read_dumped(path: Path, expected: tuple[str, tuple[int, ...]] | None) -> Dumped:
    """A file of one tensor, in any format driftline reads; else bytes of the partner's type.

    Raises:
        DriftlineError: It cannot be read, or its size fits nothing that is known.
    """
    try:
        run = open_file(path)
    except BadFile as refused:
        # Only what nobody recognises may be bare bytes; a damaged file of a format stays refused.
        with path.open("rb") as stream:
            start = stream.read(9)
        if expected is None or start == b"$Version=":
            raise
        return _raw(path, expected, refused)
    if len(run) != 1:
        raise BadFile(f"{path} holds {len(run)} tensors, not one")
    record = run.records[0]
    known = record.dtype in DTYPES
    trouble = run.lost(record)
    if not trouble and record.kept != "full":
        trouble = f"{path} holds a description of the tensor and no values"
    return Dumped(record.dtype if known else "", record.shape, trouble, partial(run.raw, record))


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
    if not path.stat().st_size:
        return np.empty(0, storage)
    return np.memmap(path, np.uint8, "r").view(np.ndarray).view(storage)
