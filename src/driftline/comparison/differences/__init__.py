"""Differences between two models that need no tensor values: attributes, state, code, training.

They are found in the facts of two runs (`runs.sidecars.model_facts`), never in tensors. Their
effect on the numbers is not judged here: they explain a verdict but do not decide it.
"""
