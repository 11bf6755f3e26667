"""Every metric Driftline knows: its direction, its meaning, its definition, and its short cut.

A metric has one definition, a numpy float64 function of (reference, candidate). Those of `STANDARD`
also have a derivation from the kernel's one pass; a test holds the two together. What is not in the
pass (`kl`, a user's own) is computed from the values, on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from driftline.comparison.metrics import from_moments as by
from driftline.comparison.table.row import Column, Direction, Number
from driftline.errors import BadInput, did_you_mean
from driftline.numerics.fields import PairMoments
from driftline.registry import METRICS, Address, plugins

_DEFINED = "driftline.comparison.metrics.definitions"

Definition = Callable[..., float]
"""(reference, candidate) as finite float64 arrays of one shape; returns the measurement."""


class Metric(NamedTuple):
    """One way to put a number on a pair.

    Attributes:
        column: Its name, direction and meaning.
        derive: From the moments of a pair; None when moments do not hold it. Returns None when the
            pair has no such number (the position of something that is nowhere).
        definition: Address of the definition; None for what only the pass itself can know.
        function: The definition itself, for metrics that come from users.
        whole: The definition wants shaped arrays with non-finite elements in them, not the flat
            elements that are finite on both sides.
        address: What `find` finds it by, in any process; empty for the standard ones, and for a
            function that only this process has.
    """

    column: Column
    derive: Callable[[PairMoments], Number | None] | None = None
    definition: Address | None = None
    function: Definition | None = None
    # The name of the attribute that a user's function may have, so it stays.
    whole: bool = False
    address: str = ""

    @property
    def name(self) -> str:
        return self.column.name

    def define(self) -> Definition:
        """The definition as a function; its module is imported here, not before."""
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

# The order is that of the columns of every table.
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
"""Measured for every pair, in the order of the columns."""

# Not measured for every pair: they need all values at once, or few people read them.
ON_REQUEST: tuple[Metric, ...] = (
    _metric("sqnr", "higher", "20 log10(||r|| / ||c - r||)", by.sqnr, _DEFINED, "dB"),
    _metric("kl", "lower", "KL divergence of the softmax", None, _DEFINED, "nats"),
)

KNOWN: dict[str, Metric] = {metric.name: metric for metric in (*STANDARD, *ON_REQUEST)}


def limited(names: Iterable[str]) -> list[str]:
    """Of metrics that limits name, those that are only measured when asked for: this asks."""
    # Standard ones are measured anyway, and unknown ones are refused with a hint elsewhere.
    on_request = {metric.name for metric in ON_REQUEST}
    return [name for name in dict.fromkeys(name.strip() for name in names) if name in on_request]


def requested(names: Sequence[str]) -> tuple[Metric, ...]:
    """The standard metrics, and those that somebody asked for by name or by `file.py:function`.

    Raises:
        BadInput: There is no such metric.
    """
    # By name: asking twice for one metric measures it once.
    extra: dict[str, Metric] = {}
    for name in names:
        metric = find(name)
        if metric not in STANDARD:
            extra[metric.name] = metric
    return (*STANDARD, *extra.values())


def find(name: str) -> Metric:
    """One metric by name, from the catalogue, an installed plug-in, or a user's file."""
    if name in KNOWN:
        return KNOWN[name]._replace(address="" if KNOWN[name] in STANDARD else name)
    from driftline.comparison.metrics.custom import from_file, from_function

    # A colon stands in no name of a metric: it is FILE.py:FUNCTION.
    if ":" in name:
        return from_file(name)._replace(address=name)
    announced = plugins(METRICS)
    if name in announced:
        return from_function(name, announced[name].load())._replace(address=name)
    raise BadInput(f"there is no metric '{name}'", hint=did_you_mean(name, [*KNOWN, *announced]))
