"""Use the vendor's probe for programs of the Ascend Transformer Boost library, next to our capture.

This file finds the probe library that has the program's ABI, sets the probe's environment variables
from a capture plan, and counts what the probe wrote. It never loads the probe, but only names it in
`LD_PRELOAD`.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from driftline import settings
from driftline.captures.launch.jobs import LOG_LEVELS, CapturePlan
from driftline.errors import BadInput, DriftlineError

# Section type SHT_DYNSYM of the ELF specification.
_DYNSYM = 11
# Limits, in case a damaged file claims to have billions of entries.
_MOST_SECTIONS = 4096
_MOST_SYMBOLS = 4_000_000


def dynamic_names(library: Path) -> Iterator[bytes]:
    """Every name in `.dynsym`; none if the file is not a 64-bit little-endian ELF file.

    Raises:
        OSError: The file cannot be read.
    """
    with library.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            return iter(())
    with data:
        try:
            return iter(list(_names(data)))
        except (struct.error, IndexError, OverflowError):  # the file is cut off or damaged
            return iter(())


def _names(data: mmap.mmap) -> Iterator[bytes]:
    # Magic number, 64 bit, little endian, as in the vendor's libraries.
    if data[:6] != b"\x7fELF\x02\x01":
        return
    # Offsets of the ELF header: the section table, then its entry size and count.
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + index * size)
        for index in range(min(count, _MOST_SECTIONS))
    ]
    for section in sections:
        _, kind, _, _, offset, length, link, _, _, entry_size = section
        if kind != _DYNSYM or not entry_size:
            continue
        strings, room = sections[link][4], sections[link][5]
        for index in range(min(length // entry_size, _MOST_SYMBOLS)):
            (name,) = struct.unpack_from("<I", data, offset + index * entry_size)
            if name < room:
                start = strings + name
                yield data[start : max(start, data.find(b"\0", start, strings + room))]


# Finding the probe and setting its options.


PROBES = Path("tools", "ait_backend", "dump")
"""Folder of the probes in a toolkit."""
# The probe reads signed 32-bit numbers, and cannot express an open range.
_LAST_EXECUTION = 2**31 - 1
_RANGE = re.compile(r"(\d+)(?:(-)(\d*))?")
_TORCH_ONLY = ("sites", "classes", "ports", "ranks")
_OPTION = {"sites": "--site", "classes": "--class", "ports": "--port", "ranks": "--rank"}


class NoProbe(BadInput):
    """There is no probe library, or none that can be trusted."""


def find_probe(env: Mapping[str, str]) -> Path:
    """The probe library built for the ABI of the program's `libatb.so`.

    Raises:
        NoProbe: It is not in the toolkit's folder, or another user can replace it.
    """
    toolkit = Path(env.get(settings.ASCEND_TOOLKIT) or settings.ASCEND_TOOLKIT_DEFAULT)
    name = f"libatb_probe_abi{_abi(env)}.so"
    probe = toolkit / PROBES / name
    where = f"looked for in {probe.parent}, by {settings.ASCEND_TOOLKIT}"
    if not env.get(settings.ASCEND_TOOLKIT):
        where += ", which is not set"
    try:
        facts = probe.stat()
    except OSError:
        raise NoProbe(
            f"there is no probe library {name}; {where}",
            hint=f"source the toolkit's set_env.sh, or set {settings.ASCEND_TOOLKIT}",
        ) from None
    if not stat.S_ISREG(facts.st_mode):
        raise NoProbe(
            f"{probe} is no library file",
            hint=f"set {settings.ASCEND_TOOLKIT} to the toolkit's folder",
        )
    # If others can replace the library, their code would run inside the user's program.
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoProbe(
            f"{probe} can be written by others than its owner, so it is not loaded",
            hint=f"chmod go-w {probe}",
        )
    if facts.st_uid not in (0, os.getuid()):
        raise NoProbe(
            f"{probe} belongs to another user, so it is not loaded",
            hint="install the toolkit as root or as yourself",
        )
    # The dynamic loader splits LD_PRELOAD at both characters.
    if ":" in str(probe) or " " in str(probe):
        raise NoProbe(
            f"the loader cannot be given a path with a blank or a colon: {probe}",
            hint=f"set {settings.ASCEND_TOOLKIT} to a link without them",
        )
    return probe


def _abi(env: Mapping[str, str]) -> int:
    """1 if the library passes C++11 strings to its probe according to its symbols; otherwise 0."""
    home = env.get(settings.ATB_HOME)
    if not home:
        raise NoProbe(
            f"{settings.ATB_HOME} is not set, so the library and its ABI are unknown",
            hint="source the library's set_env.sh first",
        )
    library = Path(home) / "lib" / "libatb.so"
    try:
        names = dynamic_names(library)
    except OSError as problem:
        raise NoProbe(
            f"cannot read {library}: {problem.strerror or problem}",
            hint=f"does {settings.ATB_HOME} point at the library's folder?",
        ) from None
    return int(any(b"Probe" in name and b"cxx11" in name for name in names))


def atb_environment(
    plan: CapturePlan, base: Mapping[str, str], probe: Path, *, timestamp: str
) -> dict[str, str]:
    """The program's environment with the probe's options in it.

    Args:
        plan: What to capture.
        base: The environment so far; libraries that it preloads are kept.
        probe: The probe library.
        timestamp: For output folders whose name contains one: `YYYYmmdd_HHMMSS`.
    """
    chosen = plan.selection
    order = {
        "ATB_SAVE_TENSOR": "2" if plan.reduction.kept == "describe" else "1",
        "ATB_SAVE_TENSOR_TIME": "1" if chosen.time is None else str(chosen.time),
        "ATB_SAVE_TENSOR_RANGE": ",".join(f"{a},{b}" for a, b in _ranges(chosen.steps)),
        "ATB_SAVE_CHILD": str(int(chosen.children)),
        "ATB_SAVE_TENSOR_PART": str(chosen.part),
        "ATB_SAVE_TILING": str(int(plan.tiling)),
        "ATB_SAVE_CPU_PROFILING": str(int("cpu_profiling" in plan.types)),
        "ATB_DUMP_TYPE": "|".join(kind for kind in plan.types if kind != "onnx"),
        "ATB_OUTPUT_DIR": plan.output.rstrip("/") + "/",
        "ATB_AIT_LOG_LEVEL": str(LOG_LEVELS.index(plan.log_level)),
        "ATB_CUR_PID": str(os.getpid()),
        "ATB_TIMESTAMP": timestamp,
    }
    # Inputs before the call, outputs after it. The older probe needs ATB_SAVE_TENSOR_TIME as well,
    # the newer one only this variable.
    if chosen.time is None:
        order["ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER"] = "1"
    if chosen.ids:
        order["ATB_SAVE_TENSOR_IDS"] = ",".join(chosen.ids)
    if chosen.opnames:
        order["ATB_SAVE_TENSOR_RUNNER"] = ",".join(name.lower() for name in chosen.opnames)
    if chosen.device is not None:
        order["ATB_DEVICE_ID"] = str(chosen.device)
    if plan.reduction.kept == "summary":
        order["ATB_SAVE_TENSOR_STATISTICS"] = "1"
    # A variable left over in the user's shell would filter tensors that the plan does not filter.
    env = {name: value for name, value in base.items() if name not in _OURS}
    preloaded = env.get("LD_PRELOAD", "")
    # The probe comes first, so that its functions precede those of other preloaded libraries.
    env["LD_PRELOAD"] = f"{probe}:{preloaded}" if preloaded else str(probe)
    return env | order


_OURS = frozenset(
    {
        "ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER",
        "ATB_SAVE_TENSOR_IDS",
        "ATB_SAVE_TENSOR_RUNNER",
        "ATB_DEVICE_ID",
        "ATB_SAVE_TENSOR_STATISTICS",
        "ATB_SAVE_SYMLINK",
        "ATB_DUMP_CONFIG",
    }
)
"""Options of the probe that we set only sometimes, or never."""


def not_for_the_probe(plan: CapturePlan) -> list[str]:
    """Sentences about options of the plan that the probe does not support."""
    chosen = plan.selection
    notes = [
        f"{_OPTION[name]} selects what torch captures; the ATB probe does not know it"
        for name in _TORCH_ONLY
        if getattr(chosen, name)
    ]
    if plan.reduction.kept in ("digest", "sample"):
        notes.append(f"the ATB probe cannot keep '{plan.reduction}', so it keeps whole tensors")
    if plan.max_bytes:
        notes.append("--max-bytes limits what torch captures; the ATB probe has no limit")
    return notes


def _ranges(steps: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges of executions as pairs of first and last.

    Raises:
        BadInput: A pattern is not a range.
    """
    if not steps:
        return [(0, _LAST_EXECUTION)]
    pairs: list[tuple[int, int]] = []
    for pattern in steps:
        match = _RANGE.fullmatch(pattern)
        if match is None:
            raise BadInput(
                f"the ATB probe takes ranges of executions, not the pattern '{pattern}'",
                hint="write --step 3-5, or -er 3,5",
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or _LAST_EXECUTION)
        pairs.append((first, last))
    return pairs


