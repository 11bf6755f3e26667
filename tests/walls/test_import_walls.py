"""Who may import whom. One table; every file of the package is parsed and held to it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "driftline"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("tuples",),
    ("errors", "settings", "registry"),
    ("numerics",),
    ("executors",),
    ("runs",),
    ("remote",),
    ("adapters", "launch", "formats", "topology"),
    ("alignment",),
    ("comparison",),
    ("tolerance",),
    ("gating", "operators", "decoding", "experiments", "diagnosis"),
    ("dialects", "suites", "reports"),
    ("pages",),
    ("viewer",),
    ("cli",),
)
"""A room may import itself and every room of a line above its own, never one beside or below it."""

BESIDE = {
    (
        "decoding",
        "gating",
    ): "the pytest suites hold decoders to expectations, and judge layers",
    ("diagnosis", "gating"): "what an error is a share of, where its own norm says nothing",
    ("registry", "errors"): "an absent part is said in a sentence",
    ("adapters", "topology"): "what capture writes down of a model is a module tree",
    ("launch", "adapters"): "the woken process starts the capture session",
    ("formats", "topology"): "the seed's tree keeps a model's topology beside its tensors",
    ("topology", "formats"): "a graph is made of whatever opens as a run",
    ("launch", "topology"): "`dump --type onnx` writes the graph of what ran",
    ("launch", "formats"): "what an engine's own probe wrote is counted through its reader",
}
"""The few doors between rooms of one line, each with its reason."""

UPWARD_ON_USE = {
    (
        "adapters",
        "dialects",
    ): "capture in a seed's layout is found by its address when it is asked for",
    ("launch", "dialects"): "`dump --layout ait` writes the seed's tree from the launched process",
    ("launch", "experiments"): "what is done to a launched program is found by its address",
    ("runs", "reports"): "a notebook asks a run for its picture",
    ("alignment", "reports"): "a notebook asks a plan for its picture",
    ("comparison", "reports"): "a notebook asks a comparison for its picture",
    ("diagnosis", "reports"): "a notebook asks a diagnosis for its picture",
}
"""Inside a function only: the part is loaded when a user asks for it."""

TYPES_ONLY = ("numpy", "torch", "_typeshed")


@dataclass(frozen=True)
class Allowance:
    """Third-party packages of a room: at the top of a file, or inside a function only."""

    top: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()


def allow(top: str = "", inside: str = "") -> Allowance:
    return Allowance(frozenset(top.split()), frozenset(inside.split()))


# The capture side is put on the path of foreign Python environments: what it imports must be there.
THIRD_PARTY: dict[str, Allowance] = {
    "tuples": allow(),
    "errors": allow(),
    "settings": allow(),
    "registry": allow(),
    "executors": allow(inside="msgspec ray grpc numpy torch"),
    "numerics": allow(top="numpy"),
    "runs": allow(top="numpy", inside="msgspec ml_dtypes"),
    "remote": allow(inside="fsspec"),
    "adapters": allow(top="numpy"),
    "adapters/torch": allow(top="numpy torch", inside="transformers"),
    "adapters/torch/device": allow(top="numpy torch triton"),
    "adapters/paddle": allow(top="numpy paddle"),
    "adapters/onnxruntime": allow(top="numpy", inside="onnx onnxruntime"),
    "launch": allow(inside="torch"),
    "formats": allow(top="numpy", inside="torch"),
    "topology": allow(top="numpy"),
    "alignment": allow(top="numpy"),
    "comparison": allow(top="numpy", inside="pyarrow torch"),
    "tolerance": allow(top="numpy"),
    "gating": allow(top="numpy", inside="torch"),
    "gating/plugin.py": allow(top="pytest"),
    "gating/expecting.py": allow(top="pytest", inside="torch"),
    "operators": allow(top="numpy", inside="ml_dtypes torch torch_npu"),
    "operators/aten": allow(top="numpy torch"),
    "diagnosis": allow(top="numpy"),
    "decoding": allow(
        top="numpy", inside="torch transformers accelerate fms pyarrow torch_npu torch_sendnn"
    ),
    "decoding/pytest_suites": allow(top="numpy pytest", inside="torch"),
    "experiments": allow(top="numpy", inside="torch"),
    "experiments/live": allow(top="numpy torch"),
    "dialects": allow(top="numpy", inside="torch torchair"),
    "suites": allow(),
    "reports": allow(),
    "pages": allow(top="numpy", inside="pyarrow"),
    "viewer": allow(top="numpy"),
    "cli": allow(inside="torch"),
    "testing": allow(top="numpy torch", inside="pytest transformers"),
    "__init__": allow(),
    "__main__": allow(),
}

FILES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    kind: str  # "top", "inside" or "types"


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, also those made through `require` and `import_module`."""

    def walk(node: ast.AST, kind: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = kind
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                inner = "types" if kind == "types" else "inside"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "types"
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(child.lineno, alias.name, kind)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports are absolute here"
                assert child.module is not None
                if child.module == "driftline":
                    for alias in child.names:
                        yield Import(child.lineno, f"driftline.{alias.name}", kind)
                else:
                    yield Import(child.lineno, child.module, kind)
            elif isinstance(child, ast.Call):
                name = getattr(child.func, "attr", getattr(child.func, "id", ""))
                if name in ("require", "import_module", "__import__") and child.args:
                    first = child.args[0]
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        yield Import(child.lineno, first.value, "inside")
            yield from walk(child, inner)

    return tuple(walk(ast.parse(path.read_text("utf-8")), "top"))


def imports_in(room: str) -> list[tuple[Path, Import]]:
    files = [path for path in FILES if room_of(path) == room]
    return [(path, found) for path in files for found in imports_of(path)]


def layer_of(room: str) -> int | None:
    return next((at for at, rooms in enumerate(LAYERS) if room in rooms), None)


@pytest.mark.parametrize("room", sorted({*map(room_of, FILES)}))
def test_a_room_imports_only_what_lies_above_it(room: str) -> None:
    if room in ("testing", "__init__", "__main__"):
        return
    own = layer_of(room)
    assert own is not None, f"{room} is not in the table of rooms"
    for path, found in imports_in(room):
        top, _, rest = found.module.partition(".")
        if top != "driftline" or not rest:
            continue
        other = rest.partition(".")[0]
        if other in (room, "__version__"):
            continue
        theirs = layer_of(other)
        where = f"{path.name}:{found.line} imports {found.module}"
        assert theirs is not None, f"{where}, which is no room of the table"
        allowed = theirs < own or (room, other) in BESIDE
        if found.kind == "inside":
            allowed = allowed or (room, other) in UPWARD_ON_USE
        assert allowed, f"{where}: {room} stands above {other}"


def allowance_of(path: Path) -> tuple[str, Allowance]:
    room = room_of(path)
    if path.is_relative_to(PACKAGE / "adapters" / "torch"):
        room = "adapters/torch"
    if path.is_relative_to(PACKAGE / "adapters" / "paddle"):
        room = "adapters/paddle"
    if path.is_relative_to(PACKAGE / "adapters" / "torch" / "device"):
        room = "adapters/torch/device"
    if path.is_relative_to(PACKAGE / "decoding" / "pytest_suites"):
        room = "decoding/pytest_suites"
    if path.is_relative_to(PACKAGE / "experiments" / "live"):
        room = "experiments/live"
    if path.is_relative_to(PACKAGE / "operators" / "aten"):
        room = "operators/aten"
    return room, THIRD_PARTY.get(str(path.relative_to(PACKAGE)), THIRD_PARTY[room])


@pytest.mark.parametrize("room", sorted({*map(room_of, FILES)}))
def test_a_room_uses_only_the_packages_it_is_allowed(room: str) -> None:
    for path, found in imports_in(room):
        place, allowance = allowance_of(path)
        top = found.module.partition(".")[0]
        if top in sys.stdlib_module_names or top == "driftline":
            continue
        if found.kind == "types" and top in TYPES_ONLY:
            continue
        allowed = allowance.top | (allowance.inside if found.kind != "top" else frozenset())
        assert top in allowed, (
            f"{path.name}:{found.line}: {place} may not import {top} {found.kind}"
        )


def test_the_wall_sees_a_planted_breach(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "import torch\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import pyarrow\n"
        "def f():\n    from driftline.cli import main\n    require('rich')\n"
    )
    found = {(i.module, i.kind) for i in imports_of(planted)}
    assert found >= {
        ("torch", "top"),
        ("pyarrow", "types"),
        ("driftline.cli", "inside"),
        ("rich", "inside"),
    }
