"""What the runs of a table know about their model, as far as judging sites needs it.

Rows alone do not say which site feeds which if inputs were not captured, how long the sums of a
module are, or which modules compute with integers. These facts are read from the runs once, when
they are compared, and stored in the table. So a stored table or merged parts are judged in the same
way as the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from driftline.comparison.table.row import JSON

Shape: TypeAlias = tuple[int, ...]
Makers: TypeAlias = Mapping[str, frozenset[str]]
"""Site → the sites whose outputs it takes; sites that take no such output are included."""
Flow: TypeAlias = Mapping[tuple[int, int], Makers]
"""Rank and process → the edges between sites."""

_NO_FLOW: Flow = {}
_NO_SHAPES: Mapping[str, Shape] = {}
_NO_COUNTS: Mapping[str, int] = {}
_NO_ERRORS: Mapping[str, float] = {}
_NO_WORDS: Mapping[str, str] = {}


class Stride(NamedTuple):
    """How far one step of an optimizer moves a parameter.

    Attributes:
        length: Norm of the step; if `by_gradient`, norm of the step for a gradient of norm 1.
        size: Norm of the parameter when it was first captured.
        by_gradient: Whether the step is a multiple of the gradient (SGD). Other optimizers divide
            the gradient by its size and move every element by about the learning rate.
    """

    length: float
    size: float
    by_gradient: bool


_NO_STRIDES: Mapping[str, Stride] = {}


class Structure(NamedTuple):
    """Facts about the reference's modules, by the reference's names.

    Attributes:
        flow: Edges between sites; only read if sites were captured without their inputs.
        weights: Shape of the weight of each module that has one.
        inside: Number of modules in each module, at any depth.
        quantised: Relative error allowed for integer arithmetic behind a float interface.
        misread: Sites that decode integers differently from how they were encoded, and how.
        strides: How far an optimizer moves each parameter in a step, by `site.slot`.
        codes: Type of the codes that a module stores its weight as, such as int8.
    """

    flow: Flow = _NO_FLOW
    weights: Mapping[str, Shape] = _NO_SHAPES
    inside: Mapping[str, int] = _NO_COUNTS
    quantised: Mapping[str, float] = _NO_ERRORS
    misread: Mapping[str, str] = _NO_WORDS
    strides: Mapping[str, Stride] = _NO_STRIDES
    codes: Mapping[str, str] = _NO_WORDS

    def as_json(self) -> dict[str, JSON]:
        """Return the known facts as JSON values.

        They are lists of pairs instead of objects, because a module may have any name, also that of
        a key that readers of long tables search for.
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
        if self.codes:
            shown["codes"] = [[site, code_type] for site, code_type in self.codes.items()]
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
            {str(site): str(code_type) for site, code_type in shown.get("codes", ())},
        )


NO_STRUCTURE = Structure()
