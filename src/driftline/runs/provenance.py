"""Provenance of a run: its manifest and process facts, the git commit, and which process is writing
it.

The first process writes `run.json` once; every process writes its own `process.json`. Only
environment variables with allowed names are stored, with secrets hidden. A lock of the system on a
run's files shows that the run is being written; the lock ends with the process that holds it. This
file knows nothing about tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from driftline import __version__, settings
from driftline.errors import AlreadyThere, BadInput
from driftline.runs.files.owned_file import OwnedFile, hold, write_file
from driftline.runs.layout import FORMAT, INDEX, MANIFEST, ORPHAN_EVENTS, SCHEMA, parse_folder
from driftline.runs.redaction import redact_argv, redact_message, redact_value
from driftline.runs.sinks import JSON

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None


# Locks: no lock file remains, because a killed process's lock ends with the process. Clocks and
# process numbers are not used. On file systems without locks (some network ones), nobody is
# refused.


def hold_path(path: Path) -> int | None:
    """Open and lock a file; None if another process holds the lock. Closing the file unlocks it.

    Raises:
        OSError: The file cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hold(file):
        return file
    os.close(file)
    return None


def is_held(path: Path) -> bool | None:
    """Whether a living process holds a file's lock; None if that is unknown."""
    if fcntl is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        return False
    finally:
        os.close(file)


# Git: the commit is read from `.git` directly; git itself is started only to find changed files.


_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
# The status of a huge repository on a network disk must not delay the captured program.
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit, and whether tracked files differ from it (None if unknown)."""

    commit: str
    dirty: bool | None


def _first_line(path: Path) -> str:
    # Bounded: these files have one line, but `.git` may be anything.
    with path.open("rb") as file:
        return file.read(4096).split(b"\n")[0].decode("utf-8", "replace").strip()


def _git_folder(place: Path) -> tuple[Path, Path] | None:
    """The work tree that contains a folder, and its git folder."""
    for tree in (place, *place.parents):
        git = tree / ".git"
        if git.is_dir():
            return tree, git
        if git.is_file():  # a linked work tree or a submodule
            line = _first_line(git)
            if line.startswith("gitdir:"):
                return tree, (tree / line.removeprefix("gitdir:").strip()).resolve()
    return None


def _commit_of(git: Path) -> str:
    head = _first_line(git / "HEAD")
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = git
    # Branches of a linked work tree are stored in the main repository.
    if (git / "commondir").is_file():
        common = (git / _first_line(git / "commondir")).resolve()
    for folder in (git, common):
        if (folder / name).is_file():
            line = _first_line(folder / name)
            return line if _COMMIT.fullmatch(line) else ""
    packed = common / "packed-refs"
    if packed.is_file():
        with packed.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                commit, _, ref = line.strip().partition(" ")
                if ref == name and _COMMIT.fullmatch(commit):
                    return commit
    return ""


def _is_dirty(tree: Path) -> bool | None:
    git = shutil.which("git")
    if git is None:
        return None
    # A repository may configure programs that git would start; none of them may run.
    quiet = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks"]
    try:
        done = subprocess.run(
            [git, *quiet, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules"],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None


def revision_of(place: Path) -> Revision | None:
    """The commit checked out in the repository of a folder; None if there is no repository."""
    try:
        folders = _git_folder(place.absolute())
        if folders is None:
            return None
        commit = _commit_of(folders[1])
        return Revision(commit, _is_dirty(folders[0])) if commit else None
    except OSError:
        return None


# Manifest and process facts.


# Only these are stored, because an environment is full of secrets. Each one changes numbers or the
# placement of ranks.
_ALLOWED = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        "PYTHONHASHSEED",
        "TOKENIZERS_PARALLELISM",
        "TRANSFORMERS_OFFLINE",
        "HF_HUB_OFFLINE",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_TF32_OVERRIDE",
        "ATEN_CPU_CAPABILITY",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_ORDER",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "DRIFTLINE_KERNEL",
    }
)
_ALLOWED_PREFIXES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "ONEDNN_",
    "DNNL_",
    "TORCH",
    "PYTORCH_",
    "NCCL_",
    "GLOO_",
    "HCCL_",
    "ASCEND_",
    "CUBLAS_",
    "CUDNN_",
    "TRITON_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "XLA_",
    "FLAGS_",
)
# Versions of loaded modules only: a library that was not imported had no part in the numbers.
_LIBRARIES = (
    "torch",
    "numpy",
    "transformers",
    "torch_npu",
    "torchvision",
    "paddle",
    "onnxruntime",
    "vllm",
)
_LONGEST_VALUE = 500


def allowed_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that change numbers or placement, with secrets hidden."""
    everything = settings.environment() if variables is None else variables
    return {
        name: redact_value(name, everything[name])[:_LONGEST_VALUE]
        for name in sorted(everything)
        if name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)
    }


