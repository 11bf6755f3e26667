"""What identifies a run of ONNX Runtime: versions, providers, the optimisation level, the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from driftline.adapters.onnxruntime import loading
from driftline.adapters.onnxruntime.inference import SessionPlan
from driftline.adapters.onnxruntime.recording import Seen
from driftline.runs.sink import JSON


def facts(file: Path, files: Sequence[Path], plan: SessionPlan, seen: Seen) -> dict[str, JSON]:
    """What a run says of itself.

    Args:
        file: The model.
        files: It and what holds its weights.
        plan: How it is run.
        seen: The graph that was made of it.
    """
    return {
        "framework": "onnxruntime",
        "engine": {
            "name": "onnxruntime",
            "version": str(loading.engine().__version__),
            "onnx": str(loading.protobuf().__version__),
            "model": file.name,
            "model_digest": loading.digest_of(list(files)),
            "optimize": plan.level,
            "providers": list(plan.providers),
            "threads": plan.threads,
            "parallel_nodes": plan.parallel_nodes,
            "session_config": dict(plan.config),
            "nodes": len(seen.optimised.nodes),
            "exported_nodes": len(seen.exported.nodes),
        },
        "devices": [name.removesuffix("ExecutionProvider").lower() for name in plan.providers],
    }
