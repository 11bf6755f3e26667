"""What a module is called: its path below the root of its model, stable over runs and wrappers.

One rule for every framework, so that names of the same model meet; what a module is made of is
asked of its `ModuleStructure`.

The first model of a process keeps the names its framework gives, and is itself called `(root)`.
Later models are prefixed with their class name (`Draft.layers.0`, the next of that class
`Draft_1.`). A module without parameters that belongs to no model, such as a loss, is a helper and
goes by its class name. Wrappers that change where a model runs but not what it is (data
parallelism, compilers) leave no trace. This file knows nothing of tensors and steps.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

# Parentheses cannot occur in a Python attribute name, so no module can be called this.
ROOT = "(root)"
_SEARCHED_ROOTS = 32
"""A program that makes models by the hundred must not wait for the search of each one's parents."""


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
        """What a known wrapper wraps; None for any other module."""
        ...

    def class_name(self, module: Any) -> str:
        """The class the program wrote."""
        ...

    def children(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Name and module of each child."""
        ...

    def has_parameters(self, module: Any) -> bool:
        """Whether there is one in it or below."""
        ...

    def is_foreign(self, module: Any, *, called_by_module: bool) -> bool:
        """Whether it is no part of any model, such as a compiler's own graph."""
        ...


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

    def __init__(self, module: Any, prefix: str, *, helper: bool) -> None:
        # Weak references throughout: capture must not keep a model alive that the program
        # dropped.
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
    lookup. `last` is what an adapter keeps of the last call, to take the next one faster.
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
    """The module that holds this one as a child, found through the garbage collector's references.

    Copies (`deepcopy`) and models built before capture began are found too, which a registration
    hook would miss. Takes some 10 ms per ancestor in a large program and is asked once per model.
    """
    kind, attribute = structure.kind, structure.table
    for table in gc.get_referrers(module):
        if not issubclass(type(table), dict):
            continue
        # A module's table of children is referred to by its `__dict__`, or by the module itself
        # where CPython stores attributes inline.
        for owner in gc.get_referrers(cast("dict[str, Any]", table)):
            # By type: `isinstance` would ask `__class__`, which is code of its own in lazy proxies.
            if issubclass(type(owner), kind):
                candidates: list[Any] = [owner]
            elif type(owner) is dict and cast("dict[str, Any]", owner).get(attribute) is table:
                candidates = gc.get_referrers(cast("dict[str, Any]", owner))
            else:
                continue
            for candidate in candidates:
                if (
                    issubclass(type(candidate), kind)
                    # The table must be the owner's own, because copies of the
                    # dictionary are referrers too.
                    and candidate is not module
                    and candidate.__dict__.get(attribute) is table
                ):
                    return candidate
    return None


def topmost(structure: ModuleStructure, module: Any) -> Any:
    """The outermost model a module is part of; itself when it is part of none."""
    # Modules may refer to each other in a cycle.
    seen = {id(module)}
    while (parent := parent_of(structure, module)) is not None and id(parent) not in seen:
        seen.add(id(parent))
        module = parent
    return module


class ModuleNames:
    """The names of all modules met so far.

    Args:
        structure: What modules are made of.
        only: The one model to name; None for every model of the process.
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
        # The id of a dead module can be reused by a new one, so the reference is compared
        # too.
        if place is not None and place.ref() is module:
            return place
        return None

    def of(self, module: Any, caller: Place | None) -> Place | None:
        """The place of a module that is being called; None when it is not part of what is watched.

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
        if inside is not None:  # wrapped since it got its name
            self._name(module, inside.site, inside.ids, inside.root, is_root=inside.is_root)
            return self.known(module)
        if caller is not None:
            return self._late_place(module, caller)
        if self._only:
            return None
        # A loss or an activation outside any model does not make a model.
        if not self.structure.has_parameters(module) and not self._is_lone_model(module):
            return self._helper_place(module)
        searched = len(self.roots) < _SEARCHED_ROOTS
        self._add_root(topmost(self.structure, module) if searched else module, model=True)
        return self.known(module)

    def _is_lone_model(self, module: Any) -> bool:
        """A model without parameters is a model all the same when it has parts and comes first."""
        return not self._has_first and any(True for _ in self.structure.children(module))

    def site(self, site: str) -> Place | None:
        return self._by_site.get(site)

    @property
    def count(self) -> int:
        """How many places have a name."""
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
        # A wrapper and the model inside share one site; the outer one is listed.
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
        """Name everything below, depth first; what has a name keeps it, unless another module has
        taken its place (an adapter wrapped around a layer).
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
            # Inserting an adapter gives an existing site to the new module, and moves
            # the old one.
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
            # Reversed because the list is a stack: the first child has to be named
            # first.
            waiting.extend(reversed(below))

    def _late_place(self, module: Any, caller: Place) -> Place | None:
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
            and not self.structure.has_parameters(module)
        )
        # First the tree of the caller is walked again: the module may have been added to
        # it.
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
