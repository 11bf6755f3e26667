"""Shapes of `metrics` and `validate`, shared out among workers; results come in the order asked.

A shape is one task: its model is loaded by the worker that takes it, and kept for its next one.
Files are written by workers, so all machines must see the folder of the results.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from driftline.decoding.desk import require_writable
from driftline.decoding.metrics_ask import MetricsAsk
from driftline.decoding.metrics_outcome import Outcome
from driftline.decoding.metrics_run import OPTION, Models, run_metrics
from driftline.decoding.validate_ask import ValidateAsk
from driftline.decoding.validation import Subjects, Verdict, validate
from driftline.decoding.workshop import FILES, KINDS
from driftline.errors import BadInput
from driftline.execution.codec import decode, encode
from driftline.execution.jobs import Executor, Job, Task, chosen, folder_for
from driftline.registry import require
from driftline.runs.provenance import own_command
from driftline.runs.redaction import redact_argv

Say = Callable[[str], None]
Ask = MetricsAsk | ValidateAsk


def run_shapes(
    asks: Sequence[MetricsAsk],
    *,
    jobs: int | None = None,
    executor: str | Executor | None = None,
    say: Say = print,
    ready: Callable[[MetricsAsk, Outcome], None] | None = None,
) -> list[Outcome]:
    """`run_metrics` for several shapes, some at a time.

    Args:
        asks: What is wanted.
        jobs: Worker processes.
        executor: `ray` or `ray://HOST:PORT`: workers are those of a Ray cluster.
        say: Where messages go, line by line, each with the shape it is about.
        ready: Told each outcome in the order of the asks, as soon as those before it are there.

    Raises:
        DriftlineError: One could not be done. What was finished before is kept.
    """
    who = _chosen(asks, jobs, executor)
    if who is None:
        models = Models(asks[0])
        found: list[Outcome] = []
        for ask in asks:
            found.append(run_metrics(ask, say=say, models=models))
            if ready is not None:
                ready(ask, found[-1])
        return found
    for folder in dict.fromkeys(ask.output_dir for ask in asks):
        require_writable(folder, OPTION)
    with _marked(asks[0].output_dir) as mark:
        files = [str(mark), *_files(asks)]

        def told(at: int, line: str) -> None:
            say(f"{asks[at].prefix}: {line}")

        def each(at: int, outcome: Outcome) -> None:
            if ready is not None:
                ready(asks[at], outcome)

        return _run("metrics", asks, who, files, each, told)


def validate_shapes(
    asks: Sequence[ValidateAsk],
    *,
    jobs: int | None = None,
    executor: str | Executor | None = None,
    say: Say = print,
    ready: Callable[[ValidateAsk, Verdict], None] | None = None,
) -> list[Verdict]:
    """`validate` for several shapes, some at a time; as `run_shapes`.

    What a shape has to say is said in one piece, before `ready` is told of it.
    """
    who = _chosen(asks, jobs, executor)
    if who is None:
        subjects = Subjects()
        verdicts: list[Verdict] = []
        for ask in asks:
            verdicts.append(validate(ask, say=say, subjects=subjects))
            if ready is not None:
                ready(ask, verdicts[-1])
        return verdicts
    lines: list[list[str]] = [[] for _ in asks]

    def each(at: int, verdict: Verdict) -> None:
        for line in lines[at]:
            say(line)
        if ready is not None:
            ready(asks[at], verdict)

    return _run("validate", asks, who, _files(asks), each, lambda at, line: lines[at].append(line))


def write_verdicts(verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write what was found of several shapes into one folder, as `validate -o` does."""
    from driftline.decoding.validation_files import write_validation

    subjects = Subjects()
    for verdict in verdicts:
        write_validation(verdict, folder, subjects.tokenizer(verdict.ask))


def _chosen(
    asks: Sequence[Ask], jobs: int | None, executor: str | Executor | None
) -> Executor | None:
    if not asks:
        raise BadInput("no shape is asked for")
    who = chosen(jobs, executor)
    if who is not None and any(ask.distributed for ask in asks):
        raise BadInput(
            "--distributed splits one model over processes, --jobs and --executor give each "
            "process a shape of its own",
            hint="give one or the other",
        )
    return who


def _run(
    workshop: str,
    asks: Sequence[Ask],
    who: Executor,
    files: Sequence[str],
    each: Callable[[int, Any], None],
    told: Callable[[int, str], None],
) -> list[Any]:
    torch = require("torch", install="driftline[torch]")
    found: list[Any] = [None] * len(asks)
    waiting = iter(range(len(asks)))
    next_one = next(waiting, None)

    def take(at: int, answer: Any) -> None:
        nonlocal next_one
        found[at] = decode(answer, KINDS)
        while next_one is not None and found[next_one] is not None:
            each(next_one, found[next_one])
            next_one = next(waiting, None)

    about = {
        "threads": torch.get_num_threads(),
        "files": list(files),
        "command": redact_argv(own_command()),
    }
    gpus = int(any("cuda" in (ask.reference.device, ask.candidate.device) for ask in asks))
    job = Job(workshop, about, folder_for(*files), gpus=gpus)
    tasks = [
        Task(encode(ask), near=str(ask.model), needs=(FILES,), called=ask_name(ask)) for ask in asks
    ]
    who.run(job, tasks, take, told)
    return found


def ask_name(ask: Ask) -> str:
    """How messages call a shape."""
    return f"batch {ask.batch_size}, length {ask.length}, {ask.new_tokens} tokens"


def _files(asks: Sequence[Ask]) -> list[str]:
    """Paths of models, tokenizers and prompts that are files here; ids are looked up anywhere."""
    named: list[str] = []
    for ask in asks:
        named += [ask.source, ask.tokenizer, "" if ask.prompts is None else str(ask.prompts)]
        if isinstance(ask, ValidateAsk) and ask.info_dir is not None:
            named.append(str(ask.info_dir))
    return [path for path in dict.fromkeys(named) if path and Path(path).exists()]


@contextlib.contextmanager
def _marked(folder: Path) -> Generator[Path]:
    """A file by which another machine knows the folder of the results for the same one."""
    mark = folder / f".driftline-shared-{os.getpid()}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
