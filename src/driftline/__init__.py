"""Driftline finds where two executions of a neural network begin to disagree, and why.

Every public name has an address and is imported on first use, so that `import driftline` takes
almost no time and imports neither torch, nor numpy, nor pyarrow.
"""

from __future__ import annotations

# `typing` alone takes 8 ms, and every process of a dumped program reads this file at its start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from driftline import operators as operators
    from driftline.captures.api import capture as capture
    from driftline.captures.api import step as step
    from driftline.captures.onnxruntime.api import capture_onnx as capture_onnx
    from driftline.captures.onnxruntime.api import run_onnx as run_onnx
    from driftline.captures.torch.errcheck.api import watch_errors as watch_errors
    from driftline.comparison.live_models import compare_models as compare_models
    from driftline.comparison.live_models import lockstep as lockstep
    from driftline.comparison.pipeline import align as align
    from driftline.comparison.pipeline import check as check
    from driftline.comparison.pipeline import compare as compare
    from driftline.comparison.shards import compare_shard as compare_shard
    from driftline.comparison.shards import merge as merge
    from driftline.comparison.table.files import open_table as open_table
    from driftline.comparison.tolerance.calibration import calibrate as calibrate
    from driftline.comparison.tolerance.thresholds import load_thresholds as load_thresholds
    from driftline.diagnosis.api import diagnose as diagnose
    from driftline.dialects.aclcmp.labels import gen_id as gen_id
    from driftline.dialects.aclcmp.labels import set_label as set_label
    from driftline.dialects.aclcmp.labels import set_task_id as set_task_id
    from driftline.dialects.ait.hooks import DumpConfig as DumpConfig
    from driftline.dialects.ait.hooks import register_hook as register_hook
    from driftline.dialects.paddle_hook.hook import register_saving_hook as register_saving_hook
    from driftline.formats.convert.convert import convert as convert
    from driftline.formats.registry import open_run as open_run
    from driftline.graphs.open import atb_json_to_onnx as atb_json_to_onnx
    from driftline.graphs.open import topology_to_onnx as topology_to_onnx
    from driftline.reporting.html.report import report as report
    from driftline.reporting.viewer.api import serve as serve
    from driftline.reporting.viewer.api import view as view
    from driftline.runs.stores.api import push as push
    from driftline.testing.expectations.layers import assert_no_drift as assert_no_drift

__version__ = "0.1.0"

# Must list the same names as the imports above, which only type checkers see.
_ADDRESSES = {
    "capture": "driftline.captures.api:capture",
    "step": "driftline.captures.api:step",
    "watch_errors": "driftline.captures.torch.errcheck.api:watch_errors",
    "capture_onnx": "driftline.captures.onnxruntime.api:capture_onnx",
    "run_onnx": "driftline.captures.onnxruntime.api:run_onnx",
    "convert": "driftline.formats.convert.convert:convert",
    "align": "driftline.comparison.pipeline:align",
    "operators": "driftline.operators:",
    "open_run": "driftline.formats.registry:open_run",
    "compare": "driftline.comparison.pipeline:compare",
    "compare_models": "driftline.comparison.live_models:compare_models",
    "assert_no_drift": "driftline.testing.expectations.layers:assert_no_drift",
    "lockstep": "driftline.comparison.live_models:lockstep",
    "compare_shard": "driftline.comparison.shards:compare_shard",
    "merge": "driftline.comparison.shards:merge",
    "diagnose": "driftline.diagnosis.api:diagnose",
    "open_table": "driftline.comparison.table.files:open_table",
    "push": "driftline.runs.stores.api:push",
    "report": "driftline.reporting.html.report:report",
    "view": "driftline.reporting.viewer.api:view",
    "serve": "driftline.reporting.viewer.api:serve",
    "calibrate": "driftline.comparison.tolerance.calibration:calibrate",
    "check": "driftline.comparison.pipeline:check",
    "load_thresholds": "driftline.comparison.tolerance.thresholds:load_thresholds",
    "topology_to_onnx": "driftline.graphs.open:topology_to_onnx",
    "atb_json_to_onnx": "driftline.graphs.open:atb_json_to_onnx",
    "DumpConfig": "driftline.dialects.ait.hooks:DumpConfig",
    "register_hook": "driftline.dialects.ait.hooks:register_hook",
    "register_saving_hook": "driftline.dialects.paddle_hook.hook:register_saving_hook",
    "set_label": "driftline.dialects.aclcmp.labels:set_label",
    "gen_id": "driftline.dialects.aclcmp.labels:gen_id",
    "set_task_id": "driftline.dialects.aclcmp.labels:set_task_id",
}

__all__ = [
    "DumpConfig",
    "__version__",
    "align",
    "assert_no_drift",
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
    "run_onnx",
    "serve",
    "set_label",
    "set_task_id",
    "step",
    "topology_to_onnx",
    "view",
    "watch_errors",
]


def __getattr__(name: str) -> Any:
    address = _ADDRESSES.get(name)
    if address is None:
        # The words of Python's own message, so that tools recognise it.
        raise AttributeError(f"module 'driftline' has no attribute {name!r}")
    # Imported on use, for the same reason as `typing` above.
    import importlib

    module, _, attribute = address.partition(":")
    value = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value  # the next use does not call this function
    return value


def __dir__() -> list[str]:
    # Lists names that were not imported yet, so that completion finds them.
    return sorted({*globals(), *_ADDRESSES})
