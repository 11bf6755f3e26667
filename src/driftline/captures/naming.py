"""Names of modules: paths below the root of a model, stable across runs and wrappers.

All frameworks share these rules, so that the names of one model are equal in all of them. The
structure of a framework's modules is read through its `ModuleStructure`.

The first model of a process keeps the names that its framework gives, and is itself called
`(root)`. Names of later models begin with the class name (`Draft.layers.0`; `Draft_1.` for the next
model of that class). A module without parameters that belongs to no model, such as a loss, is a
helper, and is named after its class. Wrappers that change where a model runs but not what it
computes (data parallelism, compilers) do not appear in names. This file knows nothing about tensors
and steps.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

# Parentheses cannot occur in a Python attribute name, so no module can have this name.
ROOT = "(root)"
_SEARCHED_ROOTS = 32
"""Number of models whose parents are searched; the search takes too long for hundreds of models."""


class ModuleStructure(Protocol):
    """Access to the structure of a framework's modules.

    Attributes:
        kind: The class of its modules.
        table: The attribute in which a module keeps its children by name.
    """

    @property
    def kind(self) -> type: ...

    @property
    def table(self) -> str: ...

    def wrapped(self, module: Any) -> Any | None:
        """The module inside a known wrapper; None for any other module."""
        ...

    def class_name(self, module: Any) -> str:
        """Name of the module's class as the program defined it."""
        ...

    def children(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Name and module of each child."""
        ...

    def has_parameters(self, module: Any) -> bool:
        """Whether the module or any module below it has a parameter."""
        ...

    def is_foreign(self, module: Any, *, called_by_module: bool) -> bool:
        """Whether the module belongs to no model, such as a compiler's own graph."""
        ...


class Root:
    """One model of the process, and its current step.

    Attributes:
        prefix: Beginning of the names of its modules; empty for the first model.
        helper: Whether it has no parameters and belongs to no model; helpers never count steps.
        step: Its current step.
        called: Whether the model has been called in this step.
        opened: Parts that were called alone in this step, before the model (`generate`'s encoder).
        openers: Parts that were called alone in the first step, before the model.
        ever_called: Whether the model itself has ever been called.
        training: Whether its last call was part of training, so that an optimizer ends the step.
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

    def __init__(self, module: Any, prefix: str, *, helper: bool) -> None:
        # All references to modules are weak: capture must not keep a model alive after the program
        # has dropped it.
        self.module = weakref.ref(module)
        self.prefix = prefix
        self.helper = helper
        self.step = 0
        self.called = False
        self.ever_called = False
        self.training = False
        self.opened: set[str] = set()
        self.openers: set[str] = set()
        # The module tree when it was last read: the model may be deleted before the capture ends.
        self.tree: Any = None


class Place:
    """The name of one module, and everything that is decided once per module.

    `look` caches the session's decision which of its tensors are captured, so that a call costs
    only a dictionary lookup. `last` is what an adapter remembers of the previous call, to handle
    the next one faster.
    """

    __slots__ = ("class_name", "ids", "is_root", "last", "look", "ref", "root", "site", "wraps")

    def __init__(
        self,
        module: Any,
        site: str,
        class_name: str,
        ids: str | None,
        root: Root,
        *,
        is_root: bool,
        wraps: bool,
    ) -> None:
        self.ref = weakref.ref(module)
        self.site = site
        self.class_name = class_name
        self.ids = ids
        self.root = root
        self.is_root = is_root
        self.wraps = wraps
        self.look: Any = None
        self.last: Any = None


def unwrapped(structure: ModuleStructure, module: Any) -> Any:
    """The model inside all of its wrappers."""
    while (inner := structure.wrapped(module)) is not None:
        module = inner
    return module


def parent_of(structure: ModuleStructure, module: Any) -> Any | None:
    """The module that has this one as a child, found by the garbage collector's referrers.

    Unlike a registration hook, this also finds the parents of copies (`deepcopy`) and of models
    built before the capture began. It takes some 10 ms per ancestor in a large program, and is done
    once per model.
    """
    kind, attribute = structure.kind, structure.table
    for table in gc.get_referrers(module):
        if not issubclass(type(table), dict):
            continue
        # The referrer of a module's table of children is the module's `__dict__`, or the module
        # itself if CPython stores its attributes inline.
        for owner in gc.get_referrers(cast("dict[str, Any]", table)):
            # `isinstance` would read `__class__`, which may run the code of a lazy proxy.
            if issubclass(type(owner), kind):
                candidates: list[Any] = [owner]
            elif type(owner) is dict and cast("dict[str, Any]", owner).get(attribute) is table:
                candidates = gc.get_referrers(cast("dict[str, Any]", owner))
            else:
                continue
            for candidate in candidates:
                if (
                    issubclass(type(candidate), kind)
                    # Copies of the module's `__dict__` are referrers too, so the table must be the
                    # candidate's own.
                    and candidate is not module
                    and candidate.__dict__.get(attribute) is table
                ):
                    return candidate
    return None


def topmost(structure: ModuleStructure, module: Any) -> Any:
    """The outermost module that contains a module; the module itself if none does."""
    # Modules may contain each other in a cycle.
    seen = {id(module)}
    while (parent := parent_of(structure, module)) is not None and id(parent) not in seen:
        seen.add(id(parent))
        module = parent
    return module


class ModuleNames:
    """The names of all modules seen so far.

    Args:
        structure: Access to the structure of modules.
        only: The only model to name; None for every model of the process.
        on_place: Called once for each new place.
    """

    def __init__(
        self,
        structure: ModuleStructure,
        only: Any | None = None,
        on_place: Callable[[Place], None] | None = None,
    ) -> None:
        self.structure = structure
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

    def known(self, module: Any) -> Place | None:
        place = self._places.get(id(module))
        # A new module can have the id of a dead one, so the reference is compared too.
        if place is not None and place.ref() is module:
            return place
        return None

    def of(self, module: Any, caller: Place | None) -> Place | None:
        """The place of a module that is being called; None if the module is not watched.

        Args:
            module: The module.
            caller: The place of the module whose forward calls it, if any.
        """
        place = self._places.get(id(module))
        if place is not None and place.ref() is module:
            return place
        if self.structure.is_foreign(module, called_by_module=caller is not None):
            return None
        inside = self.known(unwrapped(self.structure, module))
        if inside is not None:  # the module was wrapped after it got its name
            self._name(module, inside.site, inside.ids, inside.root, is_root=inside.is_root)
            return self.known(module)
        if caller is not None:
            return self._late_place(module, caller)
        if self._only:
            return None
        # A loss or an activation outside any model is not a model of its own.
        if not self.structure.has_parameters(module) and not self._is_lone_model(module):
            return self._helper_place(module)
        searched = len(self.roots) < _SEARCHED_ROOTS
        self._add_root(topmost(self.structure, module) if searched else module, model=True)
        return self.known(module)

    def _is_lone_model(self, module: Any) -> bool:
        """Whether a module without parameters is a model: the first one, if it has children."""
        return not self._has_first and any(True for _ in self.structure.children(module))

    def site(self, site: str) -> Place | None:
        return self._by_site.get(site)

    @property
    def count(self) -> int:
        """Number of named places."""
        return len(self._by_site)

    def places(self) -> Iterator[Place]:
        return iter(list(self._by_site.values()))

    def _name(self, module: Any, site: str, ids: str | None, root: Root, *, is_root: bool) -> None:
        inner = unwrapped(self.structure, module)
        place = Place(
            module,
            site,
            self.structure.class_name(inner),
            ids,
            root,
            is_root=is_root,
            wraps=inner is not module,
        )
        self._places[id(module)] = place
        # A wrapper and the model inside share one site; the wrapper, named first, is listed.
        self._by_site.setdefault(place.site, place)
        if self._on_place is not None:
            self._on_place(place)

    def _prefix(self, class_name: str) -> str:
        count = self._prefixes.get(class_name, 0)
        self._prefixes[class_name] = count + 1
        return f"{class_name}_{count}" if count else class_name

    def _add_root(self, module: Any, *, model: bool) -> None:
        base = unwrapped(self.structure, module)
        prefix = self._prefix(type(base).__name__)
        if model and not self._has_first:
            self._has_first = True
            prefix = ""
        root = Root(base, prefix, helper=False)
        self.roots.append(root)
        self._walk(module, root, site=prefix or ROOT, ids="" if not prefix else None)

    def _walk(self, top: Any, root: Root, *, site: str, ids: str | None) -> None:
        """Name a module and everything below it, depth first.

        A module that has a name keeps it, unless another module has taken its place in the tree (an
        adapter wrapped around a layer).
        """
        seen: set[int] = set()
        sites: set[str] = set()
        waiting: list[tuple[Any, str, str | None]] = [(top, site, ids)]
        while waiting:
            module, site, ids = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            place = self.known(module)
            # An inserted adapter takes over the site of a layer, which then gets a new one.
            if place is None or (place.site != site and place.site in sites):
                is_root = root.module() is unwrapped(self.structure, module)
                self._name(module, site, ids, root, is_root=is_root)
            else:
                site, ids = place.site, place.ids
            sites.add(site)
            inner = self.structure.wrapped(module)
            if inner is not None:
                waiting.append((inner, site, ids))
                continue
            base = "" if site == ROOT else site + "."
            below = [
                (child, base + name, None if ids is None else f"{ids}_{i}" if ids else str(i))
                for i, (name, child) in enumerate(self.structure.children(module))
            ]
            # Reversed because the list is a stack, and the first child has to be named first.
            waiting.extend(reversed(below))

    def _late_place(self, module: Any, caller: Place) -> Place | None:
        """The place of a module that was not in the tree when its caller was named.

        It was added to the tree later, or is outside the tree: in a list, or made by the forward
        that calls it. Modules of one class outside the tree share the site `<caller>.<Class>`, and
        their calls count as visits of it.
        """
        name = type(module).__name__
        site = name if caller.site == ROOT else f"{caller.site}.{name}"
        holder = caller.ref()
        made_before = self._by_site.get(site)
        # Such a module (a softmax, a loss) may be made anew by every forward, and a search for each
        # would be slow.
        passing = (
            made_before is not None
            and made_before.class_name == name
            and not self.structure.has_parameters(module)
        )
        # The module may have been added to the caller's tree, so the tree is walked again first.
        if holder is not None and not passing:
            self._walk(holder, caller.root, site=caller.site, ids=caller.ids)
            place = self.known(module)
            if place is not None:
                return place
        self._walk(module, caller.root, site=site, ids=None)
        return self.known(module)

    def _helper_place(self, module: Any) -> Place:
        name = type(module).__name__
        root = self._helpers.get(name)
        if root is None:
            root = self._helpers[name] = Root(module, name, helper=True)
        self._walk(module, root, site=name, ids=None)
        return cast(Place, self.known(module))
