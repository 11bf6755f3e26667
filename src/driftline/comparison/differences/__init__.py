"""Differences between two models before any number is compared: attributes, state, code, training.

Reads the facts of two runs (`runs.sidecars.model_facts`), never a tensor. What a difference does to
the numbers is not judged here: it explains a verdict, it does not make one.
"""
