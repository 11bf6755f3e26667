"""`ait_llm.common.json_fitter`, as its document imports it."""

from driftline import atb_json_to_onnx

__all__ = ["atb_json_to_onnx"]
