"""Folders of experiments: their names, their JSON files, and preparing an empty one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from driftline.errors import AlreadyThere, BadInput, BadRun
from driftline.runs.provenance import MANIFEST, plain_json
from driftline.runs.run import Run

SCHEMA = 1
EXACT = "exact"
"""The reference's modules on the candidate's inputs, in wide arithmetic."""
NATIVE = "native"
"""The same in the candidate's number format: what that format costs at each module."""
REPLAY = "replay.json"
NOISE = "noise.json"
BISECT = "bisect.json"
REPEAT = "repeat.json"
_KINDS = (REPLAY, NOISE, BISECT, REPEAT)
# A guard against files of strangers: real ones have a few megabytes.
_LARGEST = 64 << 20


def make_room(place: Path, *, force: bool) -> None:
    """Prepare an empty folder; an earlier experiment in it is deleted only with `force`.

    Raises:
        AlreadyThere: Something is there that may not be replaced.
        BadInput: The folder cannot be made.
    """
    try:
        if place.exists() and not place.is_dir():
            raise AlreadyThere(f"'{place}' exists and is a file", hint="choose another folder")
        if place.is_dir() and any(place.iterdir()):
            if not force:
                raise AlreadyThere(
                    f"output folder '{place}' exists and is not empty",
                    hint="choose another one, or --force to replace the experiment in it",
                )
            if not _is_only_an_experiment(place):
                # Deleting is limited to folders that hold nothing but an experiment: a mistyped
                # path must not cost other files.
                raise AlreadyThere(
                    f"'{place}' holds other things than an experiment, so it is not replaced",
                    hint="choose another output folder",
                )
            shutil.rmtree(place)
        place.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(
            f"cannot write to '{place}': {problem.strerror or problem}",
            hint="choose an output folder that can be written",
        ) from None


def _is_only_an_experiment(place: Path) -> bool:
    return any((place / kind).is_file() for kind in _KINDS) and all(
        child.name in _KINDS or (child / MANIFEST).is_file() for child in place.iterdir()
    )


def write_json(place: Path, name: str, content: Mapping[str, Any]) -> None:
    text = json.dumps(plain_json({"schema": SCHEMA, **content}), indent=1)
    (place / name).write_text(text + "\n", encoding="utf-8")


def read_json(place: Path, name: str) -> Mapping[str, Any]:
    """The JSON document of an experiment's folder.

    Raises:
        BadRun: There is none, or it is of another kind or version.
    """
    path = place / name
    try:
        if path.stat().st_size > _LARGEST:
            raise BadRun(f"'{path}' is too large to be what its name says")
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    # Two refusals with different remedies: no such folder, or a damaged file.
    except OSError:
        raise BadRun(f"'{place}' is no folder of this experiment: it has no {name}") from None
    except ValueError as problem:
        raise BadRun(f"'{path}' is no JSON: {problem}") from None
    if not isinstance(parsed, dict):
        raise BadRun(f"'{path}' is no JSON object")
    content = cast("dict[str, Any]", parsed)
    if content.get("schema") != SCHEMA:
        raise BadRun(f"'{path}' has schema {content.get('schema')!r}, this version reads {SCHEMA}")
    return content


def identity(run: Run, path: Path) -> dict[str, Any]:
    """What identifies a run: its id, and a digest of all its tensors' digests."""
    digest = hashlib.sha256()
    for record in run.records:
        digest.update(f"{record.key}\0{record.digest}\n".encode())
    return {
        "path": str(path.absolute()),
        "id": run.manifest.get("id"),
        "digest": f"sha256:{digest.hexdigest()}",
        "tensors": len(run),
    }
