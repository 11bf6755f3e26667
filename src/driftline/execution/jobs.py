"""Jobs and tasks: what an executor gets and returns, and the choice of an executor.

A job is what every worker must know; tasks are distributed among the workers. Both are plain values
(see `codec`), and so are results. This file does not know any kind of work: the class that does the
tasks of a job is found by its name in `WORKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from driftline import errors
from driftline.errors import BadInput, DriftlineError, did_you_mean
from driftline.registry import Address

WORKERS: dict[str, Address] = {
    "pairs": Address("driftline.comparison.measure.distribute:PairsWorker"),
    "operators": Address("driftline.operators.workers:OperatorsWorker"),
    "metrics": Address("driftline.decoding.pipeline:MetricsWorker"),
    "validate": Address("driftline.decoding.pipeline:ValidateWorker"),
}
"""Every kind of work. A worker process can do nothing else, whatever bytes it receives."""

Say = Callable[[str], None]
Finished = Callable[[int, Any], None]
"""Called with the index of a task and its result, once for each task, in the caller's thread."""
Printed = Callable[[int, str], None]
"""Called with the index of a task and a line that it prints."""


class Job(NamedTuple):
    """What every worker must know.

    Attributes:
        worker: A name of `WORKERS`.
        about: Arguments that the worker is opened with, as a plain value.
        folder: Folder of relative paths; empty if there are none.
        kernel: Path of the C kernel that must be used, so that all digits agree; empty for any.
        gpus: Number of GPUs that each worker needs for itself, if the cluster counts them.
    """

    worker: str
    about: Any
    folder: str
    kernel: str = ""
    gpus: int = 0


class Task(NamedTuple):
    """A piece of work.

    Attributes:
        work: The work as plain values, or a function that returns it when the task is sent.
        weight: Size of the work in bytes; larger tasks are begun first.
        near: Place of the task's data. Tasks of one place go to the same machine if possible.
        needs: Places whose data the machine must have, as `Worker.absent` names them.
        called: Name of the task in messages.
    """

    work: Any
    weight: int = 0
    near: str = ""
    needs: tuple[str, ...] = ()
    called: str = "a task"

    def content(self) -> Any:
        """The work to send; made only now, so that waiting tasks take no memory."""
        return self.work() if callable(self.work) else self.work


class Worker(Protocol):
    """Does the tasks of one job, one after the other, in a worker process."""

    def __init__(self, about: Any) -> None: ...

    def absent(self) -> list[tuple[str, str]]:
        """Places whose data this machine lacks, each with a sentence that says so."""
        ...

    def do(self, work: Any, say: Say) -> Any:
        """The result of one task.

        Raises:
            DriftlineError: The task cannot be done; this ends the whole job.
        """
        ...


class Executor(Protocol):
    """Does tasks, in processes of this machine or elsewhere."""

    @property
    def workers(self) -> int:
        """Number of tasks that are done at the same time."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether tasks run on other machines, which may lack data of this one."""
        ...

    def run(
        self, job: Job, tasks: Sequence[Task], finished: Finished, printed: Printed | None = None
    ) -> None:
        """Do every task once.

        Raises:
            DriftlineError: A task cannot be done. Tasks in progress are stopped.
        """
        ...


def folder_for(*paths: str) -> str:
    """Folder in which a job with these paths must run; empty if all paths are absolute."""
    if all(Path(path).is_absolute() or "://" in path for path in paths):
        return ""
    return str(Path.cwd())


class WorkerFailed(DriftlineError):
    """A worker ended, or failed with an unexpected error."""


def open_worker(name: str, about: Any) -> Worker:
    """Open the worker of a job.

    Raises:
        DriftlineError: The worker cannot be opened on this machine.
    """
    return WORKERS[name].load()(about)


def done(worker: Worker, work: Any, say: Say) -> list[Any]:
    """Do one task, and return the worker's answer: the result, or the failure."""
    try:
        return ["done", worker.do(work, say)]
    except Exception as trouble:
        return failed(trouble)


