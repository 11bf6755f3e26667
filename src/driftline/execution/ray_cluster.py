"""Executor for a Ray cluster (package `ray[client]`).

Every machine is first asked whether it has the same Driftline and can read the data. Workers are
Ray actors. If a worker or its machine is lost, its tasks are done again elsewhere. A task is
finished when its answer arrives, so each one counts once.
"""

# Ray's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from driftline import __version__
from driftline.errors import DriftlineError
from driftline.execution import codec, ray_connection, ray_worker
from driftline.execution.jobs import Finished, Job, Printed, Task, WorkerFailed, result_of
from driftline.execution.ray_connection import one_line

_RETRIES = 3
"""If a task loses more workers than this, it is assumed to be the cause."""
_LOSSES_IN_A_ROW = 2
"""A machine that loses this many workers in a row, without any answer, gets no more work."""
_TASKS_PER_WORKER = 2
"""Number of tasks that a worker has at a time: one in progress, and the next one."""
_GRACE_SECONDS = 20.0
"""Seconds to wait for silent machines if the others can do all tasks."""
_ANSWER_SECONDS = 60.0
"""Seconds in which a machine must answer whether it can help."""
_POLL_SECONDS = 2.0
_NOTE_SECONDS = 30.0
"""Seconds without any answer after which a message says that the cores may be busy."""


def _print_note(line: str) -> None:
    print(f"driftline: {line}", file=sys.stderr, flush=True)


class RayCluster:
    """A Ray cluster.

    Args:
        address: `ray://HOST:PORT`; empty for the cluster of this machine, or a local one.
        jobs: Number of workers; None for one on each core of the cluster.
        tell: Called with messages about machines that are left out or lost.
    """

    elsewhere = True

    def __init__(
        self, address: str = "", jobs: int | None = None, tell: Callable[[str], None] = _print_note
    ) -> None:
        self.address = address
        self.jobs = jobs
        self.tell = tell
        self._session: ray_connection.Session | None = None

    @property
    def workers(self) -> int:
        session = self._connected()
        # Asked each time, because machines join and leave a cluster.
        cores = sum(_cores(node) for node in session.nodes())
        return max(1, min(self.jobs or cores, max(cores, 1)))

    def run(
        self, job: Job, tasks: Sequence[Task], finished: Finished, printed: Printed | None = None
    ) -> None:
        session = self._connected()
        # A session serves one round; the next round connects again.
        self._session = None
        with session.in_use():
            if tasks:
                _Round(session, job, tasks, self.jobs, self.tell).run(finished, printed)

    def _connected(self) -> ray_connection.Session:
        if self._session is None:
            self._session = ray_connection.connect(self.address, self.jobs)
        return self._session

    def __repr__(self) -> str:
        return f"RayCluster({self.address!r}, {self.jobs})"


def open_executor(address: str, jobs: int | None, quiet: bool) -> RayCluster:
    """The executor `ray`."""
    return RayCluster(address, jobs, (lambda line: None) if quiet else _print_note)


