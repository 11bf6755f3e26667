# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Call a module again without side effects on the program.

A repeated call must not be captured, advance the program's random generators, change running
statistics, leave anything in a module's attributes or a cache, or call hooks of the program. This
file saves and restores all of that. It does not know the purpose of a repetition.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as _module_home
from torch.overrides import TorchFunctionMode

from driftline.captures.torch import module_calls
from driftline.captures.torch.device import accelerator

Give = Callable[[torch.Tensor], torch.Tensor]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_BITS_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONTAINERS = (list, dict, set, deque)
_TORCHS_OWN = frozenset(nn.Module().__dict__)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class _Copying(TorchFunctionMode):
    """While active, makes `copy.deepcopy` call `give` for each tensor."""

    def __init__(self, give: Give) -> None:
        super().__init__()
        self._give = give

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._give(args[0])
        return func(*args, **(kwargs or {}))


def copied(value: Any, give: Give) -> Any:
    """A copy of arguments or results in which each tensor is replaced by `give(tensor)`.

    Caches and other objects are copied, so that a module that stores something in them does not
    change the program's own. Modules among them are not copied.
    """
    return _copied(value, give, {})


def _copied(value: Any, give: Give, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        # `give` is called once per tensor: aliases in the arguments must be aliases in the copy.
        if id(value) not in memo:
            memo[id(value)] = give(value)
            memo.setdefault(id(memo), []).append(value)  # as in `deepcopy`, so no id is reused
        return memo[id(value)]
    if kind is tuple:
        return tuple([_copied(item, give, memo) for item in value])
    if id(value) in memo:
        return memo[id(value)]
    if kind is list:
        memo[id(value)] = copied_list = list[Any]()
        copied_list += [_copied(item, give, memo) for item in value]
        return copied_list
    if kind is dict:
        memo[id(value)] = copied_dict = dict[Any, Any]()
        copied_dict |= {key: _copied(item, give, memo) for key, item in value.items()}
        return copied_dict
    # Copying a module would copy all its weights.
    if isinstance(value, nn.Module):
        return value
    if _is_plain(kind):
        # A cache has hundreds of small parts; `deepcopy` takes longer for them than a layer runs.
        memo[id(value)] = copied_object = object.__new__(kind)
        copied_object.__dict__.update(
            {name: _copied(item, give, memo) for name, item in value.__dict__.items()}
        )
        return copied_object
    with _Copying(give):
        return copy.deepcopy(value, memo)


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether `deepcopy` would copy an object's attributes and do nothing else."""
    return (
        kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) is object.__getstate__
        and not any(hasattr(kind, name) for name in _OWN_WAYS)
        and not any(vars(base).get("__slots__") for base in kind.__mro__[:-1])
        and kind.__dictoffset__ != 0
        and copyreg.dispatch_table.get(kind) is None
    )


