"""Nested values become named tensors without running any code of the program."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from driftline.captures.torch import layers


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    missing: torch.Tensor | None = None
    more: Any = None

    @property
    def trap(self) -> torch.Tensor:
        raise AssertionError("a property was run")


@dataclasses.dataclass(slots=True)
class Slotted:
    value: torch.Tensor


class Opaque:
    def __init__(self) -> None:
        self.tensor = torch.ones(1)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __iter__(self) -> Any:
        raise AssertionError("iterated")


def _names(value: Any, **options: Any) -> list[tuple[str, str]]:
    return [(slot, alias) for slot, alias, _ in layers.outputs(value, **options)]


T = torch.ones(2)


def test_a_lone_tensor_is_slot_zero_like_the_first_of_a_tuple() -> None:
    assert _names(T) == [("0", "")]
    assert _names((T, None, T)) == [("0", ""), ("2", "")]


def test_records_give_field_names_and_keep_positions_as_aliases() -> None:
    assert _names(Pair(T, [T, T])) == [("left", "0"), ("right.0", "1.0"), ("right.1", "1.1")]
    assert _names(Record(T, more={"a": T})) == [("hidden", "0"), ("more.a", "1.0")]
    assert _names(Slotted(T)) == [("value", "0")]
    assert _names(types.SimpleNamespace(x=T)) == [("x", "0")]
    assert _names(collections.deque([T])) == [("0", "")]
    assert _names(collections.UserDict({"k": T})) == [("k", "0")]


def test_a_model_output_meets_the_tuple_it_stands_for() -> None:
    output = BaseModelOutputWithPast(last_hidden_state=T, hidden_states=(T, T))
    aliases = [alias for _, alias in _names(output)]
    slots = [slot for slot, _ in _names(output.to_tuple())]
    assert aliases == slots == ["0", "1.0", "1.1"]


def test_objects_that_are_no_containers_are_left_alone() -> None:
    assert _names([Opaque(), 3, "text", T]) == [("3", "")]


def test_a_cache_is_walked_by_layer_as_the_tuples_it_replaced() -> None:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), layer)
    whole = [slot for slot, _ in _names({"past": cache})]
    assert whole == [f"past.{layer}.{part}" for layer in range(3) for part in range(2)]
    assert [s for s, _ in _names({"past": cache}, cache=1)] == ["past.1.0", "past.1.1"]
    assert _names({"past": cache}, cache=layers.NO_CACHE) == []


def test_endless_nesting_ends() -> None:
    endless: list[Any] = [T]
    endless.append(endless)
    assert len(_names(endless)) == layers.MAX_DEPTH


def test_decorated_forwards_are_bound_to_the_names_of_the_wrapped_one() -> None:
    import functools

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    class One:
        @decorate
        def forward(self, first: Any, second: Any) -> None: ...

    class Two:
        @decorate
        def forward(self, other: Any, *rest: Any, flag: Any = None) -> None: ...

    one, two = layers.binding_of(One().forward), layers.binding_of(Two().forward)
    assert one.names == ("first", "second")
    assert two.names == ("other",)
    found = layers.inputs(two, (T, T), {"flag": T})
    assert [(s, a) for s, a, _ in found] == [("other", "0"), ("1", ""), ("flag", "")]
    by_name = layers.inputs(two, (), {"other": T})
    assert [(s, a) for s, a, _ in by_name] == [("other", "0")]


def test_no_two_tensors_of_one_call_share_a_slot() -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    found = layers.outputs({"a": {"b": a}, "a.b": b, 1: c, "1": d})
    assert [(slot, tensor.item()) for slot, _, tensor in found] == [
        ("a.b", 0.0),
        ("a.b~1", 1.0),
        ("1", 2.0),
        ("1~1", 3.0),
    ]
    binding = layers.binding_of(lambda *args, **kwargs: None)
    assert [slot for slot, _, _ in layers.inputs(binding, (a,), {"0": b})] == ["0", "0~1"]