def _cores(node: dict[str, Any], gpus: int = 0) -> int:
    """Number of workers for which a node has cores (and GPUs)."""
    has = node["Resources"]
    return min(int(has.get("CPU", 0)), *([int(has.get("GPU", 0)) // gpus] if gpus else []), 1 << 20)


class _Machine:
    """A node of the cluster: its name, the data it lacks, and the places it has begun to read."""

    def __init__(
        self, node: dict[str, Any], name: str, absent: Sequence[tuple[str, str]], cores: int
    ) -> None:
        self.id = str(node["NodeID"])
        self.cores = cores
        self.name = name
        self.absent = dict(absent)
        self.begun: set[str] = set()
        self.losses = 0

    def can(self, task: Task) -> bool:
        return not any(place in self.absent for place in task.needs)


class _Worker:
    """An actor and its tasks; the task in progress comes first."""

    def __init__(self, actor: Any, machine: _Machine) -> None:
        self.actor = actor
        self.machine = machine
        self.tasks: list[int] = []


class _Round:
    def __init__(
        self,
        session: ray_connection.Session,
        job: Job,
        tasks: Sequence[Task],
        jobs: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self.ray = session.ray
        self.gpus = job.gpus
        self.session = session
        self.tasks = tasks
        self.jobs = jobs
        self.tell = tell
        # Large tasks first. Tasks of similar size keep their order, which is that of their files.
        order = sorted(range(len(tasks)), key=lambda index: -tasks[index].weight.bit_length())
        self.waiting: dict[str, deque[int]] = {}
        for index in order:
            self.waiting.setdefault(tasks[index].near, deque()).append(index)
        self.attempts = [0] * len(tasks)
        self.workers: list[_Worker] = []
        self.under_way: dict[Any, tuple[_Worker, int]] = {}
        job_values = {**job._asdict(), "version": __version__}
        # Put into Ray's store once, so that it is not sent with every task.
        self.job = session.ray.put(codec.pack(job_values))

    def run(self, finished: Finished, printed: Printed | None) -> None:
        left = len(self.tasks)
        try:
            self.machines = self._usable_machines()
            self._require_data()
            self._start_workers()
            late = time.monotonic() + _NOTE_SECONDS
            while left:
                self._send_tasks()
                ready, _ = self.ray.wait(list(self.under_way), num_returns=1, timeout=_POLL_SECONDS)
                # Printed once: a cluster may be busy with other users' work for hours.
                if left == len(self.tasks) and not ready and time.monotonic() > late:
                    self.tell("waiting for a free core of the Ray cluster, or for its first answer")
                    late = math.inf
                for ref in ready:
                    # Answers to a lost worker's other tasks are no longer expected.
                    if ref in self.under_way:
                        left -= self._take_answer(ref, finished, printed)
        except ConnectionError as trouble:
            raise WorkerFailed(f"the connection to Ray is lost: {one_line(trouble)}") from trouble
        finally:
            for worker in self.workers:
                self._stop_worker(worker)

    def _usable_machines(self) -> list[_Machine]:
        """Ask every machine whether it can help; machines that cannot are left out with a message.

        Raises:
            DriftlineError: No machine can help.
        """
        ray = self.ray
        asked: dict[Any, dict[str, Any]] = {}
        for node in self.session.nodes():
            if _cores(node, self.gpus):
                # The question reserves no core, so that busy machines can answer it.
                look = ray.remote(ray_worker.inspect_machine).options(
                    **self._options_for(str(node["NodeID"]), cores=0)
                )
                asked[look.remote(self.job)] = node
        if not asked:
            what = "a GPU" if self.gpus else "a core"
            raise DriftlineError(
                f"no machine of the Ray cluster has {what} to compute with",
                hint="start one that has: ray start --address HEAD --num-cpus N",
            )
        machines: list[_Machine] = []
        troubles: list[str] = []
        began = time.monotonic()
        silent = list(asked)
        while silent and (waited := time.monotonic() - began) < _ANSWER_SECONDS:
            enough = all(any(machine.can(task) for machine in machines) for task in self.tasks)
            if enough and waited > _GRACE_SECONDS:
                break  # a silent machine may be dead without Ray having noticed it yet
            answered, silent = ray.wait(silent, num_returns=len(silent), timeout=_POLL_SECONDS)
            for ref in answered:
                self._read_answer(ref, asked[ref], machines, troubles)
        for ref in silent:
            where = asked[ref]["NodeManagerAddress"]
            waited = time.monotonic() - began
            troubles.append(f"node {where}: did not answer in {waited:.0f} s")
        if not machines:
            raise DriftlineError(
                f"no machine of the Ray cluster can help: {'; '.join(troubles[:3])}",
                hint="all machines need the same Driftline and must see the same paths",
            )
        self.troubles = troubles
        return machines

    def _read_answer(
        self, ref: Any, node: dict[str, Any], machines: list[_Machine], troubles: list[str]
    ) -> None:
        """Read the answer of one machine."""
        short = str(node["NodeID"])[:8]
        try:
            host, version, trouble, absent = codec.unpack(self.ray.get(ref))
        except self.ray.exceptions.RayError as bug:
            where = f"{node['NodeManagerAddress']} ({short})"
            # The node may have died since it was asked; then its error says nothing.
            alive = any(living["NodeID"] == node["NodeID"] for living in self.session.nodes())
            why = f"cannot load Driftline: {one_line(bug)}" if alive else "is gone"
            troubles.append(f"node {where}: {why}")
            return
        name = f"{host} ({short})"
        if version != __version__:
            trouble = f"has Driftline {version}, and this is {__version__}"
        if trouble:
            troubles.append(f"node {name}: {trouble}")
            return
        machines.append(_Machine(node, name, absent, _cores(node, self.gpus)))
        if absent:
            troubles.append(f"node {name}: {absent[0][1]}")

    def _require_data(self) -> None:
        """Refuse work if no machine has its data; print which machines lack data."""
        for task in self.tasks:
            if not any(machine.can(task) for machine in self.machines):
                raise DriftlineError(
                    f"no machine of the Ray cluster has the data: {'; '.join(self.troubles[:3])}",
                    hint="put the runs where all machines see them under the same path, or at an "
                    "address such as s3://BUCKET/RUN",
                )
        for trouble in self.troubles:
            self.tell(f"{trouble}; it is given no such work")

    def _options_for(self, node_id: str, cores: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return {"num_cpus": cores, "scheduling_strategy": where}

    def _start_workers(self) -> None:
        """Start workers on all machines in turn, up to the number of their cores."""
        useful = [
            machine for machine in self.machines if any(machine.can(task) for task in self.tasks)
        ]
        room = {machine.id: machine.cores for machine in useful}
        wanted = min(self.jobs or sum(room.values()), sum(room.values()), len(self.tasks))
        while len(self.workers) < wanted:
            for machine in useful:
                if room[machine.id] and len(self.workers) < wanted:
                    room[machine.id] -= 1
                    self._start(machine)

    def _start(self, machine: _Machine) -> None:
        # Ray would restart a lost actor on the same machine; we choose the machine ourselves.
        options = {
            **self._options_for(machine.id, cores=1),
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if self.gpus:
            options["num_gpus"] = self.gpus
        actor = self.ray.remote(ray_worker.RayWorker).options(**options).remote(self.job)
        self.workers.append(_Worker(actor, machine))

    def _stop_worker(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):  # the worker or Ray itself may be gone
            self.ray.kill(worker.actor)

    def _send_tasks(self) -> None:
        # Every worker gets one task before any gets a second.
        for depth in range(1, _TASKS_PER_WORKER + 1):
            for worker in self.workers:
                if worker.machine not in self.machines:
                    continue
                if (
                    len(worker.tasks) < depth
                    and (index := self._choose(worker.machine)) is not None
                ):
                    worker.tasks.append(index)
                    ref = worker.actor.do.remote(codec.pack(self.tasks[index].content()))
                    self.under_way[ref] = (worker, index)

    def _choose(self, machine: _Machine) -> int | None:
        """The next task for a machine.

        Data that this machine has begun to read comes first, then data that no other machine has
        begun to read.
        """
        # Files that another machine has begun to read are in that machine's cache.
        elsewhere = {
            place for other in self.machines if other is not machine for place in other.begun
        }
        for near in sorted(
            self.waiting,
            key=lambda near: (
                near not in machine.begun,
                near in elsewhere,
                -self.tasks[self.waiting[near][0]].weight.bit_length(),
            ),
        ):
            tasks = self.waiting[near]
            index = next((index for index in tasks if machine.can(self.tasks[index])), None)
            if index is not None:
                tasks.remove(index)
                if not tasks:
                    del self.waiting[near]
                machine.begun.add(near)
                return index
        return None

    def _take_answer(self, ref: Any, finished: Finished, printed: Printed | None) -> int:
        """Process one answer; returns the number of tasks that it finishes."""
        worker, index = self.under_way[ref]
        exceptions = self.ray.exceptions
        try:
            lines, answer = codec.unpack(self.ray.get(ref))
        except exceptions.RayTaskError as bug:  # `RayWorker.do` returns the errors of tasks
            raise WorkerFailed(
                f"a worker on {worker.machine.name} failed: {one_line(bug)}"
            ) from bug
        except exceptions.RayError as loss:
            self._handle_loss(worker, loss)
            return 0
        del self.under_way[ref]
        worker.tasks.remove(index)
        # An answer shows that the machine works.
        worker.machine.losses = 0
        if printed is not None:
            for line in lines:
                printed(index, line)
        finished(index, result_of(answer, self.tasks[index].called, worker.machine.name))
        return 1

    def _handle_loss(self, worker: _Worker, loss: Exception) -> None:
        """Handle a lost worker: put its tasks back, and start another worker."""
        self._stop_worker(worker)
        self.workers.remove(worker)
        for ref in [ref for ref, (whose, _) in self.under_way.items() if whose is worker]:
            del self.under_way[ref]
        for index in reversed(worker.tasks):
            self.waiting.setdefault(self.tasks[index].near, deque()).appendleft(index)
        # Only the task in progress can have ended the worker; the others had not begun.
        first = worker.tasks[0]
        self.attempts[first] += 1
        if self.attempts[first] > _RETRIES:
            raise WorkerFailed(
                f"{self.attempts[first]} workers were lost at {self.tasks[first].called}, the last "
                f"on {worker.machine.name}: {one_line(loss)}",
                hint="memory may be short there: try fewer --jobs",
            )
        worker.machine.losses += 1
        self._replace(worker.machine)

    def _replace(self, machine: _Machine) -> None:
        """Replace a lost worker: on its own machine, unless that machine seems dead too."""
        alive = {str(node["NodeID"]) for node in self.session.nodes()}
        others = [other for other in self.machines if other is not machine and other.id in alive]
        if machine.id in alive and (machine.losses < _LOSSES_IN_A_ROW or not others):
            self.tell(f"a worker on {machine.name} is lost; its work is done again")
            self._start(machine)
            return
        self.tell(f"node {machine.name} is gone; its work is done elsewhere")
        self.machines = others
        for worker in [other for other in self.workers if other.machine is machine]:
            self._stop_worker(worker)  # its tasks fail, and are handed out again
        if not others:
            raise WorkerFailed("no machine of the Ray cluster is left that could help")
        self._require_data_of_waiting()
        if not any(worker.machine in others for worker in self.workers):
            self._start(others[0])

    def _require_data_of_waiting(self) -> None:
        for index in (index for tasks in self.waiting.values() for index in tasks):
            if not any(machine.can(self.tasks[index]) for machine in self.machines):
                why = next(iter(self.machines[0].absent.values()), "")
                raise WorkerFailed(
                    f"the machine that had the data of {self.tasks[index].called} is gone; node "
                    f"{self.machines[0].name}: {why}"
                )
