"""The calls a module makes of others, when it is repeated: answered or carried out."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from driftline.adapters.torch import flatten
from driftline.adapters.torch.names import unwrapped
from driftline.adapters.torch.recasting import Given, Recast
from driftline.adapters.torch.repeating import Script, copied, itself
from driftline.adapters.torch.replay_calls import Open, Part
from driftline.adapters.torch.replay_order import order_of, reordered, works_by_row
from driftline.runs.key import TensorKey
from driftline.runs.record import Record

Answer = Callable[[Any, Any], Any]
Hand = Callable[[Record, torch.Tensor], None]


class Parts:
    """Decides which modules run when a call is repeated.

    Args:
        recast: Knows what the captured run's parts gave.
        is_called: Whether the captured run calls a module anywhere. The weights of others (an
            attention's output projection) may be used without a call.
    """

    def __init__(self, recast: Recast, is_called: Callable[[nn.Module], bool]) -> None:
        self._recast = recast
        self._is_called = is_called
        self._orders: dict[TensorKey, torch.Tensor] = {}

    def own(self, opened: Open, way: str) -> Script:
        """What answers the calls of parts with what they themselves gave."""
        parts: dict[int, list[Answer | None]] = {}
        for held in opened.parts or () if way == "own code" else ():
            parts.setdefault(id(held.module), []).append(
                lambda args, kwargs, held=held: copied(held.value, itself)
            )
        return Script(opened.frame.module, parts)

    def captured(self, opened: Open, way: str, given: Given, hand: Hand, *, exact: bool) -> Script:
        """What answers the calls of parts with what those of the captured run gave.

        Args:
            opened: The call that is repeated.
            way: How.
            given: What has been put in so far; what comes out of the parts is added.
            hand: Called with what the code of the module hands to a part and made itself: the
                captured record and the tensor. A wrong attention shows in what its output
                projection is given, and nowhere else.
            exact: In wide arithmetic.
        """
        # Rows come as the captured run's own format has put them: wide arithmetic, which follows,
        # must not find another place for one that fits nowhere. Both would be far apart then.
        before = self._orders if exact else {}
        self._orders = {}
        parts: dict[int, list[Answer | None]] = {}
        for held in opened.parts or () if way == "own code" else ():
            answer = None
            if self._recast.can_answer(held.candidate, held.slots):
                answer = self._answer(held, given, hand, before, exact=exact)
            parts.setdefault(id(held.module), []).append(answer)
        return Script(opened.frame.module, parts)

    def _answer(
        self,
        held: Part,
        given: Given,
        hand: Hand,
        before: Mapping[TensorKey, torch.Tensor],
        *,
        exact: bool,
    ) -> Answer:
        call = held.candidate
        assert call is not None
        value = self._recast.answer(call, held.slots, held.value, given, exact=exact)
        binding = flatten.binding_of(unwrapped(held.module).forward)

        by_row = works_by_row(held.module)

        def answer(args: Any, kwargs: Any) -> Any:
            order = None
            for slot, alias, tensor in flatten.inputs(binding, args, kwargs, flatten.NO_CACHE):
                record = call.inputs.get(slot) or (call.inputs.get(alias) if alias else None)
                if (
                    record is not None
                    and tensor.is_floating_point()
                    and tuple(tensor.shape) == record.shape
                    and not given.has(tensor)
                ):
                    if by_row and order is None:
                        order = before.get(record.key)
                        if order is None:
                            order = order_of(tensor, self._recast.captured(record, tensor))
                        if order is not None and not exact:
                            self._orders[record.key] = order
                    hand(record, tensor if order is None else reordered(tensor, order))
            made = value()
            if order is None:
                return made
            back = torch.argsort(order)
            return copied(made, lambda tensor: reordered(tensor, back))

        return answer

    def real(self, opened: Open, way: str, *, own: bool) -> dict[str, nn.Module]:
        """The modules that really run when a call is repeated this way, by path."""
        module = opened.frame.module
        if way != "own code":
            return dict(module.named_modules(remove_duplicate=False))
        called = {id(held.module) for held in opened.parts or ()}
        running = {
            id(held.module)
            for held in opened.parts or ()
            if not own and not self._recast.can_answer(held.candidate, held.slots)
        }
        answered = called - running
        found: dict[str, nn.Module] = {}
        waiting = [("", module)]
        while waiting:
            path, each = waiting.pop()
            found[path] = each
            waiting += [
                (f"{path}.{name}" if path else name, child)
                for name, child in each._modules.items()
                if child is not None
                and id(child) not in answered
                and (id(child) in called or not self._is_called(child))
            ]
        return found
