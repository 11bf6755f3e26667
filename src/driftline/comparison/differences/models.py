"""Compare two models module by module: classes, code, attributes, modes, hooks and tensors.

Modules are paired by their sites, or by a mapping of names. Values that differ only by an address,
a path, a device or a seed are not differences. Equal differences of repeated layers are merged into
one with all their sites.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from driftline.alignment.reconcile.layout import layout
from driftline.comparison.differences.difference import ABSENT, Difference, Kind
from driftline.comparison.differences.weights import Relation, relation_of
from driftline.numerics.dtypes import DTYPES
from driftline.runs.sidecars.model_facts import (
    CodeFacts,
    ModelFacts,
    ModuleFacts,
    TensorFacts,
    tensor_path,
)

_ADDRESSES = 1 << 40
"""Integers of at least this size are addresses or hashes rather than settings."""
_PATH = re.compile(r"(?:[A-Za-z]:[\\/]|~[\\/]|\.{0,2}/|file:).*")
_PATH_NAMES = re.compile(r"(?i)(?:path|dir|file|folder|root|name_or_path|cache)s?$")
# A word with a number is any accelerator that torch knows, under whatever name it registered.
_DEVICE = re.compile(
    r"(?:cpu|cuda|xpu|mps|npu|hpu|meta|gpu|Place\(.*\))(?::\d+)?|[a-z][a-z0-9_]*:\d+"
)
# Parts of texts that differ from run to run: addresses, identifiers, paths and ports.
_PLACES = re.compile(
    r"0x[0-9a-fA-F]{4,}"
    r"|[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}"
    r"|(?<![\w.:/])(?:/[\w.+-]+){2,}/?"
    r"|(?<=localhost:)\d+|(?<=127\.0\.0\.1:)\d+"
)
_DIRECTORY_NAMES = re.compile(r"(?i)(?:dir|folder|file)s?$")
_DEVICE_NAMES = re.compile(r"(?i)(?:^|_)(?:device|gpu|cuda|npu)s?(?:_(?:id|index|idx)s?)?$")
_RUN_NAMES = re.compile(r"(?i)(?:^|[_.])(?:seeds?|pid|port|host(?:name)?|run_(?:id|name))$")
_VERSION = re.compile(
    r"(?i)(?:version|commit_hash|timestamp|created(?:_at)?|started(?:_at)?|start_time|date)$"
)
_TIMES = (1e9, 4e9)
"""Floats in this range that are not whole are times in seconds since 1970, not settings."""
_DIGITS = re.compile(r"\d+")
_LIBRARIES = ("torch.", "paddle.")
_LAYOUT_CODE = "torch.distributed."
_LAYOUT_MARKS = frozenset({"_distribute_module_applied"})
"""Attributes that torch sets on modules whose weights it has distributed over ranks."""
_EPSILONS = {"_epsilon": "eps", "epsilon": "eps", "variance_epsilon": "eps"}
"""Names of the epsilon in other frameworks and hand-written norms."""
# If a smaller fraction of the modules has common names, the models use different names throughout.
_ENOUGH = 0.3


class Names(NamedTuple):
    """The mapping from the candidate's sites to the reference's.

    Attributes:
        to_reference: The reference's site for each site of the candidate that has another name.
    """

    to_reference: Mapping[str, str]

    def of(self, site: str) -> str:
        return self.to_reference.get(site, site)


def names_by_prefix(reference: ModelFacts, candidate: ModelFacts) -> Names:
    """The mapping of names for two models whose names differ by a prefix.

    `model.layers.0.mlp` of one model may be `layers.0.mlp` of the other. The prefix that makes the
    most names equal is removed or added.
    """
    first, second = set(reference.modules), set(candidate.modules)
    best, matched, added = "", len(first & second), ""
    shorter = _matches_without_prefix(first, second)
    longer = _matches_without_prefix(second, first)
    for prefix in sorted({*shorter, *longer}):
        for count, put_on in ((shorter[prefix], True), (longer[prefix], False)):
            if count > matched:
                best, matched, added = prefix, count, prefix if put_on else ""
    if not best:
        return Names({})
    return Names(
        {
            name: renamed
            for name in second
            if name not in first
            and (renamed := added + name if added else name.removeprefix(best)) in first
        }
    )


def _matches_without_prefix(names: Iterable[str], others: Container[str]) -> Counter[str]:
    """For each prefix, how many of the names that begin with it equal another name without it."""
    parted = (name.partition(".") for name in names)
    return Counter(f"{head}." for head, _, rest in parted if rest and rest in others)


# Values.


def is_same_value(name: str, reference: Any, candidate: Any) -> bool:
    """Whether two values differ at most by an address, a path, a device or a seed.

    >>> is_same_value("device", "cpu", "cuda:0"), is_same_value("eps", 1e-12, 1e-05)
    (True, False)
    >>> is_same_value("key", -(2**60), 2**59), is_same_value("limit", 2**63 - 1, 4096)
    (True, False)
    >>> is_same_value("mask_value", -1e30, -1e38), is_same_value("gpu", None, 0)
    (False, True)
    >>> is_same_value("note", "read from /data/a", "read from /mnt/b")
    True
    """
    if reference == candidate and type(reference) is type(candidate):
        return True
    if _RUN_NAMES.search(name) or _VERSION.search(name):
        return True
    if _is_place(name, reference, candidate):
        return True
    if _is_number(reference) and _is_number(candidate):
        return _is_same_number(reference, candidate)
    if isinstance(reference, list) and isinstance(candidate, list):
        first, second = cast("list[Any]", reference), cast("list[Any]", candidate)
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(is_same_value(name, a, b) for a, b in pairs)
    if not isinstance(reference, str) or not isinstance(candidate, str):
        return False
    return _is_same_text(name, reference, candidate)


def _is_place(name: str, reference: Any, candidate: Any) -> bool:
    """Whether two values of different types both denote a device, or a path and None."""
    values = (reference, candidate)
    numbers = [value is None or isinstance(value, int) for value in values]
    if all(numbers):
        return bool(_DEVICE_NAMES.search(name))
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) != 1 or not any(numbers):
        return False
    # A map of devices says `cpu` or the number of an accelerator.
    on_device = bool(_DEVICE.fullmatch(texts[0])) and type(values[numbers.index(True)]) is int
    is_path = bool(_PATH.fullmatch(texts[0])) and bool(_PATH_NAMES.search(name))
    return on_device or (is_path and None in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same_number(reference: float, candidate: float) -> bool:
    if reference == candidate:
        return True
    # Integers of this size are addresses, or hashes with a salt of the process. Floats of this size
    # may be settings: attention masks are filled with -1e30.
    numbers = reference, candidate
    if all(isinstance(n, float) and _TIMES[0] < n < _TIMES[1] for n in numbers):
        return not any(n.is_integer() for n in map(float, numbers))
    whole_numbers = isinstance(reference, int) and isinstance(candidate, int)
    return whole_numbers and min(abs(reference), abs(candidate)) >= _ADDRESSES


def _is_same_text(name: str, reference: str, candidate: str) -> bool:
    if _PLACES.sub("0x", reference) == _PLACES.sub("0x", candidate):
        return True
    if _DEVICE.fullmatch(reference) and _DEVICE.fullmatch(candidate):
        return True
    paths = [bool(_PATH.fullmatch(text)) for text in (reference, candidate)]
    if all("/" in text for text in (reference, candidate)) and _DIRECTORY_NAMES.search(name):
        return True
    return all(paths) or (any(paths) and bool(_PATH_NAMES.search(name)))


def shown(value: Any) -> str:
    """The text of a value in a difference."""
    if value is None:
        return "None"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return "(" + ", ".join(map(shown, cast("list[Any]", value))) + ")"
    return str(value)


# Modules.


class ModelPair:
    """Two models to compare.

    Args:
        reference: The facts about the reference's model.
        candidate: The facts about the candidate's model.
        names: The mapping from the candidate's sites to the reference's.
        same_ranks: Whether the processes hold the same part of their models. If not, values of
            tensors are not compared, because they belong to different shards.
    """

    def __init__(
        self,
        reference: ModelFacts,
        candidate: ModelFacts,
        names: Names,
        *,
        same_ranks: bool = True,
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self.names = names
        self.same_ranks = same_ranks
        self.same_framework = reference.framework == candidate.framework
        self._candidate_sites = {names.of(site): site for site in candidate.modules}
        self._candidate_tensors = {
            tensor_path(names.of(tensor.site), tensor.name): tensor
            for tensor in candidate.tensors.values()
        }
        self.dtypes = self._model_dtypes()

    def differences(self) -> Iterator[Difference]:
        """All differences of modules and tensors, in the order of the reference's modules."""
        matched = 0
        lone: list[ModuleFacts] = []
        for site, module in self.reference.modules.items():
            other = self.candidate.modules.get(self._candidate_sites.get(site, ""))
            if other is None:
                lone.append(module)
                continue
            matched += 1
            yield from self._module(module, other)
        if self.same_framework:
            yield from self._code()
        extra = [
            module
            for site, module in self.candidate.modules.items()
            if self.names.of(site) not in self.reference.modules
        ]
        total = max(len(self.reference.modules), 1)
        if matched < _ENOUGH * total:
            yield Difference(
                "module",
                "",
                "names of modules",
                f"{total} modules",
                f"{matched} of them by the same name",
                counts=False,
            )
        else:
            # Between frameworks such differences are expected, so they do not count.
            for alone, word in ((lone, "missing"), (extra, "extra")):
                for difference in _lone_modules(alone, word):
                    yield replace(difference, counts=self.same_framework)
        yield from self._tensors(named_alike=matched >= _ENOUGH * total)

    def _module(self, module: ModuleFacts, other: ModuleFacts) -> Iterator[Difference]:
        site, kind = module.site, module.short_class
        # Classes of two frameworks are different even if they have the same name.
        same_class = self.same_framework and module.short_class == other.short_class
        if self.same_framework and not same_class:
            yield Difference(
                "class", site, "", kind, other.short_class, class_name=kind, relation="class"
            )
        if None not in (module.training, other.training) and module.training != other.training:
            values = str(module.training), str(other.training)
            yield Difference("mode", site, "training", *values, class_name=kind)
        yield from self._settings(module, other, same_class=same_class)
        hooks = _listed(module.hooks), _listed(other.hooks)
        if not is_same_value("hooks", *hooks):
            yield Difference("hook", site, "hooks", *hooks, class_name=kind)
        forwards = module.forward or "its class's", other.forward or "its class's"
        if not self._is_same("forward", *forwards):
            yield Difference("function", site, "forward", *forwards, class_name=kind)

    def _settings(
        self, module: ModuleFacts, other: ModuleFacts, *, same_class: bool
    ) -> Iterator[Difference]:
        """Differences of attributes, and of functions that are attributes."""
        tables: tuple[tuple[Kind, Mapping[str, Any], Mapping[str, Any]], ...] = (
            ("attribute", module.attributes, other.attributes),
            ("function", module.functions, other.functions),
        )
        for what, first, second in tables:
            if not self.same_framework:
                first, second = _with_epsilon(first), _with_epsilon(second)
            for name in (*first, *(name for name in second if name not in first)):
                # Different classes have different attributes, so only common ones are compared.
                missing = name not in first or name not in second
                if missing and (not same_class or name in _LAYOUT_MARKS):
                    continue
                a, b = first.get(name, ABSENT), second.get(name, ABSENT)
                if what == "function" and not self.same_framework:
                    # A function is in other modules in another framework; only names are compared.
                    a, b = (str(function).rpartition(".")[2] for function in (a, b))
                if not self._is_same(name, a, b):
                    values = shown(a), shown(b)
                    yield Difference(
                        what, module.site, name, *values, class_name=module.short_class
                    )

    def _is_same(self, name: str, first: Any, second: Any) -> bool:
        if is_same_value(name, first, second):
            return True
        # A model in another number format has that format in many attributes.
        words = [str(value).removeprefix("torch.") for value in (first, second)]
        return self.dtypes is not None and tuple(words) == self.dtypes

    def _code(self) -> Iterator[Difference]:
        sites: dict[tuple[str, str], list[str]] = {}
        for site, module in self.reference.modules.items():
            other = self.candidate.modules.get(self._candidate_sites.get(site, ""))
            if other is not None and module.short_class == other.short_class:
                sites.setdefault((module.class_name, other.class_name), []).append(site)
        for (first, second), places in sites.items():
            old, new = self.reference.classes.get(first), self.candidate.classes.get(second)
            if old is None or new is None:
                continue
            short = first.rpartition(".")[2]
            own = not first.startswith(_LIBRARIES)
            for name in (*old.code, *(name for name in new.code if name not in old.code)):
                difference = _code_change(name, old.code.get(name), new.code.get(name))
                if difference is not None:
                    yield Difference(
                        "code",
                        places[0],
                        name,
                        *difference[:2],
                        sites=tuple(places),
                        class_name=short,
                        source=difference[2],
                        # Code of a library differs by its version; the program did not change it.
                        counts=own,
                    )
            for name in (*old.constants, *(n for n in new.constants if n not in old.constants)):
                a, b = old.constants.get(name, ABSENT), new.constants.get(name, ABSENT)
                if own and not self._is_same(name, a, b):
                    yield Difference(
                        "attribute",
                        places[0],
                        name,
                        shown(a),
                        shown(b),
                        sites=tuple(places),
                        class_name=short,
                    )

    # --- parameters and buffers

    def _model_dtypes(self) -> tuple[str, str] | None:
        """The pair of number formats that most weights have; None if both are the same."""
        pairs: Counter[tuple[str, str]] = Counter()
        for path, tensor in self.reference.tensors.items():
            other = self._candidate_tensors.get(path)
            floating = DTYPES.get(tensor.dtype)
            if other is None or tensor.is_buffer or floating is None or not floating.is_floating:
                continue
            size = 1
            for extent in tensor.shape:
                size *= extent
            pairs[tensor.dtype, other.dtype] += size
        if not pairs:
            return None
        most = pairs.most_common(1)[0][0]
        return most if most[0] != most[1] else None

    def _tensors(self, *, named_alike: bool) -> Iterator[Difference]:
        rounded: Counter[str] = Counter()
        for path, tensor in self.reference.tensors.items():
            other = self._candidate_tensors.get(path)
            if other is not None:
                yield from self._tensor(tensor, other, rounded)
            elif named_alike and self._are_alike(tensor.site):
                yield _lone_tensor(tensor, tensor.site, "missing")
        for path, tensor in self._candidate_tensors.items():
            site = self.names.of(tensor.site)
            lone = path not in self.reference.tensors
            if lone and named_alike and self._are_alike(site):
                yield _lone_tensor(tensor, site, "extra")
        if self.dtypes is not None:
            total = sum(rounded.values())
            fits = rounded["rounded"] + rounded["same"]
            about = f"{fits} of {total} the same, or rounded to it" if total else ""
            yield Difference(
                "parameter", "", "number format of the weights", *self.dtypes, about, counts=False
            )

    def _tensor(
        self, tensor: TensorFacts, other: TensorFacts, rounded: Counter[str]
    ) -> Iterator[Difference]:
        kind: Kind = "buffer" if tensor.is_buffer else "parameter"

        def difference(first: str, second: str, word: str, **more: Any) -> Difference:
            owner = self.reference.modules.get(tensor.site)
            name = "" if owner is None else owner.short_class
            return Difference(
                kind, tensor.site, tensor.name, first, second, word, class_name=name, **more
            )

        yield from self._ties_and_training(tensor, other, difference)
        if tensor.unreadable or other.unreadable or not self.same_ranks:
            return
        relation = self._relation(tensor, other)
        if relation.word == "transposed" and self._is_stored_transposed(tensor, other):
            return
        if tensor.shape != other.shape and relation.word != "transposed":
            yield difference(shown(list(tensor.shape)), shown(list(other.shape)), "shape")
            return
        dtypes = tensor.dtype, other.dtype
        converted = dtypes == self.dtypes
        if dtypes[0] != dtypes[1]:
            rounded[relation.word] += not tensor.is_buffer
        expected = relation.word in ("same", "rounded", "")
        if expected and (dtypes[0] == dtypes[1] or (converted and not tensor.is_buffer)):
            if relation.word == "rounded" and dtypes[0] == dtypes[1]:
                yield difference(
                    *dtypes, f"rounded to {relation.detail}", distance=relation.distance
                )
            return
        # A rounded buffer is reported, because loaders normally keep frequencies and statistics in
        # float32.
        if expected and relation.word == "same" and converted:
            return
        detail = f" ({relation.detail})" if relation.word == "transposed" else ""
        yield difference(
            *dtypes,
            relation.word + detail if relation.word not in ("", "same") else "dtype",
            distance=relation.distance,
        )

    def _are_alike(self, site: str) -> bool:
        """Whether both sides have this module; of two frameworks, with classes of one name."""
        module = self.reference.modules.get(site)
        other = self.candidate.modules.get(self._candidate_sites.get(site, ""))
        if module is None or other is None:
            return False
        return self.same_framework or module.short_class == other.short_class

    def _is_stored_transposed(self, tensor: TensorFacts, other: TensorFacts) -> bool:
        """Whether the two frameworks store this module's weight with its axes exchanged."""
        owners = self.reference.modules.get(tensor.site), self.candidate.modules.get(other.site)
        if self.same_framework or owners[0] is None or owners[1] is None:
            return False
        first = layout(self.reference.framework, owners[0].short_class)
        second = layout(self.candidate.framework, owners[1].short_class)
        return bool(first and second) and first != second

    def _ties_and_training(
        self, tensor: TensorFacts, other: TensorFacts, difference: Callable[..., Difference]
    ) -> Iterator[Difference]:
        tied = tensor.tied, self.renamed_path(other.tied)
        if tied[0] != tied[1]:
            words = [f"tied to {path}" if path else "not tied" for path in tied]
            yield difference(words[0], words[1], "tied")
        if tensor.requires_grad != other.requires_grad and not tensor.is_buffer:
            words = ["trained" if t.requires_grad else "frozen" for t in (tensor, other)]
            # Without training it has no effect on numbers.
            trained = bool(self.reference.training or self.candidate.training)
            yield difference(words[0], words[1], "requires_grad", counts=trained)

    def _relation(self, tensor: TensorFacts, other: TensorFacts) -> Relation:
        values = self.reference.weights, self.candidate.weights
        # The values of a tied tensor are stored under its first name.
        first = values[0].get(tensor.tied or tensor.path)
        second = values[1].get(other.tied or other.path)
        if first is None or second is None:
            return Relation("")
        return relation_of(first, second)

    def sites(self, side: int) -> Iterable[str]:
        """Sites of the reference's modules (0) or the candidate's (1), by the reference's names."""
        return self._candidate_sites if side else self.reference.modules

    def has(self, site: str) -> bool:
        """Whether either side has this module; always true of an empty site."""
        return not site or site in self.reference.modules or site in self._candidate_sites

    def has_both_modules(self, site: str) -> bool:
        return site in self.reference.modules and site in self._candidate_sites

    def has_both(self, path: str) -> bool:
        """Whether both models have this tensor.

        Args:
            path: The path of the tensor, by the reference's names.
        """
        return path in self.reference.tensors and path in self._candidate_tensors

    def lies_alike(self, path: str) -> bool:
        """Whether both sides store the elements of a tensor in the same order.

        Args:
            path: The path of the tensor, by the reference's names.
        """
        if self.same_framework:
            return True
        if not self.has_both(path):
            return False
        tensor, other = self.reference.tensors[path], self._candidate_tensors[path]
        return tensor.shape == other.shape and not self._is_stored_transposed(tensor, other)

    def renamed_path(self, path: str) -> str:
        # The path of an average contains the path of the weight that it averages.
        of, mark, own = path.rpartition(").")
        site, _, name = own.rpartition(".")
        return of + mark + (f"{self.names.of(site)}.{name}" if site else own)


