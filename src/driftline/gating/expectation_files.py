"""Expectations on disk: one line of numbers or weight keys, and a fingerprint beside it.

Content and names are the documented ones, so that files of other tools are read: comma-separated
floats, or comma-separated sorted keys, on one line without an end. The fingerprint
(`{name}.json`) says where it was made and how far a later output may be from it; a file without one
is read too. Does not know how outputs are compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.gating.last_bits import Allowed
from driftline.gating.signature import F64

FINGERPRINT = ".json"
LONGEST_NAME = 255
LARGEST_FILE = 256 << 20
_HUB_FOLDER = re.compile(r"models--(.+)")
_UNFIT = re.compile(r"[^\w.\-\[\]=,+@]+")


class Kept(NamedTuple):
    """One expectation as it was found.

    Attributes:
        path: The file.
        content: Its line, split at the commas.
        fingerprint: What lies beside it; empty if nothing does.
    """

    path: Path
    content: tuple[str, ...]
    fingerprint: Mapping[str, Any]

    def numbers(self) -> F64:
        """The content as numbers.

        Raises:
            BadFile: One of them is none.
        """
        try:
            found = np.array([float(word) for word in self.content], np.float64)
        except ValueError:
            bad = next(word for word in self.content if not _is_number(word))
            raise BadFile(
                f"{self.path} is no signature: '{bad.strip()[:40]}' is no number",
                hint="capture it anew with --driftline-update=all",
            ) from None
        if not np.isfinite(found).all():
            raise BadFile(
                f"{self.path} holds {int((~np.isfinite(found)).sum())} numbers that are not finite"
            )
        return found

    def allowed(self) -> Allowed | None:
        """How far an output may be from it, by its fingerprint; None if that does not say."""
        said: Any = self.fingerprint.get("allowed")
        if not isinstance(said, dict):
            return None
        words = cast("dict[str, Any]", said)
        figures = [words.get(name) for name in ("largest", "rms", "moved")]
        if not all(isinstance(f, (int, float)) and 0 <= f < math.inf for f in figures):
            raise BadFile(f"{self.path}{FINGERPRINT} does not say how much is allowed")
        largest, rms, moved = (float(cast(float, figure)) for figure in figures)
        return Allowed(largest, rms, moved, str(words.get("why", "")))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def model_label(model: str) -> str:
    """What a model is called in the names of its expectations: `org--name`.

    Of a path, the last two folders: a machine's own folders do not belong into a file that others
    will read. A folder of the hub's cache goes by the id it is for.

    >>> model_label("mistralai/Mistral-7B-Instruct-v0.3")
    'mistralai--Mistral-7B-Instruct-v0.3'
    >>> model_label("/tmp/models/ibm-granite/granite-3.3-8b-instruct/")
    'ibm-granite--granite-3.3-8b-instruct'
    """
    parts = [part for part in model.strip().split("/") if part not in ("", ".", "..", "~")]
    for part in parts:
        hub = _HUB_FOLDER.fullmatch(part)
        if hub:
            return plain_name(hub[1])
    return plain_name("--".join(parts[-2:]))


def documented_label(model: str) -> str:
    """What older files call a model: the last part of its id or path."""
    return plain_name(model.strip().rstrip("/").rpartition("/")[2])


def plain_name(text: str) -> str:
    """A text as part of a file name: whatever a shell or a file system minds becomes a dash."""
    return _UNFIT.sub("-", text).strip(".") or "model"


def find(folder: Path, names: Sequence[str]) -> Kept | None:
    """The first of these expectations that is there.

    Raises:
        BadFile: It is there and cannot be read.
    """
    for name in names:
        path = folder / name
        _short_enough(path)
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise BadFile(f"{path} is too large for an expectation")
            text = path.read_text("utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as trouble:
            said = trouble.strerror if isinstance(trouble, OSError) else "it is not text"
            raise BadFile(f"the expectation {path} cannot be read: {said}") from None
        line = text.strip("\n")
        return Kept(path, tuple(line.split(",")) if line else (), _fingerprint(path))
    return None


def _fingerprint(path: Path) -> Mapping[str, Any]:
    beside = path.with_name(path.name + FINGERPRINT)
    try:
        if beside.stat().st_size > LARGEST_FILE:
            raise BadFile(f"{beside} is too large for a fingerprint")
        found: Any = json.loads(beside.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as trouble:
        said = trouble.strerror if isinstance(trouble, OSError) else "it is not valid JSON"
        raise BadFile(f"the fingerprint {beside} cannot be read: {said}") from None
    if not isinstance(found, dict):
        raise BadFile(f"the fingerprint {beside} is no JSON object")
    return cast("Mapping[str, Any]", found)


def write(
    folder: Path, name: str, content: Iterable[float | str], fingerprint: Mapping[str, Any]
) -> Path:
    """Keep an expectation. Both files appear whole or not at all.

    Raises:
        DriftlineError: The folder cannot be written to.
    """
    path = folder / name
    beside = path.with_name(path.name + FINGERPRINT)
    _short_enough(path)
    line = ",".join(word if isinstance(word, str) else repr(float(word)) for word in content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The line last: without it there is no expectation, whatever lies beside.
        _put(beside, _json(fingerprint))
        _put(path, line)
    except OSError as trouble:
        raise DriftlineError(
            f"the expectation {path} cannot be written: {trouble.strerror or trouble}",
            hint="--driftline-expectations-dir, or driftline_expectations_dir in the ini file, "
            "names the folder",
        ) from None
    return path


def _json(fingerprint: Mapping[str, Any]) -> str:
    """One line per fact: it is read by people, and its changes are looked at in reviews."""
    lines = (f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in fingerprint.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _put(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(prefix=".driftline-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(scratch).chmod(0o666 & ~umask)  # as any file of the user's, not private as scratch
        Path(scratch).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(scratch).unlink()
        raise


def _short_enough(path: Path) -> None:
    size = len((path.name + FINGERPRINT).encode())
    if size > LONGEST_NAME:
        raise BadInput(
            f"an expectation cannot be called '{path.name[:40]}…': that is {size} bytes, and "
            f"file names end at {LONGEST_NAME}",
            hint="give it a name of its own: expect(model, inputs, name='short')",
        )
