"""What a module is called: its path below the root of its model, stable over runs and wrappers.

The first model of a process keeps the names of `named_modules()`, and is itself called `(root)`.
Later models are prefixed with their class name (`Draft.layers.0`, the next of that class
`Draft_1.`). A module without parameters that belongs to no model, such as a loss, is a helper and
goes by its class name. Wrappers that change where a model runs but not what it is (DDP, FSDP,
`torch.compile`) leave no trace. This file knows nothing of tensors and steps.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

ROOT = "(root)"
_SEARCHED_ROOTS = 32
"""A program that makes models by the hundred must not wait for the search of each one's parents."""

# Attribute under which a wrapper keeps what it wraps, by the wrapper's class name.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


class Root:
    """One model of the process, and how far its steps have come.

    Attributes:
        prefix: What the names of its modules begin with; empty for the first model.
        helper: Has no parameters and belongs to no model: it never counts steps.
        step: The step it is in.
        called: Whether the model has been called in this step.
        opened: Parts called by themselves in this step, before the model (`generate`'s encoder).
        openers: Parts that were called by themselves in the first step, before the model.
        ever_called: Whether the model itself was called at all.
        training: Whether its last call was one that an optimizer's step will conclude.
    """

    __slots__ = (
        "called",
        "ever_called",
        "helper",
        "module",
        "opened",
        "openers",
        "prefix",
        "step",
        "training",
        "tree",
    )

    def __init__(self, module: nn.Module, prefix: str, *, helper: bool) -> None:
        self.module = weakref.ref(module)
        self.prefix = prefix
        self.helper = helper
        self.step = 0
        self.called = False
        self.ever_called = False
        self.training = False
        self.opened: set[str] = set()
        self.openers: set[str] = set()
        self.tree: Any = None  # as it was last seen: a model may be gone before the capture is


class Place:
    """One module's name and everything that can be decided about it once.

    `look` is filled by whoever selects: a cached decision, so that a call costs a dictionary
    lookup.
    """

    __slots__ = ("class_name", "ids", "is_root", "look", "ref", "root", "site", "wraps")

    def __init__(
        self, module: nn.Module, site: str, ids: str | None, root: Root, *, is_root: bool
    ) -> None:
        self.ref = weakref.ref(module)
        self.site = site
        self.class_name = class_name_of(unwrapped(module))
        self.ids = ids
        self.root = root
        self.is_root = is_root
        self.wraps = wrapped(module) is not None
        self.look: Any = None


def wrapped(module: nn.Module) -> nn.Module | None:
    """What a known wrapper wraps; None for any other module."""
    attribute = _WRAPPERS.get(type(module).__name__)
    return module._modules.get(attribute) if attribute else None


def unwrapped(module: nn.Module) -> nn.Module:
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def class_name_of(module: nn.Module) -> str:
    """The class the program wrote; `fully_shard` and `parametrize` put their own in front."""
    kind = type(module)
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__bases__)
    if sharded or "parametrizations" in module._modules:
        return kind.__bases__[-1].__name__
    return kind.__name__


def is_transparent(module: nn.Module) -> bool:
    """Whether a wrapper's own call need not be looked at: the wrapped module's will be seen.

    It will not when a compiled module was bound to the plain call, before capture began, or comes
    from `torch.nn` itself, so that its call lies inside the compiled region. Then the wrapper
    speaks for it.
    """
    inner = wrapped(module)
    if inner is None:
        return False
    if type(module).__name__ != "OptimizedModule":
        return True
    compiled = getattr(module, "_forward", None) or module.forward
    origin = getattr(compiled, "_torchdynamo_orig_callable", None)
    return (
        getattr(origin, "__self__", None) is inner
        and getattr(origin, "__func__", None) is nn.Module.__call__
    )


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def _is_module(thing: object) -> bool:
    # By type: `isinstance` would ask `__class__`, which is code of its own in lazy proxies.
    return issubclass(type(thing), nn.Module)


def parent_of(module: nn.Module) -> nn.Module | None:
    """The module that holds this one as a child, found through the garbage collector's references.

    Copies (`deepcopy`) and models built before capture began are found too, which a registration
    hook would miss. Takes some 10 ms per ancestor in a large program and is asked once per model.
    """
    for table in gc.get_referrers(module):
        if type(table) is not dict:
            continue
        for owner in gc.get_referrers(cast("dict[str, Any]", table)):
            if _is_module(owner):
                candidates: list[Any] = [owner]
            elif type(owner) is dict and cast("dict[str, Any]", owner).get("_modules") is table:
                candidates = gc.get_referrers(cast("dict[str, Any]", owner))
            else:
                continue
            for candidate in candidates:
                if (
                    _is_module(candidate)
                    and candidate is not module
                    and candidate.__dict__.get("_modules") is table
                ):
                    return candidate
    return None


def topmost(module: nn.Module) -> nn.Module:
    """The outermost model a module is part of; itself when it is part of none."""
    seen = {id(module)}
    while (parent := parent_of(module)) is not None and id(parent) not in seen:
        seen.add(id(parent))
        module = parent
    return module