def failed(trouble: BaseException) -> list[Any]:
    """Convert an exception to an answer."""
    if isinstance(trouble, DriftlineError):
        return ["failed", type(trouble).__name__, str(trouble), trouble.hint]
    if isinstance(trouble, MemoryError):
        return ["failed", "WorkerFailed", "a worker has not enough memory", "try fewer --jobs"]
    if isinstance(trouble, OSError) and trouble.strerror:
        where = f"{trouble.filename}: " if trouble.filename else ""
        return ["failed", "WorkerFailed", f"{where}{trouble.strerror}", ""]
    import traceback

    lines = traceback.format_exception(trouble)
    return ["broke", f"{type(trouble).__name__}: {trouble}", "".join(lines)]


def result_of(answer: Sequence[Any], called: str, where: str = "") -> Any:
    """Return the result in a worker's answer.

    Raises:
        DriftlineError: The task failed. The worker's own error is raised if it was meant for users.
    """
    if answer[0] == "done":
        return answer[1]
    if answer[0] == "failed":
        _, name, message, hint = answer
        # Only errors of Driftline have names that both sides know.
        kind = getattr(errors, name, WorkerFailed)
        is_own_error = isinstance(kind, type) and issubclass(kind, DriftlineError)
        message = f"node {where}: {message}" if where else message
        raise (kind if is_own_error else WorkerFailed)(message, hint=hint)
    from driftline import settings

    first = str(answer[1]).partition("\n")[0]
    hint = "without --jobs and --executor it happens here, where more can be seen of it"
    # The worker's traceback is shown only to people who debug Driftline itself.
    if settings.debug():
        hint = str(answer[2])
    on_node = f" on {where}" if where else ""
    raise WorkerFailed(f"a worker{on_node} failed at {called}: {first}", hint=hint)


class ExecutorSpec(NamedTuple):
    """An executor that users choose by name.

    Attributes:
        open: Function of (address, jobs, quiet) that returns the executor; the address is what the
            user wrote, such as `ray://HOST:PORT`, and empty for a bare name.
        addresses: How an address is written; empty if the executor takes none.
    """

    open: Address
    addresses: str = ""


EXECUTORS: dict[str, ExecutorSpec] = {
    "local": ExecutorSpec(Address("driftline.execution.processes:open_executor")),
    "ray": ExecutorSpec(
        Address("driftline.execution.ray_cluster:open_executor"), "ray://HOST:PORT"
    ),
}
"""Every executor by name."""
MOST_JOBS = 4096


def chosen(
    jobs: int | None = None, executor: str | Executor | None = None, *, quiet: bool = False
) -> Executor | None:
    """The executor for `--jobs` and `--executor`; None to work in this process.

    Args:
        jobs: Number of workers. None: one for each core of Ray, or this process.
        executor: `local`, `ray` (the cluster of this machine, or else a new local one),
            `ray://HOST:PORT` (a cluster elsewhere), or an executor.
        quiet: Print nothing about machines that are left out or lost.

    Raises:
        BadInput: There is no such executor, or the number of jobs is impossible.
    """
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise BadInput(f"--jobs {jobs} cannot do anything", hint=f"give 1 to {MOST_JOBS}")
    if executor is not None and not isinstance(executor, str):
        return executor
    # One local worker is this process: starting another one would only cost time.
    if executor in (None, "", "local") and jobs in (None, 1):
        return None
    address = executor or "local"
    name, has_address, _ = address.partition("://")
    spec = EXECUTORS.get(name)
    if spec is None or (has_address and not spec.addresses):
        spellings = [*EXECUTORS, *(spec.addresses for spec in EXECUTORS.values() if spec.addresses)]
        raise BadInput(f"there is no executor '{address}'", hint=did_you_mean(address, spellings))
    return spec.open.load()(address if has_address else "", jobs, quiet)
