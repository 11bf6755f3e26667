"""Which module of the original model a node belongs to, and what its values are called.

torch's exporter writes the modules around a node next to it (`pkg.torch.onnx.name_scopes`); the
older one, and other exporters, put the path into the node's name (`/model/layers.0/mlp/Mul`). Both
are read from the exported file, because an optimiser keeps neither. Knows names and who reads whom;
how calls of torch's graph are counted is in `torch_calls`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

from driftline.captures.onnxruntime.graph import Graph, Node
from driftline.captures.onnxruntime.quantised import plain_name

ROOT = "(root)"
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_STACK = "pkg.torch.onnx.stack_trace"
_OUTPUT = re.compile(r"_output_(\d+)$|:(\d+)$")
# A longer text is no list of scopes, and parsing it would take its time.
_LONGEST = 1 << 16
_FARTHEST = 8
"""So many nodes that a quantiser put in are gone back to find one that the exporter wrote."""
_MOST = 64
"""So many nodes that say nothing of themselves are asked for those around them."""
_ROUNDING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
PART = re.compile(r"getitem(_\d{1,6})?")
"""How torch calls one of several results."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class Scope(NamedTuple):
    """Where a node stands.

    Attributes:
        modules: Paths of the modules around it, outermost first, the root not among them.
        classes: Their classes, the root's in front; empty where the exporter does not say.
        operator: The call it was made for: `linear_3` of torch's graph; empty if not known.
        target: What was called there: `aten.linear.default`.
        line: `file.py:12` of the program, if known.
    """

    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    operator: str = ""
    target: str = ""
    line: str = ""

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""


NOWHERE = Scope()


def scope_of(node: Node) -> Scope:
    """What an exporter left about the place of a node."""
    names, classes = _listed(node.about.get(_SCOPES)), _listed(node.about.get(_CLASSES))
    if names:
        # The last of both is the operator itself; a module that has no name is the root.
        paths = tuple(name for name in names[:-1] if name)
        kinds = tuple(kind.rpartition(".")[2] for kind in classes[:-1])
        # Both lists describe the same modules; if they do not, classes cannot be assigned.
        if len(kinds) != len(names) - 1:
            kinds = ()
        # Without a nameless first entry the root is missing; its class is then unknown.
        elif names[0]:
            kinds = ("", *kinds)
        return Scope(
            paths, kinds, names[-1], classes[-1] if classes else "", _line(node.about.get(_STACK))
        )
    # A rewriter that replaced a node by several gives them no names, but the last of them makes the
    # result, which the exporter had named after the node.
    name = plain_name(node.name) or _OUTPUT.sub("", next(iter(node.outputs), ""))
    if "/" in name:
        return Scope(_around(name.split("/")[:-1]), operator=name.rpartition("/")[2])
    return NOWHERE


def _listed(text: str | None) -> list[str]:
    """A list of texts as Python writes it; nothing where it is something else."""
    if not text or len(text) > _LONGEST:
        return []
    try:
        # `literal_eval` reads literals only, so a model file cannot run code here.
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    if not isinstance(value, list):
        return []
    return [str(entry) for entry in cast("list[object]", value)]


def _line(stack: str | None) -> str:
    """The innermost line of the program in a stack."""
    frames = _FRAME.findall(stack or "")
    if not frames:
        return ""
    # The last frame is the innermost one, the line of the model itself.
    path, line = frames[-1]
    return f"{path.rpartition('/')[2]}:{line}"


def _around(parts: list[str]) -> tuple[str, ...]:
    """`/model/layers.0/mlp` → model, model.layers.0, model.layers.0.mlp.

    Of a Sequential the older exporter writes both it and its part: `/layer1/layer1.0/conv`, and
    of one inside another, or inside a list, `/layer1/layer1.0/layer1.0.2/conv`.
    """
    paths: list[str] = []
    for part in filter(None, parts):
        holder, dot, number = part.rpartition(".")
        if paths and dot and f".{paths[-1]}".endswith(f".{holder}"):
            paths.append(f"{paths[-1]}.{number}")
        else:
            paths.append(f"{paths[-1]}.{part}" if paths else part)
    return tuple(paths)


