"""What an executor is given and gives back. Knows no kind of work: a worker is found by its name.

A job is what every worker must know; tasks are what is shared out among them. Both are plain values
(see `wire`), and so is what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from driftline import errors
from driftline.errors import BadInput, DriftlineError, did_you_mean
from driftline.registry import Address

WORKERS: dict[str, Address] = {
    "pairs": Address("driftline.comparison.measure.distribute:PairsWorkshop"),
    "operators": Address("driftline.operators.workers:OperatorsWorkshop"),
    "metrics": Address("driftline.decoding.workshop:MetricsWorkshop"),
    "validate": Address("driftline.decoding.workshop:ValidateWorkshop"),
}
"""Every kind of work. A worker does nothing else, whatever it is sent."""

Say = Callable[[str], None]
Finished = Callable[[int, Any], None]
"""Called with the place of a task and its result, once for each, in the thread that asked."""
Printed = Callable[[int, str], None]
"""Called with the place of a task and a line that it has to say."""


class Job(NamedTuple):
    """What every worker must know.

    Attributes:
        worker: A name of `WORKERS`.
        about: What the worker is opened with.
        folder: Where relative paths begin; empty where there are none.
        kernel: Which path of the C kernel must be taken, so that all digits agree; empty: any.
        gpus: How many GPUs each worker must have for itself, as far as a cluster can tell.
    """

    worker: str
    about: Any
    folder: str
    kernel: str = ""
    gpus: int = 0


class Task(NamedTuple):
    """A piece of work.

    Attributes:
        work: What the worker is asked to do, or a function that says it when it is sent.
        weight: How much that is, in bytes; larger ones are begun first.
        near: Tasks of one place are given to the same machine where that is possible.
        needs: Places whose data the machine must have, as `Worker.absent` calls them.
        called: How messages call it.
    """

    work: Any
    weight: int = 0
    near: str = ""
    needs: tuple[str, ...] = ()
    called: str = "a task"

    def content(self) -> Any:
        """What is sent; made now, so that what waits takes no room."""
        return self.work() if callable(self.work) else self.work


class Worker(Protocol):
    """Does the tasks of one job, one after the other; lives in a worker."""

    def __init__(self, about: Any) -> None: ...

    def absent(self) -> list[tuple[str, str]]:
        """What this machine does not have: places and, for each, a sentence."""
        ...

    def do(self, work: Any, say: Say) -> Any:
        """The result of one task.

        Raises:
            DriftlineError: It cannot be done; ends the whole job.
        """
        ...


class Executor(Protocol):
    """Somebody who does tasks."""

    @property
    def workers(self) -> int:
        """How many tasks are done at a time."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether the work is done on machines that may not have what this one has."""
        ...

    def run(
        self, job: Job, tasks: Sequence[Task], finished: Finished, printed: Printed | None = None
    ) -> None:
        """Do every task once.

        Raises:
            DriftlineError: One cannot be done. Those that are under way are ended.
        """
        ...


def folder_for(*paths: str) -> str:
    """The folder that a job with these paths must be done in; empty where that is no matter."""
    if all(Path(path).is_absolute() or "://" in path for path in paths):
        return ""
    return str(Path.cwd())


class WorkerFailed(DriftlineError):
    """A worker that ended, or met something that nobody had foreseen."""


def open_worker(name: str, about: Any) -> Worker:
    """The worker of a job.

    Raises:
        DriftlineError: It cannot be opened here.
    """
    return WORKERS[name].load()(about)


def done(worker: Worker, work: Any, say: Say) -> list[Any]:
    """The answer of a worker to one task, whatever happens."""
    try:
        return ["done", worker.do(work, say)]
    except Exception as trouble:
        return failed(trouble)


def failed(trouble: BaseException) -> list[Any]:
    """An exception as an answer."""
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
    """What a worker's answer holds.

    Raises:
        DriftlineError: The worker could not do it; what it raised, if that was for users.
    """
    if answer[0] == "done":
        return answer[1]
    if answer[0] == "failed":
        _, name, message, hint = answer
        # Only errors of Driftline have a name that both sides know.
        kind = getattr(errors, name, WorkerFailed)
        is_own_error = isinstance(kind, type) and issubclass(kind, DriftlineError)
        message = f"node {where}: {message}" if where else message
        raise (kind if is_own_error else WorkerFailed)(message, hint=hint)
    from driftline import settings

    first = str(answer[1]).partition("\n")[0]
    hint = "without --jobs and --executor it happens here, where more can be seen of it"
    # The traceback of the worker is for those who debug Driftline itself.
    if settings.debug():
        hint = str(answer[2])
    on_node = f" on {where}" if where else ""
    raise WorkerFailed(f"a worker{on_node} failed at {called}: {first}", hint=hint)


# Words → who does the work: `--jobs 4`, `--executor ray`, `--executor ray://head:10001`.


_KNOWN = ("local", "ray", "ray://HOST:PORT")
MOST_JOBS = 4096


def chosen(
    jobs: int | None = None, executor: str | Executor | None = None, *, quiet: bool = False
) -> Executor | None:
    """Who does the work; None for this process itself.

    Args:
        jobs: How many workers. Not given: one for each core that Ray has, or this process.
        executor: `local`, `ray` (the cluster this machine is in, or else one on this machine only),
            `ray://HOST:PORT` (a cluster elsewhere), or an executor.
        quiet: Say nothing of machines that are left out or lost.

    Raises:
        BadInput: That is nobody.
    """
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise BadInput(f"--jobs {jobs} cannot do anything", hint=f"give 1 to {MOST_JOBS}")
    if executor is not None and not isinstance(executor, str):
        return executor
    # One local worker is this process: starting another one would only cost time.
    if executor in (None, "", "local"):
        if jobs is None or jobs == 1:
            return None
        from driftline.execution.processes import Processes

        return Processes(jobs)
    if executor == "ray" or executor.startswith("ray://"):
        from driftline.execution.ray_cluster import RayCluster

        cluster = RayCluster("" if executor == "ray" else executor, jobs)
        if quiet:
            cluster.tell = _nothing
        return cluster
    raise BadInput(f"there is no executor '{executor}'", hint=did_you_mean(executor, _KNOWN))


def _nothing(line: str) -> None:
    del line