def _code_change(
    name: str, first: CodeFacts | None, second: CodeFacts | None
) -> tuple[str, str, str] | None:
    """Where a function differs: file and line of both sides, and the candidate's path and line."""
    if first is None or second is None:
        # Only a changed function calls it, and that function is reported itself.
        return None
    if first.digest == second.digest:
        return None
    # Different versions of Python compile the same source differently.
    if first.digest.partition(":")[0] != second.digest.partition(":")[0]:
        return None
    lines = _changed_line(first, second)
    texts = [
        f"{_file(code.file)}:{line}" for code, line in zip((first, second), lines, strict=True)
    ]
    return texts[0], texts[1], f"{second.file}:{lines[1]}"


def _changed_line(first: CodeFacts, second: CodeFacts) -> tuple[int, int]:
    """The first line that differs, on each side."""
    numbers = list(first.lines), list(second.lines)
    digests = list(first.lines.values()), list(second.lines.values())
    matcher = difflib.SequenceMatcher(None, *digests, autojunk=False)
    for tag, start, _, other, _ in matcher.get_opcodes():
        if tag != "equal":
            # An insertion at the end has no line of its own on the other side.
            first_line = numbers[0][min(start, len(numbers[0]) - 1)] if numbers[0] else first.line
            second_line = numbers[1][min(other, len(numbers[1]) - 1)] if numbers[1] else second.line
            return first_line, second_line
    return first.line, second.line