class Names:
    """How the values of a model are called in a run: `{module}/{value}`, the same at every level.

    Made from the file as it was exported, so that an optimised run and another one agree.
    """

    def __init__(self, graph: Graph) -> None:
        self.scopes = [scope_of(node) for node in graph.nodes]
        self.has_scopes = any(_SCOPES in node.about for node in graph.nodes)
        self._graph = graph
        self.placed_by_weight: set[int] = set()
        self.guessed: set[int] = set()
        if self.has_scopes or not any(scope.modules for scope in self.scopes):
            self._place_by_weights()
        if any(scope.modules for scope in self.scopes):
            self._place_silent_nodes()
        self._sites: dict[str, str] = {}
        self._taken: set[str] = set()
        for number, node in enumerate(graph.nodes):
            scope = self.scopes[number]
            if self.has_scopes and scope is NOWHERE:
                scope = self._beside(node)
            for output, value in enumerate(node.outputs):
                if value:
                    self._name(value, scope, node, output)

    def _place_by_weights(self) -> None:
        """Nodes that say nothing of themselves, and have weights: where these come from."""
        for number, node in enumerate(self._graph.nodes):
            if self.scopes[number] is not NOWHERE:
                continue
            path = self._module_of_weights(node)
            readers = self._graph.readers.get(node.outputs[0], []) if node.outputs else []
            if not path and node.op == "MatMul" and len(readers) == 1:
                # The bias of a product is added by a node of its own.
                after = self._graph.nodes[readers[0]]
                path = self._module_of_weights(after) if after.op == "Add" else ""
            if path:
                parts = path.split(".")
                prefixes = [".".join(parts[: index + 1]) for index in range(len(parts))]
                self.scopes[number] = Scope(tuple(prefixes))
                self.placed_by_weight.add(number)

    def _module_of_weights(self, node: Node) -> str:
        for value in node.inputs:
            path, _, slot = value.rpartition(".")
            if value in self._graph.weights and path and slot.startswith(("weight", "bias")):
                return path
        return ""

    def _place_silent_nodes(self) -> None:
        """Nodes that a rewriter put in and said nothing of: in the module around their neighbours.

        A `Split` that was a sequence before. What rounds to integers and back stays outside.
        """
        silent = {
            number: node
            for number, node in enumerate(self._graph.nodes)
            if self.scopes[number] is NOWHERE and node.op not in _ROUNDING
        }
        # All are computed before any is assigned: a guess must not be the reason for the next one.
        scopes_by_node = {number: self._neighbourhood(number) for number in silent}
        for number, scope in scopes_by_node.items():
            self.scopes[number] = scope
        # With most nodes silent the neighbourhood is a guess: a sum may stand further inside.
        if self.placed_by_weight:
            self.guessed = set(silent)

    def _neighbourhood(self, number: int) -> Scope:
        """The innermost module that holds all neighbours of a node which say where they stand."""
        graph = self._graph
        scopes: list[Scope] = []
        for before in (True, False):
            # Backwards and forwards, through other nodes that say nothing.
            waiting, seen = [number], {number}
            while waiting and len(seen) < _MOST:
                node = graph.nodes[waiting.pop()]
                nearby = graph.before(node) if before else graph.behind(node)
                for other in nearby:
                    if other in seen:
                        continue
                    seen.add(other)
                    if self.scopes[other] is NOWHERE:
                        waiting.append(other)
                    else:
                        scopes.append(self.scopes[other])
        return _common(scopes)

    def _beside(self, node: Node) -> Scope:
        """Where a node stands that a quantiser put in: with who made what it reads, or reads it.

        For its name only: what it makes is not what that module makes.
        """
        before = node
        for _ in range(_FARTHEST):
            makers = [self._graph.maker.get(v) for v in self._graph.data_inputs(before)[:1]]
            if not makers or makers[0] is None:
                break
            if self.scopes[makers[0]] is not NOWHERE:
                return self.scopes[makers[0]]
            before = self._graph.nodes[makers[0]]
        for value in node.outputs:
            for reader in self._graph.readers.get(value, ()):
                if self.scopes[reader] is not NOWHERE:
                    return self.scopes[reader]
        return NOWHERE

    def site(self, value: str, near: str = "") -> str:
        """The site of a value; one that an optimiser made stands in the module of another one.

        Args:
            value: Its name.
            near: A value of the exported file that it leads to.
        """
        if value not in self._sites:
            self._name(value, self.scope(near), None, 0)
        return self._sites[value]

    def scope(self, value: str) -> Scope:
        """Where the node stands that made a value in the exported file."""
        number = self._graph.maker.get(value)
        return self.scopes[number] if number is not None else NOWHERE

    def _name(self, value: str, scope: Scope, node: Node | None, output: int) -> None:
        label = value
        if "/" in value:
            label = _OUTPUT.sub(_numbered, value.rpartition("/")[2])
        elif not self.has_scopes and node is not None and scope.operator:
            label = scope.operator + (f".{output}" if output else "")
        if self.has_scopes or scope.modules:
            label = f"{scope.module or ROOT}/{label}"
        site, number = label, 1
        # Two values of one module may end in the same label.
        while site in self._taken:
            site, number = f"{label}~{number}", number + 1
        self._taken.add(site)
        self._sites[value] = site


