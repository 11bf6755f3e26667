"""Words → who does the work: `--jobs 4`, `--executor ray`, `--executor ray://head:10001`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftline.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from driftline.executors.work import Executor

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
    if executor in (None, "", "local"):
        if jobs is None or jobs == 1:
            return None
        from driftline.executors.local import Processes

        return Processes(jobs)
    if executor == "ray" or executor.startswith("ray://"):
        from driftline.executors.ray_cluster import RayCluster

        cluster = RayCluster("" if executor == "ray" else executor, jobs)
        if quiet:
            cluster.tell = _nothing
        return cluster
    raise BadInput(f"there is no executor '{executor}'", hint=did_you_mean(executor, _KNOWN))


def _nothing(line: str) -> None:
    del line
