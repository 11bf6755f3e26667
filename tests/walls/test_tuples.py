"""`driftline.tuples.NamedTuple` makes what `typing.NamedTuple` makes, in less time."""

from __future__ import annotations

import copy
import inspect
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest

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


def test_threads_that_come_first_together_all_get_their_tuple() -> None:
    for _ in range(50):

        class Fresh(NamedTuple):
            name: str
            size: int = 3

        class Derived(Fresh):
            """Its constructor is that of the class it is derived from."""

        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda kind: kind("a"), [Fresh, Derived] * 8))
        assert set(made) == {("a", 3)}
        assert {type(one) for one in made} == {Fresh, Derived}


def test_its_constructor_says_what_is_missing_and_what_it_takes() -> None:
    takes = inspect.signature(Quick).parameters
    assert [(one.name, one.default) for one in takes.values()] == [
        (one.name, one.default) for one in inspect.signature(Usual).parameters.values()
    ]
    with pytest.raises(TypeError, match=r"__new__\(\) missing 1 required positional argument"):
        Quick()  # pyright: ignore
    with pytest.raises(TypeError, match="Expected 3 arguments, got 1"):
        Quick._make(["a"])
    with pytest.raises(ValueError, match="unexpected field names"):
        Quick("a")._replace(shap=())  # pyright: ignore
    assert copy.deepcopy(Quick("a", (1,))) == Quick("a", (1,))


def test_the_hundredth_is_made_as_the_first() -> None:
    class Fresh(NamedTuple):
        name: str
        size: int = 3
        note: str = ""

    for at in range(100):
        assert Fresh(f"{at}") == Fresh(name=f"{at}") == (f"{at}", 3, "")
        assert Fresh(f"{at}", note="x") == (f"{at}", 3, "x") and type(Fresh("a")) is Fresh
        with pytest.raises(TypeError, match="multiple values for argument 'name'"):
            Fresh("a", name="b")  # pyright: ignore
        with pytest.raises(TypeError, match="unexpected keyword argument 'shape'"):
            Fresh("a", shape=())  # pyright: ignore
        with pytest.raises(TypeError, match="takes from 2 to 4 positional arguments but 5"):
            Fresh("a", 1, "", 2)  # pyright: ignore
    assert str(inspect.signature(Fresh)) == "(name: 'str', size: 'int' = 3, note: 'str' = '')"
