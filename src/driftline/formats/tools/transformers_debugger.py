"""Output of transformers' `model_addition_debugger`: a JSON tree of calls, with or without files.

    LlamaForCausalLM_debug_tree_FULL_TENSORS.json       printed values, or names of files
    LlamaForCausalLM_debug_tree_SUMMARY.json            the same without values
    LlamaForCausalLM.model.norm_outputs.safetensors     with use_repr=False

Printed values are shortened and rounded to five digits, so only the statistics next to them are
read, which have five digits too. The tree omits the middle layers; their files exist and are read.
If a module is called again, its files are overwritten: the earlier call is then a lost tensor with
that reason.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.errors import BadFile
from driftline.formats.dump_run import Leaf, TreeRun, partial_summary
from driftline.formats.folder import Folder, natural
from driftline.formats.tensor_files import describe, unreadable
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import Port, Record, TensorKey

NAME = "transformers debugger"
FULL = "_debug_tree_FULL_TENSORS.json"
SUMMARY = "_debug_tree_SUMMARY.json"
LARGEST_JSON = 1 << 30
DEEPEST = 200
_NUMBER = re.compile(r"\d+")
_PRINTED = re.compile(r"tensor\(([^,)]+)")
_FILE = re.compile(r"(.+?)_(inputs_args|inputs_kwargs|outputs)(?:_(.+))?\.safetensors", re.DOTALL)
_LAYER = re.compile(r"(.*?\.)(\d{1,18})((?:\..*)?)", re.DOTALL)
_POSITION = re.compile(r"_(\d+)(?=_|$)")
"""In a file's name, `_` joins positions inside containers, and also the words of a name."""
_OVERWRITTEN = "a later call of this module wrote over it"


class _ListedTensor(NamedTuple):
    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    file: str
    record: Record


def sniff(path: Path) -> bool:
    return bool(_models(path))


def open(path: Path) -> TreeRun:
    """Open the folder as a run; the sites of further models begin with the model's class.

    Raises:
        BadFile: A tree of calls cannot be read.
    """
    folder = Folder(path)
    files = set(folder.files())
    leaves: list[Leaf] = []
    models = _models(path)
    for index, model in enumerate(models):
        # The full tree names the files; the summary is the fallback.
        name = model + (FULL if model + FULL in files else SUMMARY)
        try:
            tree = json.loads(folder.read(name, LARGEST_JSON))
            if not isinstance(tree, dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError, RecursionError) as trouble:
            raise BadFile(f"{path / name} cannot be read: {reason_of(trouble)}") from trouble
        # The first model keeps plain names, so that folders of one model pair with other runs.
        prefix = f"{model}." if index else ""
        leaves += _Model(folder, files, model, prefix, name).leaves(cast("dict[str, Any]", tree))
    return TreeRun(path, NAME, leaves, facts={"framework": "transformers", "models": models})


def _models(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.name.endswith((FULL, SUMMARY))]
    except OSError:
        return []
    return sorted({name.removesuffix(FULL).removesuffix(SUMMARY) for name in names})


class _Model:
    """One model's tree and files."""

    def __init__(
        self, folder: Folder, files: set[str], model: str, prefix: str, tree_name: str
    ) -> None:
        self.folder = folder
        self.files = files
        self.model = model
        self.prefix = prefix
        self.tree_name = tree_name
        self.calls: Counter[str] = Counter()

    def leaves(self, tree: dict[str, Any]) -> list[Leaf]:
        tensors = list(self._node(tree, 0))
        # Later entries replace earlier ones, because the last call wrote the file.
        last = {tensor.file: index for index, tensor in enumerate(tensors) if tensor.file}
        leaves = [self._leaf(tensor, last[tensor.file] == index if tensor.file else True)
                  for index, tensor in enumerate(tensors)]  # fmt: skip
        left_out = [name for name in self._own_files() if name not in last]
        return _in_order(leaves, [leaf for name in left_out for leaf in self._unlisted(name)])

    def _site(self, module_path: str) -> str:
        own = module_path.removesuffix(" (top-level)")
        if own == self.model:
            return f"{self.prefix}(root)" if not self.prefix else self.model
        return self.prefix + own.removeprefix(f"{self.model}.")

    def _node(self, node: Mapping[str, Any], depth: int) -> Iterator[_ListedTensor]:
        if depth > DEEPEST:
            return
        site = self._site(str(node.get("module_path", "")))
        # The tree is in the order of calls, so counting gives the visit.
        visit = self.calls[site]
        self.calls[site] += 1
        yield from self._side(node.get("inputs"), site, "input", visit)
        children = node.get("children")
        for child in cast("list[Any]", children) if isinstance(children, list) else []:
            if isinstance(child, dict):
                yield from self._node(cast("dict[str, Any]", child), depth + 1)
        yield from self._side(node.get("outputs"), site, "output", visit)

    def _side(self, value: Any, site: str, port: Port, visit: int) -> Iterator[_ListedTensor]:
        if port == "input" and isinstance(value, dict):
            arguments = cast("dict[str, Any]", value)
            # Positional and named arguments share the slots of the port input.
            if arguments.keys() <= {"args", "kwargs"}:
                yield from self._values(arguments.get("args"), "", site, port, visit, 0)
                yield from self._values(arguments.get("kwargs"), "", site, port, visit, 0)
                return
        yield from self._values(value, "", site, port, visit, 0)

    def _values(
        self, value: Any, slot: str, site: str, port: Port, visit: int, depth: int
    ) -> Iterator[_ListedTensor]:
        if depth > DEEPEST:
            return
        if isinstance(value, list):
            for index, item in enumerate(cast("list[Any]", value)):
                inner = f"{slot}.{index}" if slot else str(index)
                yield from self._values(item, inner, site, port, visit, depth + 1)
        elif isinstance(value, dict):
            entry = cast("dict[str, Any]", value)
            if isinstance(entry.get("shape"), str) and isinstance(entry.get("dtype"), str):
                yield _listed_tensor(TensorKey.of(site, port, slot or "0", visit=visit), entry)
                return
            for name, item in entry.items():
                inner = f"{slot}.{name}" if slot else str(name)
                yield from self._values(item, inner, site, port, visit, depth + 1)

    def _leaf(self, tensor: _ListedTensor, newest: bool) -> Leaf:
        if not tensor.file:
            return Leaf(tensor.record, self.tree_name)
        record = tensor.record._replace(kept="full", summary=None)
        # The file holds the values of a later call.
        if not newest:
            return Leaf(record._replace(lost=_OVERWRITTEN), tensor.file)
        members = [unreadable("the file is not there")]
        if tensor.file in self.files:
            members = describe(self.folder, tensor.file)
        member = members[0]
        if member.trouble:
            return Leaf(record._replace(lost=member.trouble), tensor.file)
        return Leaf(
            record._replace(dtype=member.dtype, shape=member.shape), tensor.file, member.fetch
        )

    def _own_files(self) -> list[str]:
        start = (f"{self.model}.", f"{self.model}_")
        names = [n for n in self.files if n.startswith(start) and n.endswith(".safetensors")]
        return sorted(names, key=natural)

    def _unlisted(self, name: str) -> Iterator[Leaf]:
        """A file that the tree does not mention; its name identifies the tensor."""
        parsed = _FILE.fullmatch(name)
        if parsed is None:
            return
        port: Port = "output" if parsed[2] == "outputs" else "input"
        slot = _POSITION.sub(r".\1", parsed[3]) if parsed[3] else "0"
        key = TensorKey.of(self._site(parsed[1]), port, slot)
        member = describe(self.folder, name)[0]
        record = Record(key, 0, member.dtype, member.shape, lost=member.trouble)
        yield Leaf(record, name, None if member.trouble else member.fetch)