def _common(scopes: Iterable[Scope]) -> Scope:
    """The modules that are around all of some nodes."""
    common: Scope | None = None
    for scope in scopes:
        if common is None:
            common = Scope(scope.modules, scope.classes)
            continue
        depth = 0
        for module, other in zip(common.modules, scope.modules, strict=False):
            if module != other:
                break
            depth += 1
        common = Scope(common.modules[:depth], common.classes[: depth + 1])
    return common if common is not None else NOWHERE


def _numbered(match: re.Match[str]) -> str:
    number = match[1] or match[2]
    return f".{number}" if number != "0" else ""


# Modules of an exported graph: what goes into each call of one, and what comes out.


MERGED = "merged"
"""Class of a module that the exporter merged into another one."""

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_ANONYMOUS = "onnx::"
"""How torch's older exporter calls weights that it computed: with a batch norm worked in, say."""


class ModuleCall(NamedTuple):
    """One call of one module.

    Attributes:
        site: The module's path.
        visit: Which call of it.
        class_name: Its class; empty where the exporter does not say.
        nodes: Numbers of its nodes in the exported graph.
        inputs: Values that enter, in the order in which they are first read.
        outputs: Values that leave, in the order in which they are made.
        reworked: What leaves it with the batch norm after it worked in, which is no longer its own.
    """

    site: str
    visit: int
    class_name: str
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reworked: str = ""


def module_calls(graph: Graph, names: Names) -> list[ModuleCall]:
    """Every call of every module but the root, inner ones after those around them."""
    members: dict[str, list[int]] = {}
    classes: dict[str, str] = {}
    for number, scope in enumerate(names.scopes):
        for depth, path in enumerate(scope.modules):
            members.setdefault(path, []).append(number)
            if len(scope.classes) == len(scope.modules) + 1:
                classes.setdefault(path, scope.classes[depth + 1])
    calls: list[ModuleCall] = []
    for path, numbers in members.items():
        for visit, part in enumerate(_calls(numbers, names.scopes)):
            calls.append(_call(path, visit, classes.get(path, ""), part, graph, names))
    merged = list(_merged(graph, members))
    merged_inputs = {
        (names.scopes[number].module, value)
        for call in merged
        for number in call.nodes
        for value in call.inputs
    }
    # What the first of merged modules is given is not what the other one is given.
    calls = [
        call._replace(inputs=tuple(v for v in call.inputs if (call.site, v) not in merged_inputs))
        for call in calls
    ]
    return [*calls, *merged]


