"""The Python interface of `ait llm`, `DumpConfig` and `register_hook`, and of Paddle's saving hook.

Signatures and defaults are those of the originals; the torch capture does the work and `dump_tree`
writes the files. Differences are listed in docs/seed-differences.md.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from driftline.dialects.paddle_hook.hook import register_saving_hook as register_saving_hook
from driftline.errors import BadConfig

if TYPE_CHECKING:
    from driftline.captures.torch.session import CaptureSession
    from driftline.runs.sinks import Sink

Model = TypeVar("Model")
# The only kind of hook; the argument exists because the original has it.
HOOK_TYPES = ("dump_data",)

# Weak keys: registering a hook must not keep a model alive.
_sessions: weakref.WeakKeyDictionary[Any, list[tuple[DumpConfig, CaptureSession]]] = (
    weakref.WeakKeyDictionary()
)


class DumpConfig:
    """What to dump of a torch model, and where to write it. Each object is independent.

    Args:
        dump_path: Folder that will hold `ait_dump`; the current folder if not given.
        token_range: Tokens (calls of the model) to dump; only token 0 if not given.
        module_list: Module classes to dump, subclasses included; all if empty.
        tensor_part: 0 inputs, 1 outputs, 2 both.
        device_id: Dump only if the model is on this device; a model on the CPU is always dumped.

    Raises:
        ValueError: An argument has a wrong type or value.
    """

    def __init__(
        self,
        dump_path: str | Path | None = None,
        token_range: Sequence[int] | None = None,
        module_list: Sequence[type] | None = None,
        tensor_part: int = 2,
        device_id: int | None = None,
    ) -> None:
        if dump_path is not None and not isinstance(cast(object, dump_path), str | Path):
            raise BadConfig(f"dump_path is a str, not {dump_path!r}")
        self.dump_path = str(dump_path) if dump_path is not None else "./"
        self.token_range = _list_of(int, "token_range", token_range, [0])
        self.module_list = _list_of(type, "module_list", module_list, [])
        if any(token < 0 for token in self.token_range):
            raise BadConfig(f"token_range counts from 0 upwards, not {self.token_range}")
        # True equals 1 in Python, and would silently mean outputs.
        if isinstance(cast(object, tensor_part), bool) or tensor_part not in (0, 1, 2):
            raise BadConfig(f"tensor_part is 0, 1 or 2, not {tensor_part!r}")
        self.tensor_part = tensor_part
        if device_id is not None and (
            not isinstance(cast(object, device_id), int)
            or isinstance(device_id, bool)
            or device_id < 0
        ):
            raise BadConfig(f"device_id is the index of a device or None, not {device_id!r}")
        self.device_id = device_id

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"DumpConfig({fields})"


Item = TypeVar("Item")


def _list_of(kind: type[Item], name: str, argument: object, default: list[Item]) -> list[Item]:
    if argument is None:
        return default
    if not isinstance(argument, list | tuple | range):
        raise BadConfig(f"{name} is a list, not {argument!r}")
    items = list(cast("Sequence[object]", argument))
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise BadConfig(f"{name} is a list of {kind.__name__}, and {item!r} is none")
    return cast("list[Item]", items)


@overload
def register_hook(
    model: Model, config: DumpConfig, hook_type: str = ..., *, hook_name: str = ...
) -> Model: ...


@overload
def register_hook(
    model: Model,
    path: str | Path,
    target_class_names: str | Sequence[str] | None = ...,
    max_saved_tensors: int = ...,
    max_saved_grads: int = ...,
) -> Model: ...


def register_hook(model: Any, *arguments: Any, **options: Any) -> Any:
    """Dump a model's tensors while it runs; accepts the call of either original.

    `register_hook(model, DumpConfig(...), hook_type="dump_data")` writes the tree of `ait llm
    dump`; `hook_name` is the same as `hook_type`. `register_hook(model, path=...,
    target_class_names=...)` is `register_saving_hook`.

    Returns:
        The model itself.

    Raises:
        ValueError: An argument has a wrong type or value.
    """
    first = arguments[0] if arguments else options.get("config")
    # Both originals name their function `register_hook`; the first argument decides which is meant.
    if isinstance(first, str | Path) or (not arguments and "config" not in options and options):
        try:
            return register_saving_hook(model, *arguments, **options)
        except TypeError as problem:
            raise BadConfig(f"register_hook cannot be called like this: {problem}") from None
    if not isinstance(first, DumpConfig):
        raise BadConfig(
            f"register_hook needs a DumpConfig, not {first!r}",
            hint="register_hook(model, DumpConfig(dump_path='dump')), "
            "or path= and target_class_names= for the saving hook",
        )
    options.pop("config", None)
    return _register_dump(model, first, *arguments[1:], **options)


def _register_dump(
    model: Any, config: DumpConfig, hook_type: str = "dump_data", *, hook_name: str = ""
) -> Any:
    wanted = hook_name or hook_type
    if wanted not in HOOK_TYPES:
        raise BadConfig(f"hook_type can only be 'dump_data', not {wanted!r}")
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise BadConfig(f"register_hook needs a torch.nn.Module, not {type(model).__name__}")
    others = _sessions.setdefault(model, [])
    # Two sessions would write the same files twice.
    if any(Path(c.dump_path).resolve() == Path(config.dump_path).resolve() for c, _ in others):
        warnings.warn(
            f"this model is being dumped to {config.dump_path!r} already; the call is ignored",
            stacklevel=3,
        )
        return model
    others.append((config, _start(model, config)))
    return model


def _start(model: Any, config: DumpConfig) -> CaptureSession:
    from driftline.captures.options import Reduction
    from driftline.captures.selection import Selection
    from driftline.captures.torch.layers import module_tree
    from driftline.captures.torch.session import CaptureSession

    # The sink is made later, in a hook; a strong reference would keep the model alive.
    follow = weakref.ref(model)
    dump_path = Path(config.dump_path).absolute()  # the program may change its folder later

    def make_sink() -> Sink:
        from driftline.dialects.ait.dump_tree import AitTree
        from driftline.runs.sinks import Nowhere

        device = _device_of(follow())
        index = device.partition(":")[2]
        # Decided when tensors come: a model may be moved after the hook is registered.
        if config.device_id is not None and index and int(index) != config.device_id:
            return Nowhere()
        tree = AitTree(dump_path, device=device)
        tree.topology(module_tree(session.names, ()).to_json())
        return tree

    class ListedModules(CaptureSession):
        """Captures modules of the classes in the list only."""

        module_types = tuple(config.module_list)

    session = ListedModules(
        make_sink,
        Selection(steps=tuple(map(str, config.token_range)) or ("none",), part=config.tensor_part),
        Reduction("full"),
        ("modules",),
        model=model,
        steps_by="call",
    )
    session.start()
    weakref.finalize(model, session.stop)  # when the model is gone, or at the end of the program
    return session


def _device_of(model: Any) -> str:
    """The device of the first parameter now; the CPU for a model without parameters."""
    parameter = next(iter(model.parameters()), None) if model is not None else None
    return str(parameter.device) if parameter is not None else "cpu"
