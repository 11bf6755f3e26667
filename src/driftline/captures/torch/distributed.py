# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false
"""Distributed tensors: their placement on ranks, and pending results of collectives.

Placements are read from torch's own tensors and meshes, without communication. A plain tensor may
be the local part of a DTensor; if autograd is recording, the node that made it shows that. Results
of collectives for which the program has not waited have no values yet, and are taken later.
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
# A job may have thousands of groups, which need not all be listed in every run.
_MOST_MESHES = 32


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor."""
    # Importing the module would initialise parts of torch that the program does not use.
    module = sys.modules.get(_DTENSOR)
    return module is not None and isinstance(tensor, module.DTensor)


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether this is the result of an asynchronous collective, which may still be running."""
    module = sys.modules.get(_FUNCTIONAL)
    return module is not None and type(tensor) is module.AsyncCollectiveTensor


def placement_of(tensor: Any) -> str:
    """The placement of a DTensor, as text in the form of docs/run-format.md."""
    return placement_text(tensor._spec)


def placement_text(spec: Any) -> str:
    """A placement as text, such as `[S(0)] of (64, 64) over mesh (4,) named (tp) at (1,)`."""
    mesh = spec.mesh
    placed = ", ".join(str(placement) for placement in spec.placements)
    text = f"[{placed}] of {tuple(spec.shape)} over mesh {tuple(mesh.shape)}"
    if mesh.mesh_dim_names:
        text += f" named ({', '.join(mesh.mesh_dim_names)})"
    coordinate = mesh.get_coordinate()
    return text if coordinate is None else f"{text} at {tuple(coordinate)}"


def placement_of_plain(tensor: torch.Tensor) -> str:
    """The placement of a plain tensor known to be the local part of a DTensor; otherwise empty."""
    if _DTENSOR not in sys.modules:
        return ""
    made_by = tensor.grad_fn
    if made_by is None or type(made_by).__name__ != _LOCAL_PART:
        return ""
    spec = getattr(made_by, "dtensor_spec", None)
    return "" if spec is None else f"local {placement_text(spec)}"


def job_facts(site_of: Callable[[Any], str | None] | None = None) -> dict[str, JSON]:
    """Groups, meshes and pipeline stages of this process; empty in a job of one process.

    Args:
        site_of: Returns the site of a module; None if modules have no names yet.
    """
    distributed: Any = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    if distributed.get_world_size() < 2:
        return {}
    facts: dict[str, JSON] = {"backend": str(distributed.get_backend())}
    try:
        facts["groups"] = _groups(distributed)
        facts["meshes"] = _meshes()
        if stages := _stages(site_of):
            facts["stages"] = stages
    except Exception:  # private parts of torch may have changed; tensors have placements anyway
        return facts
    return facts


def _groups(distributed: Any) -> list[JSON]:
    """Ranks of every process group of which this process is a member, the largest first."""
    ranks_by_group = distributed.distributed_c10d._world.pg_group_ranks
    me = distributed.get_rank()
    groups = {tuple(sorted(int(rank) for rank in ranks)) for ranks in ranks_by_group.values()}
    own_groups = sorted((ranks for ranks in groups if me in ranks), key=lambda r: (-len(r), r))
    return [list(ranks) for ranks in own_groups[:_MOST_MESHES]]


def _meshes() -> list[JSON]:
    """Every device mesh that is not part of another: names, sizes, ranks, and our coordinate."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        return []
    meshes: dict[str, JSON] = {}
    for mesh in _alive(module.DeviceMesh):
        # Of a sub-mesh only its root is listed.
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
    """The pipeline stages that this process runs, and the sites of their models."""
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
    """Whether a pipeline stage is called for a later micro-batch than the first of its batch.

    The stage object does not store the number of the micro-batch. It is an argument of the call
    that runs the module, a few frames up the stack.
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
    """All living objects of a class."""
    # `isinstance` would read `__class__`, which may run the code of a lazy proxy.
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]


# Pending collectives: their results are taken when the program itself waits for them, not before.


Take = Callable[[Any], None]

_lock = threading.RLock()
_waiting: dict[int, list[tuple[torch.Tensor, Take]]] = {}
"""Pending tensors by memory address; views share it, and to wait for one is to wait for all."""
_watched: set[type] = set()


def when_there(tensor: Any) -> Callable[[Take], None]:
    """A function that calls its argument with the complete tensor: now, or when it has arrived."""

    def arrange(take: Take) -> None:
        inner: torch.Tensor = tensor.elem
        # The program has already waited for it, so the values exist.
        if tensor.completed:
            take(inner)
            return
        with _lock:
            _watch(type(tensor))
            _waiting.setdefault(_place(inner), []).append((inner, take))

    return arrange


def forget() -> int:
    """Forget all pending tensors; return how many the program has never waited for."""
    with _lock:
        left = sum(map(len, _waiting.values()))
        _waiting.clear()
    return left


def _watch(kind: Any) -> None:
    """Wrap the methods of a class by which the program waits.

    They are never restored, because without pending tensors the wrapper only reads an empty
    dictionary.
    """
    if kind in _watched:
        return
    _watched.add(kind)
    for name in ("trigger_wait", "wait"):
        # The method has different names in versions of torch, and programs call both.
        setattr(kind, name, _after(getattr(kind, name)))


def _after(wait: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    @functools.wraps(wait)
    def waited(tensor: Any) -> torch.Tensor:
        result = wait(tensor)
        # The check is cheap, because this runs at every wait and most programs have none pending.
        if _waiting:
            _arrived(tensor.elem)
        return result

    return waited


def _arrived(inner: torch.Tensor) -> None:
    from driftline.captures.torch.tensors import undisturbed

    with undisturbed():
        with _lock:
            arrived = _waiting.pop(_place(inner), [])
        # Done outside the lock, because taking a tensor may wait for the disk.
        for tensor, take in arrived:
            take(tensor)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