class ModuleNames:
    """The names of all modules met so far.

    Args:
        only: The one model to name; None for every model of the process.
        on_place: Called once for each new place.
    """

    def __init__(
        self, only: nn.Module | None = None, on_place: Callable[[Place], None] | None = None
    ) -> None:
        self._places: dict[int, Place] = {}
        self._by_site: dict[str, Place] = {}
        self._prefixes: dict[str, int] = {}
        self._on_place = on_place
        self._only = only is not None
        self.roots: list[Root] = []
        self._helpers: dict[str, Root] = {}
        self._has_first = False
        if only is not None:
            self._add_root(only, model=True)

    def known(self, module: nn.Module) -> Place | None:
        place = self._places.get(id(module))
        if place is not None and place.ref() is module:
            return place
        return None

    def of(self, module: nn.Module, caller: Place | None) -> Place | None:
        """The place of a module that is being called; None when it is not part of what is watched.

        Args:
            module: The module.
            caller: The place of the module whose forward calls it, if any.
        """
        place = self.known(module)
        if place is not None:
            return place
        if _is_compiled_graph(module, caller):
            return None
        inside = self.known(unwrapped(module))
        if inside is not None:  # wrapped since it got its name
            self._put(
                module, Place(module, inside.site, inside.ids, inside.root, is_root=inside.is_root)
            )
            return self.known(module)
        if caller is not None:
            return self._late_place(module, caller)
        if self._only:
            return None
        if next(module.parameters(), None) is None and not self._is_lone_model(module):
            return self._helper_place(module)
        searched = len(self.roots) < _SEARCHED_ROOTS
        self._add_root(topmost(module) if searched else module, model=True)
        return self.known(module)

    def _is_lone_model(self, module: nn.Module) -> bool:
        """A model without parameters is a model all the same when it has parts and comes first."""
        return not self._has_first and any(True for _ in children(module))

    def site(self, site: str) -> Place | None:
        return self._by_site.get(site)

    @property
    def count(self) -> int:
        """How many places have a name."""
        return len(self._by_site)

    def places(self) -> Iterator[Place]:
        return iter(list(self._by_site.values()))

    def _put(self, module: nn.Module, place: Place) -> None:
        self._places[id(module)] = place
        self._by_site.setdefault(place.site, place)
        if self._on_place is not None:
            self._on_place(place)

    def _prefix(self, class_name: str) -> str:
        count = self._prefixes.get(class_name, 0)
        self._prefixes[class_name] = count + 1
        return f"{class_name}_{count}" if count else class_name

    def _add_root(self, module: nn.Module, *, model: bool) -> None:
        base = unwrapped(module)
        prefix = self._prefix(type(base).__name__)
        if model and not self._has_first:
            self._has_first = True
            prefix = ""
        root = Root(base, prefix, helper=False)
        self.roots.append(root)
        self._walk(module, root, site=prefix or ROOT, ids="" if not prefix else None)

    def _walk(self, top: nn.Module, root: Root, *, site: str, ids: str | None) -> None:
        """Name everything below, depth first; what has a name keeps it, unless another module has
        taken its place (an adapter wrapped around a layer).
        """
        seen: set[int] = set()
        sites: set[str] = set()
        waiting: list[tuple[nn.Module, str, str | None]] = [(top, site, ids)]
        while waiting:
            module, site, ids = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            place = self.known(module)
            if place is None or (place.site != site and place.site in sites):
                is_root = root.module() is unwrapped(module)
                self._put(module, Place(module, site, ids, root, is_root=is_root))
            else:
                site, ids = place.site, place.ids
            sites.add(site)
            inner = wrapped(module)
            if inner is not None:
                waiting.append((inner, site, ids))
                continue
            base = "" if site == ROOT else site + "."
            below = [
                (child, base + name, None if ids is None else f"{ids}_{i}" if ids else str(i))
                for i, (name, child) in enumerate(children(module))
            ]
            waiting.extend(reversed(below))

    def _late_place(self, module: nn.Module, caller: Place) -> Place | None:
        """A module called inside another that was not there when the model was named.

        It was added since, or is held outside the module tree (in a list, or made on the fly by the
        forward that calls it); the latter share the site `<caller>.<Class>` and count as visits of
        it.
        """
        name = type(module).__name__
        site = name if caller.site == ROOT else f"{caller.site}.{name}"
        holder = caller.ref()
        made_before = self._by_site.get(site)
        # Made anew by every forward (a softmax, a loss): looking for it each time would be slow.
        passing = (
            made_before is not None
            and made_before.class_name == name
            and next(module.parameters(), None) is None
        )
        if holder is not None and not passing:
            self._walk(holder, caller.root, site=caller.site, ids=caller.ids)
            place = self.known(module)
            if place is not None:
                return place
        self._walk(module, caller.root, site=site, ids=None)
        return self.known(module)

    def _helper_place(self, module: nn.Module) -> Place:
        name = type(module).__name__
        root = self._helpers.get(name)
        if root is None:
            root = self._helpers[name] = Root(module, name, helper=True)
        self._walk(module, root, site=name, ids=None)
        return cast(Place, self.known(module))


def _is_compiled_graph(module: nn.Module, caller: Place | None) -> bool:
    """A graph that the compiler made and some backends call as a module: not a part of the model.

    It has no parameters of its own, or is called inside a module without being part of its tree; a
    graph module that is somebody's model is neither.
    """
    return isinstance(module, torch.fx.GraphModule) and (
        caller is not None or next(module.parameters(), None) is None
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs a compiled region (`torch.compile(m)` or `m.compile()`)."""
    return type(module).__name__ == "OptimizedModule" or (
        getattr(module, "_compiled_call_impl", None) is not None
    )
