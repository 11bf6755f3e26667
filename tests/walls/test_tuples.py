"""`driftline.tuples.NamedTuple` makes what `typing.NamedTuple` makes, in less time."""

from __future__ import annotations

import copy
import typing

from driftline.tuples import NamedTuple


class Quick(NamedTuple):
    """Said of it."""

    name: str
    shape: tuple[int, ...] = ()
    note: str | None = None

    @property
    def size(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"<{self.name}>"


class Usual(typing.NamedTuple):
    """Said of it."""

    name: str
    shape: tuple[int, ...] = ()
    note: str | None = None


def test_a_quick_tuple_is_a_named_tuple_with_its_fields_defaults_and_methods() -> None:
    one = Quick("a", (2, 3))
    assert one == ("a", (2, 3), None) == Usual("a", (2, 3))
    assert (one.size, str(one), one._replace(note="x").note) == (2, "<a>", "x")
    assert repr(one) == repr(Usual("a", (2, 3))).replace("Usual", "Quick")
    for attribute in ("_fields", "_field_defaults", "__doc__", "__module__", "__mro__"):
        ours, theirs = getattr(Quick, attribute), getattr(Usual, attribute)
        assert ours == theirs or (ours[1:], theirs[1:]) == ((tuple, object),) * 2
    assert copy.copy(one) == one


def test_its_hints_can_be_read() -> None:
    assert typing.get_type_hints(Quick) == typing.get_type_hints(Usual)