def _calls(numbers: Sequence[int], scopes: Sequence[Scope]) -> list[list[int]]:
    """Stretches of a module's nodes, if each makes the same calls, or makes them several times;
    else all of them as one.
    """
    stretches = [[numbers[0]]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    # The shortest stretch is taken for one call; the others must be repetitions of it.
    unit = min(stretches, key=len)
    called = [(scopes[number].target, scopes[number].modules) for number in unit]
    pieces = [
        stretch[start : start + len(unit)]
        for stretch in stretches
        for start in range(0, len(stretch), len(unit))
    ]
    # Parts of a sequence may do the same, and a quantiser may have put other nodes between them.
    alike = all(
        [(scopes[number].target, scopes[number].modules) for number in piece] == called
        for piece in pieces
    )
    # Nodes of one call of torch's graph may be apart, too: a product, and the sum with its bias.
    operators = [{scopes[number].operator for number in piece} for piece in pieces]
    alike = alike and sum(map(len, operators)) == len(set[str]().union(*operators))
    # Without targets nothing tells a second call from a module whose nodes are apart.
    is_named = all(target for target, _ in called)
    return pieces if len(stretches) > 1 and is_named and alike else [list(numbers)]


def _call(
    path: str, visit: int, class_name: str, numbers: list[int], graph: Graph, names: Names
) -> ModuleCall:
    inside = set(numbers)
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    # Whether a node whose place was guessed stands in a container or next to it, nothing says.
    is_leaf = all(names.scopes[number].module == path for number in numbers)
    unsure = set[int]() if is_leaf else names.guessed
    for number in numbers:
        node = graph.nodes[number]
        for value in graph.data_inputs(node):
            maker = graph.maker.get(value, -1)
            if maker not in inside and maker not in unsure:
                inputs.setdefault(value)
        for value in node.outputs:
            readers = graph.readers.get(value, ())
            # A value leaves when anything outside reads it, or the caller gets it.
            leaves = value in graph.outputs or not inside.issuperset(readers)
            if value and leaves and unsure.isdisjoint(readers) and value not in graph.constants:
                outputs.setdefault(value)
    reworked = ""
    if is_leaf and any(_is_reworked(number, graph, names) for number in numbers):
        # A container may end with it too: what it gives is right.
        reworked = next(iter(outputs)) if len(outputs) == 1 else ""
        outputs = {}
    return ModuleCall(
        path, visit, class_name, tuple(numbers), tuple(inputs), tuple(outputs), reworked
    )


def _is_reworked(number: int, graph: Graph, names: Names) -> bool:
    """Whether a convolution's weights are not its module's own: a batch norm is in them."""
    node = graph.nodes[number]
    if node.op not in _CONVOLUTIONS:
        return False
    if number not in names.placed_by_weight and not names.has_scopes:
        # torch's older exporter gives weights that it has computed a name of their own.
        return any(value.startswith(_ANONYMOUS) for value in node.inputs[1:2])
    if number not in names.placed_by_weight:
        return False
    module = names.scopes[number].module
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    # A bias of its own keeps its name with a norm worked in. What the node gives then has the name
    # of the norm's, and that is one of several results, of which a convolution has none.
    return bias not in ("", f"{module}.bias") or any(map(PART.fullmatch, node.outputs))


def _merged(graph: Graph, members: dict[str, list[int]]) -> Iterator[ModuleCall]:
    """Modules without nodes whose weights a node of another module reads."""
    seen: set[str] = set()
    for number, node in enumerate(graph.nodes):
        for value in node.inputs[1:]:
            path, _, name = (value if value in graph.weights else "").rpartition(".")
            if name != "weight" or path in members or not path:
                continue
            # A table that is looked up, or a transposed weight, may be shared by several modules.
            if path not in seen and node.op not in ("Gather", "Transpose"):
                seen.add(path)
                inputs = tuple(graph.data_inputs(node)[:1])
                yield ModuleCall(path, 0, MERGED, (number,), inputs, ())


def root_call(graph: Graph, names: Names) -> ModuleCall:
    """The model as a whole."""
    kinds = next((scope.classes[0] for scope in names.scopes if scope.classes), "")
    nodes = tuple(range(len(graph.nodes)))
    return ModuleCall(ROOT, 0, kinds, nodes, tuple(graph.inputs), tuple(graph.outputs))
