"""Driftline: where two executions of one model begin to disagree, and is it more than noise?

Every public name is a door with an address, opened on first use: `import driftline` costs nothing
and imports neither torch, nor numpy, nor pyarrow.
"""

from __future__ import annotations

# `typing` alone takes 8 ms, and every process of a dumped program reads this file at its start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from driftline import operators as operators
    from driftline.adapters.door import capture as capture
    from driftline.adapters.door import step as step
    from driftline.adapters.onnxruntime.door import capture_onnx as capture_onnx
    from driftline.adapters.torch.watch_door import watch_errors as watch_errors
    from driftline.comparison.storage import open_table as open_table
    from driftline.diagnosis.door import diagnose as diagnose
    from driftline.dialects.ait import DumpConfig as DumpConfig
    from driftline.dialects.ait import register_hook as register_hook
    from driftline.dialects.labels import gen_id as gen_id
    from driftline.dialects.labels import set_label as set_label
    from driftline.dialects.labels import set_task_id as set_task_id
    from driftline.dialects.saving_hook import register_saving_hook as register_saving_hook
    from driftline.formats.conversion import convert as convert
    from driftline.formats.opening import open_run as open_run
    from driftline.gating.checking import check as check
    from driftline.gating.door import align as align
    from driftline.gating.door import compare as compare
    from driftline.gating.lockstep import lockstep as lockstep
    from driftline.gating.models import compare_models as compare_models
    from driftline.gating.sharding import compare_shard as compare_shard
    from driftline.gating.sharding import merge as merge
    from driftline.pages.assemble import report as report
    from driftline.remote.door import push as push
    from driftline.tolerance.calibration import calibrate as calibrate
    from driftline.tolerance.thresholds import load_thresholds as load_thresholds
    from driftline.topology.door import atb_json_to_onnx as atb_json_to_onnx
    from driftline.topology.door import topology_to_onnx as topology_to_onnx
    from driftline.viewer.door import serve as serve
    from driftline.viewer.door import view as view

__version__ = "0.1.0"

_DOORS = {
    "capture": "driftline.adapters.door:capture",
    "step": "driftline.adapters.door:step",
    "watch_errors": "driftline.adapters.torch.watch_door:watch_errors",
    "capture_onnx": "driftline.adapters.onnxruntime.door:capture_onnx",
    "convert": "driftline.formats.conversion:convert",
    "align": "driftline.gating.door:align",
    "operators": "driftline.operators:",
    "open_run": "driftline.formats.opening:open_run",
    "compare": "driftline.gating.door:compare",
    "compare_models": "driftline.gating.models:compare_models",
    "lockstep": "driftline.gating.lockstep:lockstep",
    "compare_shard": "driftline.gating.sharding:compare_shard",
    "merge": "driftline.gating.sharding:merge",
    "diagnose": "driftline.diagnosis.door:diagnose",
    "open_table": "driftline.comparison.storage:open_table",
    "push": "driftline.remote.door:push",
    "report": "driftline.pages.assemble:report",
    "view": "driftline.viewer.door:view",
    "serve": "driftline.viewer.door:serve",
    "calibrate": "driftline.tolerance.calibration:calibrate",
    "check": "driftline.gating.checking:check",
    "load_thresholds": "driftline.tolerance.thresholds:load_thresholds",
    "topology_to_onnx": "driftline.topology.door:topology_to_onnx",
    "atb_json_to_onnx": "driftline.topology.door:atb_json_to_onnx",
    "DumpConfig": "driftline.dialects.ait:DumpConfig",
    "register_hook": "driftline.dialects.ait:register_hook",
    "register_saving_hook": "driftline.dialects.saving_hook:register_saving_hook",
    "set_label": "driftline.dialects.labels:set_label",
    "gen_id": "driftline.dialects.labels:gen_id",
    "set_task_id": "driftline.dialects.labels:set_task_id",
}

__all__ = [
    "DumpConfig",
    "__version__",
    "align",
    "atb_json_to_onnx",
    "calibrate",
    "capture",
    "capture_onnx",
    "check",
    "compare",
    "compare_models",
    "compare_shard",
    "convert",
    "diagnose",
    "gen_id",
    "load_thresholds",
    "lockstep",
    "merge",
    "open_run",
    "open_table",
    "operators",
    "push",
    "register_hook",
    "register_saving_hook",
    "report",
    "serve",
    "set_label",
    "set_task_id",
    "step",
    "topology_to_onnx",
    "view",
    "watch_errors",
]


def __getattr__(name: str) -> Any:
    address = _DOORS.get(name)
    if address is None:
        raise AttributeError(f"module 'driftline' has no attribute {name!r}")
    import importlib

    module, _, attribute = address.partition(":")
    door = importlib.import_module(module)
    if attribute:
        door = getattr(door, attribute)
    globals()[name] = door  # the next use finds it without coming here
    return door


def __dir__() -> list[str]:
    return sorted({*globals(), *_DOORS})