def library_versions() -> dict[str, str]:
    """Versions of the libraries that the program has imported so far."""
    versions: dict[str, str] = {}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    return versions


def plain_json(value: object, depth: int = 0) -> JSON:
    """A value that JSON can hold: non-finite numbers and unknown types become strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    # Cycles and excessive nesting in a program's values end here.
    if depth > 200:
        return "..."
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(k): plain_json(v, depth + 1) for k, v in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(v, depth + 1) for v in cast("Sequence[object]", value)]
    return str(value)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # somebody deleted it
        return None


def _without_home(path: Path) -> str:
    # The name of the user's home folder does not belong in a bug report.
    try:
        return "~/" + path.relative_to(Path.home()).as_posix()
    except (ValueError, RuntimeError):
        return str(path)


def provenance(command: Sequence[str] | None = None, *, world_size: int = 1) -> dict[str, JSON]:
    """The content of a new `run.json`.

    Args:
        command: The user's command; by default this process's own command line.
        world_size: Number of ranks of the job, as far as known.
    """
    place = _working_folder()
    revision = revision_of(place) if place else None
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "id": uuid.uuid4().hex,
        "created": now(),
        "driftline": __version__,
        "command": cast("JSON", redact_argv(command if command is not None else own_command())),
        "cwd": _without_home(place) if place else "",
        "git": {"commit": revision.commit, "dirty": revision.dirty} if revision else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "versions": cast("JSON", library_versions()),
        "world_size": world_size,
        "environment": cast("JSON", allowed_environment()),
        **({"job": job} if (job := settings.job_id()) else {}),
    }


def own_command() -> list[str]:
    """This process's command line as it was started, with the interpreter and its options."""
    original = getattr(sys, "orig_argv", None)
    return list(original or sys.argv)


def process_facts(rank: int, process: int, world_size: int) -> dict[str, JSON]:
    """The first content of a `process.json`."""
    return {
        "schema": SCHEMA,
        "rank": rank,
        "process": process,
        "world_size": world_size,
        "pid": os.getpid(),
        "started": now(),
        "sealed": False,
        "command": cast("JSON", redact_argv(own_command())),
        "python": platform.python_version(),
        "versions": cast("JSON", library_versions()),
        "environment": cast("JSON", allowed_environment()),
    }


def dump_json(value: Mapping[str, JSON]) -> bytes:
    return (json.dumps(plain_json(value), indent=1, allow_nan=False) + "\n").encode("ascii")


def write_new(path: Path, content: bytes) -> bool:
    """Create a file with its complete content; returns False if another process was first."""
    # The complete file is linked into place: a hard link fails if the name exists, a rename does
    # not.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        write_file(draft, content)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            try:
                with OwnedFile(path, "new") as file:
                    file.append_all(content)
            except FileExistsError:
                return False
        return True
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def ensure_manifest(
    path: Path, command: Sequence[str] | None = None, *, world_size: int = 1
) -> None:
    """Create the run's folder and its `run.json`, unless they exist.

    Raises:
        OSError: The folder cannot be created or written.
    """
    if (path / MANIFEST).exists():
        return
    # Collected before the folder is created: a kill in between would leave an empty folder.
    manifest = dump_json(provenance(command, world_size=world_size))
    path.mkdir(parents=True, exist_ok=True)
    write_new(path / MANIFEST, manifest)


