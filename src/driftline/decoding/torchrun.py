"""The place of this process in a job of torchrun: which rank writes, and what ranks share.

With `--distributed` the candidate's weights are split over the ranks. Rank 0 alone computes the
reference, writes files, and announces what comes next; the others compute their part of the
candidate.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

from driftline import settings
from driftline.errors import BadInput
from driftline.registry import require

T = TypeVar("T")
PATIENCE = timedelta(days=2)
"""How long ranks wait for rank 0, which may be computing a large reference on a CPU."""


class Job(NamedTuple):
    """The place of this process in its job."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def share(self, value: T | None) -> T:
        """The value of rank 0, on every rank; the others may give None."""
        if self.size == 1:
            return cast(T, value)
        dist = require("torch.distributed")
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return cast(T, box[0])

    def leave(self) -> None:
        """Wait for the other ranks, and destroy the process group."""
        if self.size > 1:
            dist = require("torch.distributed")
            if dist.is_initialized():
                dist.destroy_process_group()


def choose_backend(place: settings.JobPlace, cuda: Any) -> tuple[str, int | None]:
    """The backend for communication between the processes of a job, and the GPU of this process.

    Raises:
        BadInput: There are fewer GPUs than processes. NCCL refuses two processes on one GPU, and
            libraries that split a model give each process the GPU with its own number.
    """
    count = int(cuda.device_count()) if cuda.is_available() else 0
    if not count:
        return "gloo", None
    if place.world_size > count:
        raise BadInput(
            f"{place.world_size} processes share this machine, which has {count} "
            f"GPU{'s' if count > 1 else ''}",
            hint="start one process for each GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to "
            "compute on the CPU",
        )
    # Tokens and decisions are shared on the CPU, matrices on the GPUs.
    return "cpu:gloo,cuda:nccl", place.rank


def join_job(distributed: bool) -> Job:
    """Join the job this process was started in.

    Raises:
        BadInput: Several processes were started without --distributed: all would write the same
            files. Or there are fewer GPUs than processes.
    """
    place = settings.job_place()
    if not distributed:
        if place.world_size > 1:
            raise BadInput(
                f"this is process {place.rank} of {place.world_size}, and all would write the "
                "same files",
                hint="say --distributed to split the model over them, or start one process",
            )
        return Job()
    if place.world_size == 1:
        return Job()
    torch_module = require("torch", install="torch")
    dist = require("torch.distributed")
    # An earlier shape of this process has joined already.
    if not dist.is_initialized():
        backend, device = choose_backend(settings.place_on_machine(), torch_module.cuda)
        if device is not None:
            torch_module.cuda.set_device(device)
        dist.init_process_group(backend, timeout=PATIENCE)
    return Job(place.rank, place.world_size)