# Dumps of the probe, counted with the reader for its format.


_BESIDE = {
    "model": "model topology",
    "layer": "layer topology",
    "operation_io_tensors": "operation csv",
    "kernel_io_tensors": "kernel csv",
    "cpu_profiling": "cpu profile",
    "tiling": "tiling data",
}


_VALUES = ("tensors", "data")
"""Folders in which probes store tensors."""


@dataclass(frozen=True, slots=True)
class AtbHarvest:
    """Counts of the probe's dumps.

    Attributes:
        roots: Folders of the dumps; processes of one program may write several.
        tensors: Number of tensors in all dumps.
        bytes: Size of their values.
        devices: Device numbers.
        steps: Executions that have tensors.
        also_written: Descriptions of other files that were written.
        trouble: Sentences about dumps that could not be read.
    """

    roots: tuple[Path, ...] = ()
    tensors: int = 0
    bytes: int = 0
    devices: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    also_written: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


def gather_atb(plan: CapturePlan, already: frozenset[Path]) -> AtbHarvest:
    """Count what the probe wrote below the plan's output.

    Args:
        plan: The plan.
        already: `process_folders` before the program ran; these are not counted.
    """
    from driftline.formats.registry import open_run

    dumps = dumps_in(Path(plan.output))
    roots = tuple(root for root in dumps if _process_folders_of(root) - already)
    tensors, size = 0, 0
    devices: set[int] = set()
    steps: set[int] = set()
    trouble: list[str] = []
    for folder in (folder for root in roots for folder in _folders_to_count(root, already)):
        try:
            run = open_run(folder)
        except DriftlineError as problem:
            trouble.append(str(problem))
            continue
        tensors += len(run)
        for record in run.records:
            devices.add(record.key.rank)
            steps.add(record.key.step)
            # Tensors that the probe only described have no bytes.
            size += record.blob.length if record.blob is not None else 0
        if run.losses:
            trouble.append(f"{len(run.losses)} tensors cannot be read, {run.losses[0]} the first")
    also_written = [
        text for name, text in _BESIDE.items() if any(_holds_files(root / name) for root in roots)
    ]
    return AtbHarvest(
        roots,
        tensors,
        size,
        tuple(sorted(devices)),
        tuple(sorted(steps)),
        tuple(also_written),
        tuple(trouble),
    )


