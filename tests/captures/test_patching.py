"""Patches to other people's code: what is put back, and what is left to whoever came later."""

from __future__ import annotations

from collections.abc import Callable

from driftline.captures.patching import PatchSet


class Library:
    @staticmethod
    def compute(x: int) -> int:
        return x + 1


def doubling(function: Callable[[int], int]) -> Callable[[int], int]:
    return lambda x: 2 * function(x)


def test_a_patch_works_until_it_is_taken_back() -> None:
    plain, patches = Library.compute, PatchSet()
    assert patches.replace(Library, "compute", doubling)
    assert Library.compute(1) == 4
    patches.restore()
    assert Library.compute is plain


def test_what_was_replaced_twice_is_as_it_was_in_the_beginning() -> None:
    plain, patches = Library.compute, PatchSet()
    patches.replace(Library, "compute", doubling)
    patches.replace(Library, "compute", doubling)
    assert Library.compute(1) == 8
    patches.restore()
    assert Library.compute is plain


def test_a_wrapper_that_came_later_is_left_alone() -> None:
    class Other(Library):
        pass

    patches = PatchSet()
    patches.replace(Other, "compute", doubling)
    later = Other.compute
    Other.compute = staticmethod(lambda x: later(x) + 100)  # type: ignore[method-assign]
    patches.restore()
    assert Other.compute(1) == 104


def test_what_is_not_there_is_not_patched() -> None:
    patches = PatchSet()
    assert not patches.replace(Library, "missing", doubling)
    patches.restore()
    assert not hasattr(Library, "missing")