def create_run(
    path: str | os.PathLike[str],
    *,
    command: Sequence[str] | None = None,
    force: bool = False,
    world_size: int = 1,
) -> Path:
    """Start a new run: a folder with a manifest, in which any number of processes can write.

    Args:
        force: Replace an existing run. A folder that is not a run is never deleted.

    Raises:
        AlreadyThere: The folder is not empty and may not be replaced, or a process is writing it.
        BadInput: The folder cannot be created or written.
    """
    place = Path(path)
    refuse_addresses(path)
    try:
        # Collected before the folder is created: a kill in between would leave an empty folder.
        manifest = dump_json(provenance(command, world_size=world_size))
        if check_room(place, force=force):
            refuse_living(place)
            # The folder itself stays: it may be a mount or a link, and others may watch it.
            for child in list(place.iterdir()):
                shutil.rmtree(
                    child
                ) if child.is_dir() and not child.is_symlink() else child.unlink()
        place.mkdir(parents=True, exist_ok=True)
        if not write_new(place / MANIFEST, manifest):
            raise AlreadyThere(
                f"another program has begun a run in '{place}' at the same moment",
                hint="choose another output folder",
            )
    except OSError as error:
        raise BadInput(
            f"cannot write a run to '{place}': {error.strerror or error}",
            hint="choose an output folder that can be written",
        ) from None
    return place


def refuse_addresses(path: str | os.PathLike[str]) -> None:
    """Refuse an address, because a capture writes to a local folder.

    Raises:
        BadInput: The path is an address.
    """
    if "://" in os.fspath(path):
        raise BadInput(
            "a run is written to a folder of this machine first",
            hint="`driftline dump -o URL` sends it while the program runs, `driftline push FOLDER "
            "URL` afterwards",
        )


def refuse_living(place: Path) -> None:
    """Refuse to replace a run that a living process is writing.

    Raises:
        AlreadyThere: A process is writing the run.
    """
    files = [place / MANIFEST, *(child / INDEX for child in place.iterdir())]
    for file in files:
        if is_held(file):
            raise AlreadyThere(
                f"'{place}' is being written by a program that is still running",
                hint="choose another output folder, or wait until it has ended",
            )


def check_room(place: Path, *, force: bool) -> bool:
    """Whether a folder holds a run that may be replaced; False if it is empty or missing.

    Raises:
        AlreadyThere: The folder holds something that may not be replaced.
    """
    if place.exists() and not place.is_dir():
        raise AlreadyThere(f"'{place}' exists and is a file", hint="choose another output folder")
    if not place.is_dir() or not any(place.iterdir()):
        return False
    if not force:
        raise AlreadyThere(
            f"output folder '{place}' exists and is not empty",
            hint="choose another one, or --force to replace the run in it",
        )
    # --force must never delete a home folder that was given by mistake.
    if not _is_only_a_run(place):
        raise AlreadyThere(
            f"'{place}' holds other things than a run, so it is not replaced",
            hint="choose another output folder",
        )
    return True


def _is_only_a_run(place: Path) -> bool:
    names = [child.name for child in place.iterdir()]
    files = (MANIFEST, ORPHAN_EVENTS)
    return MANIFEST in names and all(
        name in files or name.startswith(f".{MANIFEST}.") or parse_folder(name) is not None
        for name in names
    )


def event_line(kind: str, message: str, order: int, details: Mapping[str, Any]) -> bytes:
    """One line of `events.jsonl`."""
    line: dict[str, JSON] = {
        "time": round(time.time(), 3),
        "kind": kind,
        "message": redact_message(message),
        "order": order,
    }
    if details:
        line["details"] = plain_json(details)
    return (json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n").encode("ascii")
