"""What lies on disk after a launched program has ended, counted; for either layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.errors import DriftlineError
from driftline.launch.plan import CapturePlan

if TYPE_CHECKING:
    from driftline.runs.run import Loss

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
        refused: Why what lies there is no run that can be used, and what to do; empty if it is.
    """

    tensors: int = 0
    bytes: int = 0
    processes: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    topologies: int = 0
    events: tuple[str, ...] = ()
    refused: tuple[str, str] = ("", "")


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
        return Harvest(refused=(str(problem), problem.hint))
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
            dict.fromkeys([*(str(e.get("message")) for e in messages), *_in_short(run.losses)])
        ),
    )


def _in_short(losses: Sequence[Loss]) -> Iterable[str]:
    """Tensors lost for one reason are one sentence here; `show` lists them."""
    alike: dict[str, list[Loss]] = {}
    for loss in losses:
        if loss.key is not None:
            alike.setdefault(loss.reason, []).append(loss)
    for reason, those in alike.items():
        if len(those) == 1:
            yield str(those[0])
        else:
            yield f"{len(those)} tensors without values, {those[0].where} the first: {reason}"
    yield from (str(loss) for loss in losses if loss.key is None)


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
        events=tuple(dict.fromkeys(_events_of_tree(root))),
    )


def _events_of_tree(root: Path) -> Iterable[str]:
    for path in sorted(root.glob("*/driftline_events.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event: Any = json.loads(line)
            except ValueError:  # cut off by a kill or a full disk
                continue
            if str(event.get("kind")) not in QUIET_EVENTS:
                yield str(event.get("message"))
