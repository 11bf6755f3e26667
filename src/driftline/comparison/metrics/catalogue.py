"""Catalogue of the metrics: direction, meaning, definition, and derivation from moments.

A metric has one definition, a numpy float64 function of (reference, candidate). Those in `STANDARD`
are also derived from the moments of the kernel's single pass; a test checks that both agree. Other
metrics (`kl`, users' own) are computed from the values, on request.

A user's metric is a Python function of (reference, candidate), from a file or a plug-in:

    def worst_row(reference, candidate):      # flat float64 arrays, finite on both sides
        return float(abs(candidate - reference).max(initial=0))
    worst_row.direction = "lower"             # or "higher", "zero", "none"; default lower
    worst_row.whole = True                    # shaped arrays, including non-finite elements

It is called once on two arrays with a single one before anything is read, so that a mistake shows
at once.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from driftline.comparison.metrics import from_moments as by
from driftline.comparison.table.row import ROW_FIELDS, Column, Direction, Number
from driftline.errors import BadFile, BadInput, did_you_mean
from driftline.numerics.fields import PairMoments
from driftline.registry import METRICS, Address, plugins

_DEFINED = "driftline.comparison.metrics.definitions"

Definition = Callable[..., float]
"""Function of (reference, candidate), finite float64 arrays of one shape, that returns a number."""


class Metric(NamedTuple):
    """One measurement of a pair.

    Attributes:
        column: Its name, direction and meaning.
        derive: Computes it from the moments of a pair; None if moments do not contain it. Returns
            None if the pair has no such value (the position of something that does not occur).
        definition: Address of the definition; None for a metric that only the kernel's pass gives.
        function: The definition itself, for users' metrics.
        whole: Whether the definition needs shaped arrays with non-finite elements, instead of the
            flat elements that are finite on both sides.
        address: Name by which `find` finds it in any process; empty for standard metrics, and for
            functions that only this process has.
    """

    column: Column
    derive: Callable[[PairMoments], Number | None] | None = None
    definition: Address | None = None
    function: Definition | None = None
    # The attribute of users' functions has the same name, so it cannot be renamed.
    whole: bool = False
    address: str = ""

    @property
    def name(self) -> str:
        return self.column.name

    def define(self) -> Definition:
        """Return the definition as a function; its module is imported only now."""
        if self.function is not None:
            return self.function
        if self.definition is None:
            raise BadInput(f"{self.name} is counted while reading; it has no definition of its own")
        return self.definition.load()


def _metric(
    name: str,
    direction: Direction,
    meaning: str,
    derive: Callable[[PairMoments], Number | None] | None,
    home: str = "",
    unit: str = "",
) -> Metric:
    address = Address(f"{home}:{name}") if home else None
    return Metric(Column(name, direction, meaning, unit), derive, address)


_VALUE = "the tensor's own unit"

# This is the order of the columns of every table.
STANDARD: tuple[Metric, ...] = (
    _metric("relative_l2", "lower", "||c - r|| / ||r||", by.relative_l2, _DEFINED),
    _metric("cosine", "higher", "cosine of the angle between r and c", by.cosine, _DEFINED),
    _metric("max_abs_error", "lower", "largest |c - r|", by.max_abs_error, _DEFINED, _VALUE),
    _metric("mean_abs_error", "lower", "mean |c - r|", by.mean_abs_error, _DEFINED, _VALUE),
    _metric("rmse", "lower", "root of the mean (c - r)^2", by.rmse, _DEFINED, _VALUE),
    _metric("max_rel_error", "lower", "largest |c - r| / |r|", by.max_rel_error, _DEFINED),
    _metric("mean_rel_error", "lower", "mean |c - r| / |r|", by.mean_rel_error, _DEFINED),
    _metric("projection", "zero", "<c - r, r> / <r, r>", by.projection, _DEFINED),
    _metric("max_ulp", "lower", "largest distance in steps of c's dtype", by.max_ulp, unit="ulp"),
    _metric(
        "outside_share", "lower", "share with not |c - r| <= atol + rtol |r|", by.outside_share
    ),
    _metric("different", "lower", "elements whose values differ", by.different, unit="elements"),
    _metric("one_sided", "lower", "NaN or Inf on one side only", by.one_sided, unit="elements"),
    _metric("one_sided_at", "none", "first such element, flat index", by.one_sided_at),
    _metric("max_abs_error_at", "none", "where |c - r| is largest, flat", by.max_abs_error_at),
    _metric("first_different_at", "none", "first differing element, flat", by.first_different_at),
    *(
        _metric(f"{side}_{what}", "none", f"{meaning} of the {side}", derive, unit=unit)
        for side, derivations in (("reference", by.REFERENCE), ("candidate", by.CANDIDATE))
        for (what, meaning, unit), derive in derivations
    ),
)
"""Metrics measured for every pair, in the order of the columns."""

# Measured only on request, because they need all values at once or are rarely used.
ON_REQUEST: tuple[Metric, ...] = (
    _metric("sqnr", "higher", "20 log10(||r|| / ||c - r||)", by.sqnr, _DEFINED, "dB"),
    _metric("kl", "lower", "KL divergence of the softmax", None, _DEFINED, "nats"),
)

KNOWN: dict[str, Metric] = {metric.name: metric for metric in (*STANDARD, *ON_REQUEST)}


def limited(names: Iterable[str]) -> list[str]:
    """Return the metrics named by limits that are measured only on request."""
    # Standard metrics are always measured; unknown ones are refused with a hint elsewhere.
    on_request = {metric.name for metric in ON_REQUEST}
    return [name for name in dict.fromkeys(name.strip() for name in names) if name in on_request]


def requested(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the standard metrics, and those requested by name or by `file.py:function`.

    Raises:
        BadInput: There is no such metric.
    """
    # By name, so that a metric that is requested twice is measured once.
    extra: dict[str, Metric] = {}
    for name in names:
        metric = find(name)
        if metric not in STANDARD:
            extra[metric.name] = metric
    return (*STANDARD, *extra.values())


def find(name: str) -> Metric:
    """Return a metric by name, from the catalogue, an installed plug-in, or a user's file."""
    if name in KNOWN:
        return KNOWN[name]._replace(address="" if KNOWN[name] in STANDARD else name)
    # No metric name contains a colon, so this is FILE.py:FUNCTION.
    if ":" in name:
        return _from_file(name)._replace(address=name)
    announced = plugins(METRICS)
    if name in announced:
        return _from_function(name, announced[name].load())._replace(address=name)
    raise BadInput(f"there is no metric '{name}'", hint=did_you_mean(name, [*KNOWN, *announced]))


def _from_file(address: str) -> Metric:
    """Return the metric at `file.py:function`.

    Raises:
        BadInput: There is no such file or function.
        BadFile: The file cannot be executed, or the function does not return a number.
    """
    # The user named this file on the command line, so importing it is safe.
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
    sys.modules[spec.name] = module  # dataclasses in the file need the entry
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as trouble:
        raise BadFile(
            f"{path} fails when imported: {type(trouble).__name__}: {trouble}",
            hint="run it with python alone, to see why",
        ) from trouble
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise BadInput(f"{path} has no function '{name}'", hint=did_you_mean(name, functions))
    return _from_function(name, function)


def _from_function(name: str, function: Any) -> Metric:
    """Return a function as a metric, after calling it once.

    Raises:
        BadInput: Its name or its direction cannot be used.
        BadFile: It fails, or returns something that is not a number.
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
