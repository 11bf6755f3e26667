"""Count what a launched program has left on disk, or explain why there is nothing.

Dumps of both layouts are counted. For an empty dump, the stages of a capture are checked in order,
and the first one that was not reached is named. This file prints nothing.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.captures.events import is_shown
from driftline.captures.launch.jobs import TORCH_LISTS, CapturePlan
from driftline.captures.launch.messages import Messages
from driftline.errors import BadInput, DriftlineError
from driftline.runs.layout import MANIFEST

if TYPE_CHECKING:
    from driftline.runs.run import Loss


@dataclass(frozen=True, slots=True)
class Harvest:
    """Counts of a dump.

    Attributes:
        tensors: Number of captured tensors.
        bytes: Size of their values; in a run, equal tensors count once.
        processes: Names of the processes' folders (`rank0`, `rank0.p1`, `cpu_4711`).
        steps: Steps that have tensors.
        topologies: Number of processes that wrote a module tree.
        events: Sentences for the user, each once.
        refused: Why the output is no usable run, and what to do; empty if it is usable.
    """

    tensors: int = 0
    bytes: int = 0
    processes: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    topologies: int = 0
    events: tuple[str, ...] = ()
    refused: tuple[str, str] = ("", "")


def process_trees(plan: CapturePlan) -> frozenset[Path]:
    """Folders of processes in ait's tree at the plan's output."""
    tree = Path(plan.output) / "ait_dump" / "torch_tensors"
    return frozenset(path for path in tree.glob("*") if path.is_dir())


def gather(plan: CapturePlan, already: frozenset[Path] = frozenset()) -> Harvest:
    """Count what the program of a plan has left on disk.

    Args:
        plan: The plan that was carried out.
        already: Folders of processes of earlier programs, which are not counted.
    """
    output = Path(plan.output)
    if plan.layout == "ait":
        return _gather_tree(process_trees(plan) - already)
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
    # Tensors of a process with equal bytes share one blob, which is counted once.
    stored = {(r.key.rank, r.key.process, r.blob) for r in run.records if r.blob is not None}
    messages = [e for e in run.events() if is_shown(str(e.get("kind")))]
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
    """Sentences about losses, one for all tensors lost for the same reason; `show` lists them."""
    alike: dict[str, list[Loss]] = {}
    for loss in losses:
        if loss.key is not None:
            alike.setdefault(loss.reason, []).append(loss)
    for reason, those in alike.items():
        if len(those) == 1:
            yield str(those[0])
        else:
            yield f"{len(those)} tensors without values, {those[0].where} the first: {reason}"
    # Losses of the manifest are left out: `explain_empty_dump` says more about an empty dump.
    yield from (str(loss) for loss in losses if loss.key is None and loss.where != MANIFEST)


def _gather_tree(processes: frozenset[Path]) -> Harvest:
    # Folders below a process: step, site, file.
    files = [path for folder in processes for path in folder.glob("*/*/*.pth")]
    sheets = [path for folder in processes for path in folder.glob("*/*/statistics.csv")]
    described = sum(len(path.read_bytes().splitlines()) - 1 for path in sheets)
    return Harvest(
        tensors=len(files) + described,
        bytes=sum(path.stat().st_size for path in files),
        processes=tuple(sorted(path.name for path in processes)),
        steps=tuple(
            sorted({int(f.parts[-3]) for f in (*files, *sheets) if f.parts[-3].isdigit()}),
        ),
        topologies=sum((folder / "model_tree.json").is_file() for folder in processes),
        events=tuple(dict.fromkeys(_events_of_tree(processes))),
    )


def _events_of_tree(processes: Iterable[Path]) -> Iterable[str]:
    for path in sorted(folder / "driftline_events.jsonl" for folder in processes):
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event: Any = json.loads(line)
            except ValueError:  # the line was cut off by a kill or a full disk
                continue
            if is_shown(str(event.get("kind"))):
                yield str(event.get("message"))


# Empty dumps: why a launched program has left nothing, and what to try.


_PACKAGES = {"paddle": "paddlepaddle"}
"""Names on PyPI of frameworks whose packages are imported under another name."""
SHOWN_STEPS = 12


_TOO_MANY_FILES = (
    f"nothing was captured: {os.strerror(errno.EMFILE).lower()} in the program, so that its run "
    "could not be written",
    "ulimit -n 4096 allows more of them; does the program close what it opens?",
)
"""The reason, and what to try, if the program left no descriptor for the run."""


def explain_empty_dump(
    plan: CapturePlan, messages: Messages, skipped: Sequence[int], unmatched: Sequence[str]
) -> tuple[str, str]:
    """The reason why a dump is empty, and what to try."""
    # The checks are in the order of a capture's stages: process, module call, tensor, filter. The
    # first stage that was not reached is the reason.
    if messages.started == 0:
        return explain_no_start(messages)
    if sum(report.calls for report in messages.reports) == 0:
        return _explain_no_call(plan, messages)
    if "torch" not in messages.frameworks and (unseen := _of_torch_only(plan)):
        return (
            f"nothing was captured: {unseen}, and this one uses "
            f"{' and '.join(messages.frameworks)}",
            "of its layers there are --level modules, gradients and params, and --type model",
        )
    # A rank that was not selected is meant to write nothing.
    wanted = [report for report in messages.reports if plan.selection.takes_rank(report.rank)]
    handed_over = sum(report.tensors for report in wanted)
    if handed_over and plan.wants_tensors:
        # The operating system's reason, such as a full disk, too many open files, no permission.
        failure = next((report.failure for report in wanted if report.failure), "")
        why = failure.removeprefix("could not be written: ")
        if os.strerror(errno.EMFILE) in why:
            return _TOO_MANY_FILES
        return (
            f"nothing was captured: none of {handed_over} tensors could be written"
            + (f" ({why})" if why else ""),
            f"make room on the disk of '{plan.output}', or choose another with -o"
            if os.strerror(errno.ENOSPC) in why
            else f"is the disk of '{plan.output}' full, or was the folder taken away?",
        )
    notes = [note for report in messages.reports for note in report.notes]
    if fault := next((note for note in notes if note.startswith("capture failed")), ""):
        if os.strerror(errno.EMFILE) in fault:
            return _TOO_MANY_FILES
        return f"nothing was captured: {fault}", "the program itself was not disturbed"
    if unmatched:
        return (
            f"nothing was captured: {unmatched[0]}",
            "driftline dump --type model lists every name",
        )
    return _explain_filters(plan, messages, skipped)


def _explain_no_call(plan: CapturePlan, messages: Messages) -> tuple[str, str]:
    """Explain an empty dump of a program that called nothing that is watched."""
    # A process without a report was killed, so its counts are unknown rather than zero.
    if len(messages.reports) < messages.started:
        return (
            "nothing was captured: the program ended before anything of it was written",
            "its own messages above say why it ended",
        )
    if "ops" in plan.levels:
        return (
            f"nothing was captured: {_imported(messages)}, but no module was called and no "
            "operator ran",
            "is this the command that runs the model?",
        )
    if plan.graph:
        return (
            f"nothing was captured: {_imported(messages)}, but no graph and no module ran",
            "does the program get to what it compiles? its own messages say why it ended",
        )
    return (
        f"nothing was captured: {_imported(messages)}, but no module was called",
        "--level ops also sees operators that run in no torch.nn.Module"
        if messages.frameworks == ("torch",)
        else "a static graph calls no layers; is this a dynamic program, and its command?",
    )


def _explain_filters(
    plan: CapturePlan, messages: Messages, skipped: Sequence[int]
) -> tuple[str, str]:
    """Explain an empty dump of a program that called modules, but no tensor was selected."""
    any_selected = any(report.steps_taken for report in messages.reports)
    if skipped and not any_selected:
        ran = say_steps(skipped)
        return (
            f"nothing was captured: {ran} ran, and none of them is selected",
            plan.advised_steps(skipped[0], skipped[-1]),
        )
    ranks = sorted({report.rank for report in messages.reports})
    if not any(plan.selection.takes_rank(rank) for rank in ranks):
        return (
            f"nothing was captured: --rank selects none of the ranks {', '.join(map(str, ranks))}",
            "leave --rank out to capture all of them",
        )
    if plan.levels == ("gradients",):
        return (
            "nothing was captured: modules were called, and no backward pass came through them",
            "--level gradients sees training only; leave it out to see what the modules compute",
        )
    filters = _filters_in_words(plan)
    return (
        "nothing was captured: modules were called, and the filters left no "
        f"{'tensor' if plan.wants_tensors else 'call'} of them"
        f" ({filters})",
        "leave one filter out at a time to see which one it is",
    )


def _of_torch_only(plan: CapturePlan) -> str:
    """A clause about the plan's options, if they apply to torch programs only; otherwise empty."""
    if plan.wants_tensors:
        return "--level ops sees operators of torch programs" if plan.levels == ("ops",) else ""
    lists = [word for word in plan.types if word in TORCH_LISTS]
    return f"--type {' '.join(lists)} lists what torch programs do" if lists else ""