def _listed_tensor(key: TensorKey, entry: Mapping[str, Any]) -> _ListedTensor:
    dtype = entry["dtype"].removeprefix("torch.")
    # Python refuses to parse thousands of digits; no size has more than nineteen.
    shape = tuple(int(size[:19]) for size in _NUMBER.findall(entry["shape"]))
    value = entry.get("value")
    # A string is the name of a file; printed values are a list of lines.
    file = value.removeprefix("./") if isinstance(value, str) else ""
    record = Record(key, 0, dtype, shape, kept="describe")
    if dtype not in DTYPES:
        record = record._replace(lost=f"the element type {dtype[:40]} is not known")
    elif "mean" in entry:
        count = math.prod(shape)
        # torch prints the sample standard deviation; a summary holds that of the population.
        spread = math.sqrt((count - 1) / count) if count > 1 else math.nan
        summary = partial_summary(
            count,
            low=_printed(entry.get("min")),
            high=_printed(entry.get("max")),
            mean=_printed(entry.get("mean")),
            std=_printed(entry.get("std")) * spread,
        )
        record = record._replace(kept="summary", summary=summary)
    return _ListedTensor(key, dtype, shape, file, record)


def _printed(value: Any) -> float:
    """The number in `tensor(1.2345e-01)`; NaN if there is none."""
    match = _PRINTED.match(value) if isinstance(value, str) else None
    try:
        return float(match[1]) if match else math.nan
    except ValueError:
        return math.nan


def _in_order(leaves: list[Leaf], left_out: list[Leaf]) -> list[Leaf]:
    """Insert layers that the tree omits before its last one, in the order of its first one."""
    if not left_out:
        return leaves
    first_of: dict[str, int] = {}
    like: dict[tuple[str, str, str, str], int] = {}
    for index, leaf in enumerate(leaves):
        key = leaf.record.key
        # The first number in a path is the layer's index.
        if layer := _LAYER.fullmatch(key.site):
            first_of[f"{layer[1]}{layer[2]}"] = first_of.get(f"{layer[1]}{layer[2]}", index)
            like.setdefault((layer[1], layer[3], key.port, key.slot), index)
    placed: list[tuple[tuple[float, int, int], Leaf]] = [
        ((float(index), 0, 0), leaf) for index, leaf in enumerate(leaves)
    ]
    for leaf in left_out:
        key = leaf.record.key
        layer = _LAYER.fullmatch(key.site)
        if layer is None:
            placed.append(((float(len(leaves)), 0, 0), leaf))
            continue
        later = [
            index
            for name, index in first_of.items()
            if name.startswith(layer[1]) and int(name[len(layer[1]) :]) > int(layer[2])
        ]
        # Half a position before the first later layer, and after everything before that.
        where = (min(later) if later else len(leaves)) - 0.5
        # Inside a layer, the order of the same tensors in the listed layer.
        among = like.get((layer[1], layer[3], key.port, key.slot), len(leaves))
        placed.append(((where, int(layer[2]), among), leaf))
    placed.sort(key=lambda item: item[0])
    return [leaf for _, leaf in placed]
