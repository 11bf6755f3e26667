"""What the runs of a table know of their model, as far as judging sites needs it.

Rows alone do not say who feeds whom where inputs were not captured, how long the sums of a module
are, or which modules compute with integers. This is looked up in the runs once, when they are
compared, and is in the table, so that a stored table or merged parts are judged as the runs were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from driftline.comparison.table.row import JSON

Shape: TypeAlias = tuple[int, ...]
Makers: TypeAlias = Mapping[str, frozenset[str]]
"""Site → the sites whose outputs it takes; a site that takes nothing of the kind is there, too."""
Flow: TypeAlias = Mapping[tuple[int, int], Makers]
"""Rank and process → who feeds whom."""

_NO_FLOW: Flow = {}
_NO_SHAPES: Mapping[str, Shape] = {}
_NO_COUNTS: Mapping[str, int] = {}
_NO_ERRORS: Mapping[str, float] = {}
_NO_SENTENCES: Mapping[str, str] = {}


class Stride(NamedTuple):
    """How far one step of an optimizer moves a parameter.

    Attributes:
        length: Norm of the step; of the step for a gradient of norm 1, where it is by the gradient.
        size: Norm of the parameter when it was captured first.
        by_gradient: Whether the step is a multiple of the gradient (SGD). Other optimizers divide a
            gradient by its size, and move every element by about the learning rate.
    """

    length: float
    size: float
    by_gradient: bool


_NO_STRIDES: Mapping[str, Stride] = {}


class Structure(NamedTuple):
    """Facts about the reference's modules, by the reference's names.

    Attributes:
        flow: Who feeds whom; only looked up where sites were captured without their inputs.
        weights: Shape of the weight of each module that holds one.
        inside: How many modules each module contains, at any depth.
        quantised: Relative error that integer arithmetic behind a float interface may have.
        misread: Sites that read integers for other numbers than they were made of, and how.
        strides: How far an optimizer moves each parameter in a step, by `site.slot`.
    """

    flow: Flow = _NO_FLOW
    weights: Mapping[str, Shape] = _NO_SHAPES
    inside: Mapping[str, int] = _NO_COUNTS
    quantised: Mapping[str, float] = _NO_ERRORS
    misread: Mapping[str, str] = _NO_SENTENCES
    strides: Mapping[str, Stride] = _NO_STRIDES

    def as_json(self) -> dict[str, JSON]:
        """The facts as JSON values; those that are not known are left out.

        Lists of pairs, no objects: a module may have any name, also that of a key that readers of
        long tables look for.
        """
        shown: dict[str, JSON] = {}
        if self.flow:
            shown["flow"] = [
                [rank, process, [[taker, sorted(makers)] for taker, makers in edges.items()]]
                for (rank, process), edges in self.flow.items()
            ]
        if self.weights:
            shown["weights"] = [[site, list(shape)] for site, shape in self.weights.items()]
        if self.inside:
            shown["inside"] = [[site, count] for site, count in self.inside.items()]
        if self.quantised:
            shown["quantised"] = [[site, error] for site, error in self.quantised.items()]
        if self.misread:
            shown["misread"] = [[site, sentence] for site, sentence in self.misread.items()]
        if self.strides:
            shown["strides"] = [[path, *stride] for path, stride in self.strides.items()]
        return shown

    @classmethod
    def from_json(cls, shown: Mapping[str, JSON]) -> Structure:
        """The inverse of `as_json`.

        Raises:
            TypeError: A value is of another kind than `as_json` writes.
            ValueError: The same.
        """
        return cls(
            {
                (int(rank), int(process)): {
                    str(taker): frozenset(map(str, makers)) for taker, makers in edges
                }
                for rank, process, edges in shown.get("flow", ())
            },
            {
                str(site): tuple(int(size) for size in shape)
                for site, shape in shown.get("weights", ())
            },
            {str(site): int(count) for site, count in shown.get("inside", ())},
            {str(site): float(error) for site, error in shown.get("quantised", ())},
            {str(site): str(sentence) for site, sentence in shown.get("misread", ())},
            {
                str(path): Stride(float(length), float(size), bool(by_gradient))
                for path, length, size, by_gradient in shown.get("strides", ())
            },
        )


NO_STRUCTURE = Structure()