def _imported(messages: Messages) -> str:
    verb = "was" if len(messages.frameworks) == 1 else "were"
    return f"{' and '.join(messages.frameworks)} {verb} imported"


def explain_no_start(messages: Messages) -> tuple[str, str]:
    """The reason why capture was not started in any process, and what to try."""
    if messages.failed:
        # An option that cannot be satisfied needs no class name and no advice about versions.
        if messages.failed[0].startswith(f"{BadInput.__name__}: "):
            return f"nothing was captured: {messages.failed[0].partition(': ')[2]}", ""
        return (
            f"nothing was captured: capture could not start ({messages.failed[0]})",
            "the environment of the program needs Python 3.11, numpy, and torch 2.4 or Paddle 3.0 "
            "or newer",
        )
    if messages.too_old:
        return (
            f"nothing was captured: the program runs on {messages.too_old[0]}",
            "driftline captures programs on Python 3.11 or newer",
        )
    # These processes lacked the environment variables, so the bootstrap was not loaded.
    if messages.reached == 0 and messages.unseen:
        return f"nothing was captured: {unseen_words(messages.unseen)[0]}", ""
    if messages.reached == 0:
        return (
            "nothing was captured: no Python process could be reached",
            "does the command start Python here, without `env -i`, `python -S` or a container? "
            "Installed in the program's own environment, driftline also reaches `python -I` and "
            "scripts that set PYTHONPATH",
        )
    if messages.apart:
        return (
            f"nothing was captured: the program imported {' and '.join(messages.apart)}, not torch",
            "this command works on torch programs; dump and compare work on Paddle's too",
        )
    if messages.absent:
        packages = " ".join(_PACKAGES.get(name, name) for name in messages.absent)
        return (
            f"nothing was captured: the program looked for {' and '.join(messages.absent)}, which "
            f"{'is' if len(messages.absent) == 1 else 'are'} not installed in its environment",
            f"pip install {packages} there",
        )
    if messages.unasked:
        return (
            f"nothing was captured: the program imported {' and '.join(messages.unasked)}, and "
            "--engine looks at another one",
            "leave --engine out: what a program imports is recognised",
        )
    some = "1 Python process" if messages.reached == 1 else f"{messages.reached} Python processes"
    return (
        f"nothing was captured: {some} ran, none imported torch or paddle",
        "is this the command that runs the model?",
    )


def unseen_words(commands: Sequence[str]) -> list[str]:
    """A sentence about Python processes that capture could not reach, if there are any."""
    if not commands:
        return []
    first = commands[0]
    if len(commands) == 1:
        text = f"1 Python process had an environment of its own and was not seen ({first})"
    else:
        text = f"{len(commands)} Python processes had an environment of their own and were not seen"
        text += f" ({first}, ...)"
    return [f"{text}; hand DRIFTLINE_LAUNCH and PYTHONPATH on"]


def _filters_in_words(plan: CapturePlan) -> str:
    chosen = plan.selection.to_json()
    words = [f"{name} {value}" for name, value in chosen.items()]
    return "; ".join(words) or "none were given"


def say_steps(steps: Sequence[int]) -> str:
    """Steps in words, with neighbouring steps joined to ranges.

    >>> say_steps([1, 2, 3, 7]), say_steps([0])
    ('steps 1-3, 7', 'step 0')
    """
    spans: list[list[int]] = []
    for step in sorted(steps):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:SHOWN_STEPS]]
    more = ", ..." if len(spans) > SHOWN_STEPS else ""
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(shown) + more