def _file(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _listed(hooks: Mapping[str, list[str]]) -> str:
    # Hooks with which torch distributes a model over ranks are not part of the model.
    own = {
        kind: [name for name in names if not name.startswith(_LAYOUT_CODE)]
        for kind, names in hooks.items()
    }
    texts = [f"{kind}: {', '.join(names)}" for kind, names in sorted(own.items()) if names]
    return "; ".join(texts) or "none"


def _with_epsilon(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes in which the epsilon of a norm has torch's name."""
    return {_EPSILONS.get(name, name): value for name, value in attributes.items()}


def _lone_modules(modules: Iterable[ModuleFacts], word: str) -> Iterator[Difference]:
    """Differences for modules that one side lacks, without the modules inside those."""
    above: set[str] = set()
    for module in modules:
        parent = module.site.rpartition(".")[0]
        while parent and parent not in above:
            parent = parent.rpartition(".")[0]
        above.add(module.site)
        if not parent:
            kind = module.short_class
            values = (kind, ABSENT) if word == "missing" else (ABSENT, kind)
            yield Difference("module", module.site, "", *values, word, class_name=kind)


def _lone_tensor(tensor: TensorFacts, site: str, word: str) -> Difference:
    kind: Kind = "buffer" if tensor.is_buffer else "parameter"
    about = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    values = (about, ABSENT) if word == "missing" else (ABSENT, about)
    return Difference(kind, site, tensor.name, *values, word)


# Repeated layers.


def folded(differences: Iterable[Difference]) -> list[Difference]:
    """Merge equal differences of repeated layers into one with all their sites."""
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for difference in differences:
        key: tuple[Any, ...] = (
            difference.kind,
            _without_numbers(difference.name),
            difference.reference,
            difference.candidate,
            difference.relation,
            # A mode is usually set for a whole model, whatever the classes of its modules are.
            "" if difference.kind == "mode" else difference.class_name,
            difference.counts,
            difference.source,
        )
        # Differences of weights and code are merged only if they have the same place in a layer.
        if difference.kind in ("parameter", "buffer", "module", "class", "code"):
            key += (_DIGITS.sub("*", difference.site),)
        groups.setdefault(key, []).append(difference)
    return [_merged(group) for group in groups.values()]


def _without_numbers(name: str) -> str:
    # The numbers of ranks after a name must stay: they distinguish differences.
    head, mark, ranks = name.partition(" (rank")
    return _DIGITS.sub("*", head) + mark + ranks


def _merged(group: list[Difference]) -> Difference:
    first = group[0]
    sites = [site for difference in group for site in difference.sites or (difference.site,)]
    distances = [d.distance for d in group if d.distance is not None]
    distance = max(distances) if distances else None
    if any(difference.class_name != first.class_name for difference in group):
        first = replace(first, class_name="")
    return replace(first, sites=tuple(dict.fromkeys(filter(None, sites))), distance=distance)