_OWN_WAYS = ("__deepcopy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the memory layout of the original.

    Vectorised code rounds differently from the code for the remainder of a row, so the memory
    layout affects the last bits.
    """
    return laid_out(tensor.detach(), tensor)


def laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of values with the strides of another tensor of the same shape."""
    if like.is_contiguous() or like.layout is not torch.strided or values.shape != like.shape:
        return values.clone(memory_format=torch.contiguous_format)
    # Expanded axes have stride 0: they are copied once and expanded again.
    stride = like.stride()
    repeated = [
        axis for axis, (n, s) in enumerate(zip(like.shape, stride, strict=True)) if s == 0 < n
    ]
    for axis in repeated:
        values = values.narrow(axis, 0, 1)
    copy_ = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
    return copy_.copy_(values).expand(like.shape)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, including NaN and the sign of zero."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if first.numel() == 0:
        return True
    integer_dtype = _BITS_OF_WIDTH.get(first.element_size(), torch.uint8)
    first_bits, second_bits = (
        t.detach().contiguous().reshape(-1).view(integer_dtype) for t in (first, second)
    )
    if not first.is_cpu:
        return bool(torch.equal(first_bits, second_bits))
    # numpy compares eight bytes at a time; torch takes eleven times as long for 16-bit elements.
    words = np.dtype(np.int64 if first_bits.nbytes % 8 == 0 else np.uint8)
    return bool(np.array_equal(first_bits.numpy().view(words), second_bits.numpy().view(words)))


class Script:
    """Answers the calls that a module makes of other modules, instead of running them.

    Args:
        top: The module that is repeated; its own call is executed.
        parts: By the id of each module, functions that answer its calls in order from their
            arguments; None for a call that is executed.
    """

    def __init__(
        self,
        top: nn.Module,
        parts: Mapping[int, Iterable[Callable[[Any, Any], Any] | None]] | None = None,
    ) -> None:
        self._top = top
        self._entered = False
        self._parts = {key: deque(results) for key, results in (parts or {}).items()}

    def __call__(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # The outermost call is the repetition itself; only calls inside it are answered.
        if not self._entered and module is self._top:
            self._entered = True
            return call(module, *args, **kwargs)
        waiting = self._parts.get(id(module))
        answer = waiting.popleft() if waiting else None
        return call(module, *args, **kwargs) if answer is None else answer(args, kwargs)


Answer = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]


def repeat(
    script: Answer,
    module: nn.Module,
    real: Mapping[str, nn.Module],
    tensors: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module with other weights and without side effects, if the caller uses `undrawn`.

    Args:
        script: Answers the calls of its parts.
        module: The module that is called.
        real: The modules that may run, by their paths below `module`, whose own path is "".
        tensors: Weights and buffers that replace its own, by their names below `module`.
        args: Positional arguments; the call may change them.
        kwargs: Keyword arguments; the call may change them.
    """
    with (
        unmarked(real.values()),
        module_calls.aside(script),
        torch.no_grad(),
        _holding(real, tensors),
    ):
        return module(*args, **kwargs)


@contextlib.contextmanager
def _holding(real: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Let modules hold other weights and buffers meanwhile; faster than `functional_call`."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in tensors.items():
            place, _, name = path.rpartition(".")
            owner = real[place]
            table: dict[str, Any] = (
                owner._parameters if name in owner._parameters else owner._buffers
            )
            before.append((table, name, table[name]))
            table[name] = tensor
        yield
    finally:
        for table, name, tensor in reversed(before):
            table[name] = tensor


@contextlib.contextmanager
def undrawn() -> Generator[tuple[Any, ...]]:
    """Restore the random state afterwards, so that numbers drawn inside are drawn again."""
    before = random_state()
    try:
        yield before
    finally:
        set_random_state(before)


@contextlib.contextmanager
def unmarked(touched: Iterable[nn.Module]) -> Generator[None]:
    """Restore the attributes of these modules afterwards, and disable the program's hooks."""
    held = [(module, dict(module.__dict__)) for module in touched]
    # Shallow copies of containers suffice: a call may extend them, and `copied` handles tensors.
    contents = [
        (value, copy.copy(value))
        for _, state in held
        for name, value in state.items()
        if type(value) in _CONTAINERS and value is not None and name not in _TORCHS_OWN
    ]
    hidden = [(name, dict(getattr(_module_home, name))) for name in _GLOBAL_HOOKS]
    try:
        # Global hooks would take the repeated call for one of the program's own.
        for name, hooks in hidden:
            if hooks:
                getattr(_module_home, name).clear()
        for module, state in held:
            for name in _HOOKS:
                hooks = state.get(name)
                if hooks:
                    module.__dict__[name] = OrderedDict(
                        (key, hook) for key, hook in hooks.items() if _is_of_torch(hook)
                    )
        yield
    finally:
        for module, state in held:
            _put_back(module.__dict__, state)
        for value, content in contents:
            if len(value) != len(content) or any(
                current is not saved for current, saved in zip(value, content, strict=True)
            ):
                value.clear()
                value.extend(content) if isinstance(value, list | deque) else value.update(content)
        for name, hooks in hidden:
            if hooks:
                getattr(_module_home, name).update(hooks)


def _put_back(table: dict[str, Any], state: dict[str, Any]) -> None:
    for name in [name for name in table if name not in state]:
        del table[name]
    for name, value in state.items():
        if table.get(name, table) is not value:
            table[name] = value


def _is_of_torch(hook: Any) -> bool:
    """Whether a hook is torch's own; those of `weight_norm`, `prune` etc. compute the weights."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith("torch.nn.utils")


def random_state() -> tuple[Any, ...]:
    """The states of all random generators that a module may use."""
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None
    return torch.get_rng_state(), accelerator.random_states(), random.getstate(), legacy


def set_random_state(state: tuple[Any, ...]) -> None:
    host, devices, python, legacy = state
    torch.set_rng_state(host)
    accelerator.set_random_states(devices)
    random.setstate(python)
    if legacy is not None:
        sys.modules["numpy"].random.set_state(legacy)


def has_drawn(before: tuple[Any, ...]) -> bool:
    """Whether a random number was drawn from a generator of torch since then."""
    host, devices, _, _ = before
    if not torch.equal(host, torch.get_rng_state()):
        return True
    # A device that was first used since then has a new state and counts as having drawn.
    now = accelerator.random_states()
    return len(now) != len(devices) or not all(map(torch.equal, devices, now))


# Other correct executions of a module: rounded only once, or with inputs changed by one last bit.


_LOW = (torch.bfloat16, torch.float16)
_FLOAT_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def rounded_once(
    call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a module as a fused kernel gives it: computed in 32 bits, rounded at the end.

    For a module that computes in 32 bits anyway, this is its usual result.
    """
    seen: list[torch.dtype] = []

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _LOW:
            return tensor
        seen.append(tensor.dtype)
        return tensor.float()

    wide_args, wide_kwargs = copied((args, kwargs), widen)
    if not seen:
        return call(module, *args, **kwargs)
    # Weights are widened as well, because a fused kernel rounds only its result.
    weights = {
        name: tensor.float()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.dtype in _LOW
    }
    with module_calls.aside(Script(module)):
        result = functional_call(module, weights, wide_args, wide_kwargs, strict=False)
    return copied(
        result, lambda tensor: tensor.to(seen[0]) if tensor.dtype is torch.float32 else tensor
    )


def dithered(tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A tensor with each element moved up or down by one unit in the last place, or unchanged."""
    bits = tensor.detach().clone().contiguous().view(_FLOAT_BITS[tensor.element_size()])
    step = torch.randint(-1, 2, tensor.shape, generator=draw, dtype=bits.dtype).to(tensor.device)
    moved = torch.where(torch.isfinite(tensor) & (tensor != 0), bits + step, bits)
    value = moved.view(tensor.dtype).reshape(tensor.shape)
    # A step across zero or to infinity would be larger than one unit in the last place.
    near = torch.isfinite(value) & (value.sign() == tensor.sign())
    return torch.where(near, value, tensor)
