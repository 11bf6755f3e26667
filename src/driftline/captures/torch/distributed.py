# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false
"""Distributed tensors: how they are placed over ranks, and results of collectives that are pending.

Placements are read from torch's own tensors and meshes; nothing is communicated. A plain tensor may
be the local part of a DTensor: while autograd records, the node that made it still says so. Results
of collectives that the program has not waited for have no values yet, and are taken later.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from driftline.runs.sinks import JSON

_DTENSOR = "torch.distributed.tensor"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_LOCAL_PART = "_ToTorchTensorBackward"
# Jobs with thousands of groups need no list of them all in every run.
_MOST_MESHES = 32


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor."""
    # `sys.modules` is asked: importing it would initialise parts of torch the program does not use.
    module = sys.modules.get(_DTENSOR)
    return module is not None and isinstance(tensor, module.DTensor)


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether this stands for the result of a collective that is perhaps still under way."""
    module = sys.modules.get(_FUNCTIONAL)
    return module is not None and type(tensor) is module.AsyncCollectiveTensor


def placement_of(tensor: Any) -> str:
    """How a DTensor is placed, in the words of docs/run-format.md."""
    return placement_text(tensor._spec)


def placement_text(spec: Any) -> str:
    """`[S(0)] of (64, 64) over mesh (4,) named (tp) at (1,)`."""
    mesh = spec.mesh
    placed = ", ".join(str(placement) for placement in spec.placements)
    text = f"[{placed}] of {tuple(spec.shape)} over mesh {tuple(mesh.shape)}"
    if mesh.mesh_dim_names:
        text += f" named ({', '.join(mesh.mesh_dim_names)})"
    coordinate = mesh.get_coordinate()
    return text if coordinate is None else f"{text} at {tuple(coordinate)}"


def placement_of_plain(tensor: torch.Tensor) -> str:
    """The same for a plain tensor that is known to be the local part of a DTensor; else empty."""
    if _DTENSOR not in sys.modules:
        return ""
    made_by = tensor.grad_fn
    if made_by is None or type(made_by).__name__ != _LOCAL_PART:
        return ""
    spec = getattr(made_by, "dtensor_spec", None)
    return "" if spec is None else f"local {placement_text(spec)}"


def job_facts(site_of: Callable[[Any], str | None] | None = None) -> dict[str, JSON]:
    """Groups, meshes and pipeline stages of this process; nothing where it is alone.

    Args:
        site_of: What a module is called, once modules have names.
    """
    distributed: Any = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    # A single process has nothing to say about its job.
    if distributed.get_world_size() < 2:
        return {}
    facts: dict[str, JSON] = {"backend": str(distributed.get_backend())}
    try:
        facts["groups"] = _groups(distributed)
        facts["meshes"] = _meshes()
        if stages := _stages(site_of):
            facts["stages"] = stages
    except Exception:  # private parts of torch have moved: the tensors still say their own
        return facts
    return facts


def _groups(distributed: Any) -> list[JSON]:
    """Ranks of every process group this process is a member of, the largest first."""
    ranks_by_group = distributed.distributed_c10d._world.pg_group_ranks
    me = distributed.get_rank()
    groups = {tuple(sorted(int(rank) for rank in ranks)) for ranks in ranks_by_group.values()}
    own_groups = sorted((ranks for ranks in groups if me in ranks), key=lambda r: (-len(r), r))
    return [list(ranks) for ranks in own_groups[:_MOST_MESHES]]


def _meshes() -> list[JSON]:
    """Every device mesh that is no part of another: names, sizes, ranks, and where we are."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        return []
    meshes: dict[str, JSON] = {}
    for mesh in _alive(module.DeviceMesh):
        # Sub-meshes repeat what their root says.
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        coordinate = root.get_coordinate()
        shown: dict[str, JSON] = {
            "names": cast("JSON", list(root.mesh_dim_names or ())),
            "shape": cast("JSON", [int(size) for size in root.mesh.shape]),
            "ranks": cast("JSON", [int(rank) for rank in root.mesh.flatten().tolist()]),
            "coordinate": None
            if coordinate is None
            else cast("JSON", [int(position) for position in coordinate]),
        }
        meshes.setdefault(str(shown), shown)
    return list(meshes.values())[:_MOST_MESHES]


def _stages(site_of: Callable[[Any], str | None] | None) -> list[JSON]:
    """Which stages of a pipeline this process runs, and where their models are."""
    base = _stage_class()
    if base is None:
        return []
    stages: dict[tuple[int, int], dict[str, JSON]] = {}
    for stage_object in _alive(base):
        stage, count = int(stage_object.stage_index), int(stage_object.num_stages)
        shown = stages.setdefault((stage, count), {"stage": stage, "of": count})
        if site_of is not None and (site := site_of(stage_object.submod)) is not None:
            shown["site"] = site
    return [stages[stage_object] for stage_object in sorted(stages)]


def continues_batch(module: Any) -> bool:
    """Whether a stage of a pipeline is called for a later micro-batch than the first of its batch.

    The stage object keeps the number of the micro-batch to itself: it is an argument of the call
    that runs the module, a few frames up.
    """
    kind = _stage_class()
    if kind is None:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward_one_chunk":
            stage: Any = frame.f_locals.get("self")
            number = frame.f_locals.get("fwd_chunk_id")
            if isinstance(stage, kind) and stage.submod is module and isinstance(number, int):
                return number > 0
        frame = frame.f_back
    return False


def _stage_class() -> Any:
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return getattr(module, "_PipelineStageBase", None)


def _alive(kind: type) -> Iterable[Any]:
    """Objects of a class, by `type`: asking for their `__class__` may run their code."""
    # `issubclass` of the type: `isinstance` would ask `__class__`, which lazy proxies compute.
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]


# Pending collectives: taken when the program itself waits for them, never before.


Take = Callable[[Any], None]

_lock = threading.RLock()
_waiting: dict[int, list[tuple[torch.Tensor, Take]]] = {}
"""By place in memory: views share it, and waiting for one of them is waiting for all."""
_watched: set[type] = set()


def when_there(tensor: Any) -> Callable[[Take], None]:
    """Hands the values behind an awaited tensor on: now, if they are there, else when they are."""

    def arrange(take: Take) -> None:
        inner: torch.Tensor = tensor.elem
        # The program has waited for it already, so the values are there.
        if tensor.completed:
            take(inner)
            return
        with _lock:
            _watch(type(tensor))
            _waiting.setdefault(_place(inner), []).append((inner, take))

    return arrange


def forget() -> int:
    """The program is over; returns how many tensors it never waited for."""
    with _lock:
        left = sum(map(len, _waiting.values()))
        _waiting.clear()
    return left


def _watch(kind: Any) -> None:
    """Wrap a class for good: without pending tensors it costs one look at an empty dictionary."""
    if kind in _watched:
        return
    _watched.add(kind)
    for name in ("trigger_wait", "wait"):
        # Two spellings in torch's versions, and both are called by programs.
        setattr(kind, name, _after(getattr(kind, name)))


def _after(wait: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    @functools.wraps(wait)
    def waited(tensor: Any) -> torch.Tensor:
        result = wait(tensor)
        # The dictionary is empty in almost every program, and this runs at every wait.
        if _waiting:
            _arrived(tensor.elem)
        return result

    return waited


def _arrived(inner: torch.Tensor) -> None:
    from driftline.captures.torch.tensors import undisturbed

    with undisturbed():
        with _lock:
            arrived = _waiting.pop(_place(inner), [])
        # Outside the lock: taking a tensor may wait for the disk.
        for tensor, take in arrived:
            take(tensor)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
