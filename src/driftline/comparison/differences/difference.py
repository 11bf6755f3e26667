"""One difference between two models, as a value with its JSON form and its sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

Kind: TypeAlias = Literal[
    "attribute",
    "class",
    "code",
    "config",
    "function",
    "hook",
    "mode",
    "module",
    "parameter",
    "buffer",
    "process",
    "optimizer",
    "scheduler",
    "scaler",
    "clipping",
    "average",
    "order",
    "loss",
]
Position: TypeAlias = Literal["at", "upstream", "elsewhere", ""]
"""Position relative to the first divergence; empty if nothing diverges."""
_POSITIONS: tuple[Position, ...] = ("at", "upstream", "elsewhere", "")
_SAID_BY_VALUES = ("dtype", "shape", "tied", "missing", "extra", "class", "requires_grad")
"""Relations that the two values already show."""
SCHEMA = "driftline.differences/1"
MOST_SITES = 64
ABSENT = "(absent)"
"""Text in place of a value that one side does not have."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two models.

    Attributes:
        kind: The kind of thing that differs.
        site: The module, by the reference's name; empty for the process and for training.
        name: Attribute, tensor, option or function.
        reference: The reference's value, as text.
        candidate: The candidate's value.
        relation: For weights and buffers: rounded, different, unrelated, dtype, shape, tied,
            transposed, permuted, missing, extra, requires_grad.
        distance: For values: relative distance of the candidate's from the reference's.
        sites: All modules with the same difference, including the first one.
        class_name: Class of the module.
        source: `file:line` for code.
        explains: What it would explain, as a sentence.
        counts: Whether it is a difference of the models; False for expected differences, such as
            weights rounded to the candidate's number format, other devices or threads.
        position: Position relative to the first divergence.
        step: The step in which it begins; None if it holds from the start.
    """

    kind: Kind
    site: str
    name: str
    reference: str = ""
    candidate: str = ""
    relation: str = ""
    distance: float | None = None
    sites: tuple[str, ...] = ()
    class_name: str = ""
    source: str = ""
    explains: str = ""
    counts: bool = True
    position: Position = ""
    step: int | None = None

    @property
    def path(self) -> str:
        """`site.name`, as a program would write it; just the name if there is no site."""
        if not self.site or self.site == "(root)":
            return self.name
        if self.name.startswith("("):
            return f"{self.site} {self.name}"
        return f"{self.site}.{self.name}" if self.name else self.site

    @property
    def label(self) -> str:
        """Name of what differs; code is named by its class or Python module, not by its site."""
        if self.kind != "code":
            return self.path or self.kind
        # The name of a function that is not a method already contains its Python module.
        return f"code of {self.name if '.' in self.name else f'{self.class_name}.{self.name}'}"

    @property
    def change(self) -> str:
        """The two values, or how a weight has changed."""
        values = f"{self.reference} → {self.candidate}" if self.reference != self.candidate else ""
        words = "" if self.relation in _SAID_BY_VALUES else self.relation
        if self.distance is not None:
            words = f"{words} values, {self.distance:.2g} apart" if words == "different" else words
        return ", ".join(filter(None, (values, words)))

    @property
    def sentence(self) -> str:
        """One line: what differs, how, and in how many other modules."""
        more = len(self.sites) - 1
        others = f" (and {more} more)" if more > 0 else ""
        where = f" [{self.source}]" if self.source else ""
        return f"{self.path}: {self.change}{others}{where}"

    def moved(self, position: Position, explains: str = "") -> Difference:
        """Return the same difference with its position relative to the first divergence."""
        return replace(self, position=position, explains=explains or self.explains)

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "kind": self.kind,
            "site": self.site or None,
            "name": self.name,
            "reference": self.reference,
            "candidate": self.candidate,
            "relation": self.relation,
            "distance": self.distance,
            "sites": list(self.sites[:MOST_SITES]),
            "count": max(1, len(self.sites)),
            "class": self.class_name,
            "source": self.source,
            "explains": self.explains,
            "counts": self.counts,
            "position": self.position,
            "step": self.step,
        }
        return {name: value for name, value in fields.items() if value not in ("", None, [])}

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> Difference:
        """The inverse of `as_json`; invalid optional values are replaced by defaults."""
        distance = shown.get("distance")
        position = shown.get("position", "")
        sites = shown.get("sites", ())
        return cls(
            cast("Kind", str(shown.get("kind", "attribute"))),
            str(shown.get("site") or ""),
            str(shown.get("name", "")),
            str(shown.get("reference", "")),
            str(shown.get("candidate", "")),
            str(shown.get("relation", "")),
            float(distance) if isinstance(distance, int | float) else None,
            tuple(map(str, cast("Sequence[Any]", sites))) if isinstance(sites, list) else (),
            str(shown.get("class", "")),
            str(shown.get("source", "")),
            str(shown.get("explains", "")),
            shown.get("counts") is not False,
            position if position in _POSITIONS else "",
            step if type(step := shown.get("step")) is int else None,
        )


def counted(differences: Sequence[Difference]) -> int:
    """Return how many of them are differences of the models."""
    return sum(difference.counts for difference in differences)


def as_json(differences: Sequence[Difference] | None) -> dict[str, Any]:
    """Return the document of `driftline show REF CAND --differences --format json`."""
    listed = None if differences is None else [difference.as_json() for difference in differences]
    return {"schema": SCHEMA, "counted": counted(differences or ()), "differences": listed}
