"""What lies on disk after a launched program has ended, counted; for either layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from driftline.errors import DriftlineError
from driftline.launch.plan import CapturePlan

QUIET_EVENTS = frozenset({"step", "label", "no-match", "steps-skipped", "estimate"})
"""Events that the summary says in its own words, or that are for the reader of the run only."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """A dump in numbers.

    Attributes:
        tensors: Captured tensors.
        bytes: What their values take, repeats not counted.
        processes: Names of the processes' folders (`rank0`, `rank0.p1`, `cpu_4711`).
        steps: Steps that have tensors.
        topologies: How many processes left a module tree.
        events: Sentences worth showing, each once.
    """

    tensors: int = 0
    bytes: int = 0
    processes: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    topologies: int = 0
    events: tuple[str, ...] = ()


def gather(plan: CapturePlan) -> Harvest:
    """Count what a plan's program left."""
    output = Path(plan.output)
    if plan.layout == "ait":
        return _gather_tree(output / "ait_dump" / "torch_tensors")
    if not output.is_dir():
        return Harvest()
    return _gather_run(output)


def _gather_run(output: Path) -> Harvest:
    from driftline.runs.layout import TOPOLOGY
    from driftline.runs.reader import open_run

    try:
        run = open_run(output)
    except DriftlineError as problem:
        return Harvest(events=(str(problem),))
    folders = sorted(path.parent.name for path in output.glob("rank*/index.jsonl"))
    stored = {(r.key.rank, r.key.process, r.blob) for r in run.records if r.blob is not None}
    messages = [e for e in run.events() if str(e.get("kind")) not in QUIET_EVENTS]
    return Harvest(
        tensors=len(run),
        bytes=sum(blob.length for _, _, blob in stored),
        processes=tuple(folders),
        steps=tuple(sorted({record.key.step for record in run.records})),
        topologies=len(list(output.glob(f"rank*/{TOPOLOGY}"))),
        events=tuple(
            dict.fromkeys([*(str(e.get("message")) for e in messages), *map(str, run.losses)])
        ),
    )


def _gather_tree(root: Path) -> Harvest:
    files = list(root.glob("*/*/*/*.pth"))
    return Harvest(
        tensors=len(files),
        bytes=sum(path.stat().st_size for path in files),
        processes=tuple(sorted(path.name for path in root.glob("*") if path.is_dir())),
        steps=tuple(
            sorted({int(f.parts[-3]) for f in files if f.parts[-3].isdigit()}),
        ),
        topologies=len(list(root.glob("*/model_tree.json"))),
    )
