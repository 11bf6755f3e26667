"""A user's own metric: a Python function of (reference, candidate), from a file or a plug-in.

    def worst_row(reference, candidate):      # flat float64 arrays, finite on both sides
        return float(abs(candidate - reference).max(initial=0))
    worst_row.direction = "lower"             # or "higher", "zero", "none"; lower when not said
    worst_row.whole = True                    # shaped arrays, non-finite elements included

The function is tried once on two ones before anything is read, so that a mistake costs no time.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np

from driftline.comparison.metrics.catalogue import KNOWN, Metric
from driftline.comparison.table.row import ROW_FIELDS, Column, Direction
from driftline.errors import BadFile, BadInput, did_you_mean


def from_file(address: str) -> Metric:
    """The metric at `file.py:function`.

    Raises:
        BadInput: No such file or function.
        BadFile: The file cannot be executed, or the function does not return a number.
    """
    # The file is the user's own program, named on the user's own command line: it is imported.
    file_name, _, name = address.rpartition(":")
    path = Path(file_name)
    if not path.is_file():
        raise BadInput(
            f"there is no file '{file_name}' for the metric '{address}'",
            hint="write it as FILE.py:FUNCTION",
        )
    spec = importlib.util.spec_from_file_location(f"driftline_user_metric_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadInput(f"'{file_name}' is no Python file", hint="write it as FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses inside the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as trouble:
        raise BadFile(
            f"{path} fails when imported: {type(trouble).__name__}: {trouble}"
        ) from trouble
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise BadInput(f"{path} has no function '{name}'", hint=did_you_mean(name, functions))
    return from_function(name, function)


def from_function(name: str, function: Any) -> Metric:
    """Wrap a function as a metric, after trying it once.

    Raises:
        BadInput: Its name or its direction cannot be used.
        BadFile: It fails, or returns something that is no number.
    """
    if name in KNOWN or name in ROW_FIELDS:
        raise BadInput(f"'{name}' is the name of a column already", hint="rename the function")
    direction: Any = getattr(function, "direction", "lower")
    if direction not in get_args(Direction):
        directions = get_args(Direction)
        raise BadInput(
            f"the direction of '{name}' is {direction!r}", hint="one of: " + ", ".join(directions)
        )
    try:
        float(function(np.ones(1), np.ones(1)))
    except (Exception, SystemExit) as trouble:
        raise BadFile(
            f"the metric '{name}' fails on two ones: {type(trouble).__name__}: {trouble}",
            hint="it takes two float64 arrays and returns a number",
        ) from trouble
    meaning = (function.__doc__ or "").strip().partition("\n")[0]
    takes_shape = bool(getattr(function, "whole", False))
    return Metric(Column(name, direction, meaning), function=function, whole=takes_shape)
