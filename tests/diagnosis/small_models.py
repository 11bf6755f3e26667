"""Small real models, faults planted into them, and replay evidence made by hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import driftline
from driftline.diagnosis.evidence.files import Replay
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def llama(seed: int = 0, layers: int = 4, attention: str = "sdpa") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
        attn_implementation=attention,
        use_cache=False,
    )
    return _sharpened(LlamaForCausalLM(config))


def gpt2(seed: int = 0, layers: int = 4, attention: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=64,
        n_layer=layers,
        n_head=4,
        vocab_size=199,
        attn_implementation=attention,
        use_cache=False,
    )
    return _sharpened(GPT2LMHeadModel(config))


def _sharpened(model: nn.Module) -> nn.Module:
    """Random weights three times as large: attention is not uniform, errors are not tiny."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(seed: int = 0, shape: tuple[int, int] = (4, 48)) -> torch.Tensor:
    return torch.randint(0, 199, shape, generator=torch.Generator().manual_seed(seed))


def run_of(model: nn.Module, ids: torch.Tensor, *, grads: bool = False, name: str = "run") -> Run:
    sink = MemorySink(name=name)
    if grads:
        with driftline.capture(model, sink, levels=("modules", "gradients")):
            model(input_ids=ids).logits.float().square().mean().backward()
        return sink.run()
    with torch.no_grad(), driftline.capture(model, sink):
        model(input_ids=ids)
    return sink.run()


def twin(model: nn.Module, dtype: torch.dtype, fault: Callable[[nn.Module], None] | None = None):
    other = copy.deepcopy(model).to(dtype)
    if fault is not None:
        fault(other)
    return other


def replayed(reference: nn.Module, candidate: Run, ids: torch.Tensor) -> Replay:
    """The reference's modules applied to the candidate's captured inputs, in fp32 and natively."""
    exact, native = MemorySink(name="exact"), MemorySink(name="native")
    inputs: dict[tuple[str, int], dict[str, Record]] = {}
    outputs: dict[tuple[str, int], list[Record]] = {}
    for record in candidate.records:
        place = (record.key.site, record.key.visit)
        if record.key.port == "input":
            inputs.setdefault(place, {})[record.key.slot] = record
        elif record.key.port == "output":
            outputs.setdefault(place, []).append(record)
    busy = False
    visits: dict[str, int] = {}

    def hook(site: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
            nonlocal busy
            if busy:
                return
            visit = visits.get(site, 0)
            visits[site] = visit + 1
            given = inputs.get((site, visit), {})
            busy = True
            try:
                for sink, own in ((exact, False), (native, True)):
                    wanted = outputs.get((site, visit), [])
                    formats = {r.dtype for r in (*given.values(), *wanted)}
                    coarse = next((d for d in ("bfloat16", "float16") if d in formats), "float32")
                    made = _applied(module, args, kwargs, candidate, given, coarse if own else "")
                    for record in wanted:
                        _put(sink, record.key, made.get(record.key.slot))
            finally:
                busy = False

        return after

    handles = [
        module.register_forward_hook(hook(name or "(root)"), with_kwargs=True)
        for name, module in reference.named_modules()
    ]
    with torch.no_grad():
        reference(input_ids=ids)
    for handle in handles:
        handle.remove()
    return Replay(exact.run(), native.run(), {})


def _applied(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    run: Run,
    given: Mapping[str, Record],
    native: str,
) -> dict[str, torch.Tensor]:
    names = list(inspect.signature(module.forward).parameters)
    if native:
        module = _cast(module, native)

    def swapped(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            record = given.get(name)
            if record is None:
                return value
            array = torch.from_numpy(np.array(run.get(*_address(record)).float64()))
            if not value.is_floating_point():
                return array.to(value.dtype)
            return array.to(getattr(torch, record.dtype) if native else torch.float32)
        if isinstance(value, (tuple, list)):
            return type(value)(swapped(item, f"{name}.{at}") for at, item in enumerate(value))
        return value

    new_args = [swapped(value, names[at]) for at, value in enumerate(args)]
    new_kwargs = {key: swapped(value, key) for key, value in kwargs.items()}
    with torch.no_grad():
        made = module(*new_args, **new_kwargs)
    found: dict[str, torch.Tensor] = {}

    def flat(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name or "0"] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                flat(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (tuple, list)):
            for at, item in enumerate(value):
                flat(item, f"{name}.{at}" if name else str(at))

    flat(made, "")
    return found


def _cast(module: nn.Module, dtype: str) -> nn.Module:
    """A copy in another format; its hooks must not fire again."""
    other = copy.deepcopy(module).to(getattr(torch, dtype))
    for part in other.modules():
        part._forward_hooks.clear()
    return other


def _address(record: Record) -> tuple[Any, ...]:
    key = record.key
    return (key.site, key.port, key.slot, key.step, key.rank, key.visit)


def _put(sink: MemorySink, key: TensorKey, tensor: torch.Tensor | None) -> None:
    if tensor is None or tensor.dtype not in _NAMES:
        return
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    sink.put(Record(key, 0, _NAMES[tensor.dtype], tuple(tensor.shape)), data)


def array_run(tensors: Mapping[TensorKey, np.ndarray], name: str = "run", **classes: str) -> Run:
    """A run of given arrays, in their order."""
    sink = MemorySink(name=name)
    for key, array in tensors.items():
        array = np.ascontiguousarray(array)
        record = Record(key, 0, str(array.dtype), array.shape, class_name=classes.get(key.site, ""))
        sink.put(record, array.reshape(-1).view(np.uint8))
    return sink.run()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
