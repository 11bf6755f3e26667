"""Runs of the parallel programs: one process, then four at once, each variant by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import LIMIT, PROGRAM, run_ranks

from warm_python import warm

ALONE = (
    *("one", "hand", "four_layers", "eight_layers", "shared_heads"),
    *("plain_4", "experts_2", "two_steps"),
)
TOGETHER = (
    "tp",
    "sp",
    "no_reduce",
    "wrong_cut",
    "odd_gradient",
    "hand",
    "hand_forgotten",
    "ddp",
    "not_averaged",
    "fsdp",
    "fsdp_tp",
    "pipeline",
    "late",
    "interleaved",
    "turned_back",
    "shared_heads",
    "shared_heads_forgotten",
    "flattened",
    "flat_pieces",
    "mesh_wrong",
)
IN_TWO = (
    *("gpipe", "alternating", "two_stages_each", "alternating_wrong"),
    *("experts", "experts_wrong", "zero", "zero_wrong"),
)


@pytest.fixture(scope="session")
def warm_parallel(warm_python: str) -> Iterator[str]:
    """A Python that has imported what the programs import."""
    modules = ("tensor.parallel", "fsdp", "pipelining", "run")
    parallel = (f"torch.distributed.{name}" for name in modules)
    with warm(*parallel, start=warm_python) as python:
        yield python


@pytest.fixture(scope="session")
def alone(warm_parallel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same work done by one process."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([warm_parallel, str(PROGRAM), str(folder), *ALONE], check=True, timeout=LIMIT)
    return folder


@pytest.fixture(scope="session")
def together(warm_parallel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every variant, by four processes of one torchrun."""
    folder = tmp_path_factory.mktemp("together")
    run_ranks(warm_parallel, folder, 4, TOGETHER)
    return folder


@pytest.fixture(scope="session")
def in_two(warm_parallel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Schedules, experts and sharded optimizers, by two processes."""
    folder = tmp_path_factory.mktemp("in_two")
    run_ranks(warm_parallel, folder, 2, IN_TWO)
    return folder
