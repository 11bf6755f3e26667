"""What the ATB probe left of a launched program, counted through the reader of its dumps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from driftline.errors import DriftlineError
from driftline.launch.plan import CapturePlan

_BESIDE = {
    "model": "model topology",
    "layer": "layer topology",
    "operation_io_tensors": "operation csv",
    "kernel_io_tensors": "kernel csv",
    "cpu_profiling": "cpu profile",
    "tiling": "tiling data",
}


@dataclass(frozen=True, slots=True)
class AtbHarvest:
    """The probe's dumps in numbers.

    Attributes:
        roots: Their folders; several when processes of one program wrote several.
        tensors: Tensors in all of them.
        bytes: What the values of these take.
        devices: Device numbers.
        steps: Executions that have tensors.
        beside: What else was written, in words.
        trouble: Sentences about dumps that could not be read.
    """

    roots: tuple[Path, ...] = ()
    tensors: int = 0
    bytes: int = 0
    devices: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    beside: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


def gather_atb(plan: CapturePlan, already: frozenset[Path]) -> AtbHarvest:
    """Count what the probe wrote below the plan's output.

    Args:
        already: What `dumps_in` found before the program ran, and is not its work.
    """
    from driftline.formats.opening import open_run

    roots = tuple(path for path in dumps_in(Path(plan.output)) if path not in already)
    tensors, size = 0, 0
    devices: set[int] = set()
    steps: set[int] = set()
    trouble: list[str] = []
    for root in roots:
        if not any((root / name).is_dir() for name in ("tensors", "data")):
            continue  # topology or profiling only
        try:
            run = open_run(root)
        except DriftlineError as problem:
            trouble.append(str(problem))
            continue
        tensors += len(run)
        for record in run.records:
            devices.add(record.key.rank)
            steps.add(record.key.step)
            size += record.blob.length if record.blob is not None else 0
        if run.losses:
            trouble.append(f"{len(run.losses)} tensors cannot be read, {run.losses[0]} the first")
    beside = [
        text for name, text in _BESIDE.items() if any(_holds_files(root / name) for root in roots)
    ]
    return AtbHarvest(
        roots,
        tensors,
        size,
        tuple(sorted(devices)),
        tuple(sorted(steps)),
        tuple(beside),
        tuple(trouble),
    )


def dumps_in(output: Path) -> list[Path]:
    """Folders below the output that a probe may have written, the output itself for the oldest."""
    from driftline.formats.atb_place import ROOTS

    if not output.is_dir():
        return []
    found = sorted(
        path
        for path in output.iterdir()
        if path.is_dir() and path.name.startswith(ROOTS) and _written_by_probe(path)
    )
    return [*found, output] if _written_by_probe(output) else found


def _written_by_probe(folder: Path) -> bool:
    return any(_holds_files(folder / name) for name in ("tensors", "data", *_BESIDE))


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_file() for path in folder.rglob("*"))
