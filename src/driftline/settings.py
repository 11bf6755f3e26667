"""The only reader of the environment. Every variable Driftline listens to is named here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

LAUNCH = "DRIFTLINE_LAUNCH"
"""Set by `driftline dump` for the program it starts: path of the capture plan (JSON)."""
KERNEL = "DRIFTLINE_KERNEL"
"""`avx512`, `avx2`, `generic` or `numpy`: use that path, not the best one. For tests and doubt."""
DEBUG = "DRIFTLINE_DEBUG"
"""Anything but empty or 0: show the traceback of an unexpected exception instead of one line."""
NO_COLOR = "NO_COLOR"
"""Anything but empty: no colours, whatever the terminal can do (https://no-color.org)."""


def environment() -> Mapping[str, str]:
    """The process environment; rooms ask here, so that a test can see who reads what."""
    return os.environ


def kernel_choice() -> str:
    return environment().get(KERNEL, "")


def one_blas_thread() -> None:
    """Keep numpy from starting a pool of BLAS threads, unless the user asked for one.

    They spin while numpy is imported: 7 ms on a quiet machine, 50 on a busy one.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def debug() -> bool:
    return environment().get(DEBUG, "") not in ("", "0")


def colours_refused() -> bool:
    """By the user, or by a terminal that calls itself dumb."""
    return bool(environment().get(NO_COLOR)) or environment().get("TERM") == "dumb"


class JobPlace(NamedTuple):
    """Where this process stands in a distributed job, as its launcher says."""

    rank: int
    world_size: int


def job_place() -> JobPlace:
    """Rank and size as torchrun, Open MPI or Slurm say, asked in this order; alone: rank 0 of 1."""
    env = environment()
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
            return JobPlace(int(env[rank]), int(env[size]))
    return JobPlace(0, 1)