def dumps_in(output: Path) -> list[Path]:
    """Folders in the output that a probe may have written.

    The oldest probes write into the output itself, which then comes last.
    """
    from driftline.formats.ascend.atb.folders import ROOTS

    if not output.is_dir():
        return []
    dumps = sorted(
        path
        for path in output.iterdir()
        if path.is_dir() and path.name.startswith(ROOTS) and _written_by_probe(path)
    )
    return [*dumps, output] if _written_by_probe(output) else dumps


def process_folders(output: Path) -> frozenset[Path]:
    """The folders of single processes in all dumps in the output."""
    return frozenset(path for root in dumps_in(output) for path in _process_folders_of(root))


def _process_folders_of(root: Path) -> frozenset[Path]:
    kinds = (root / name for name in (*_VALUES, *_BESIDE))
    folders = (path for kind in kinds if kind.is_dir() for path in kind.iterdir())
    return frozenset(path for path in folders if path.is_file() or _holds_files(path))


def _folders_to_count(root: Path, already: frozenset[Path]) -> list[Path]:
    """The dump itself if all of it is new; otherwise its new processes.

    A probe may add processes to an earlier dump.
    """
    folders = {path for path in _process_folders_of(root) if path.parent.name in _VALUES}
    if not folders:
        return []  # topology or profiling only
    return [root] if not folders & already else sorted(folders - already)


def _written_by_probe(folder: Path) -> bool:
    return any(_holds_files(folder / name) for name in (*_VALUES, *_BESIDE))


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_file() for path in folder.rglob("*"))
