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
    ("errors",),
    ("settings", "registry", "units"),
    ("numerics",),
    ("execution",),
    ("runs",),
    ("captures", "formats", "graphs"),
    ("alignment",),
    ("comparison",),
    ("operators", "decoding", "diagnosis"),
    ("testing",),
    ("dialects", "reporting", "suites"),
    ("cli",),
)
"""A package may import itself and every package of a line above its own."""

SAME_LINE = {
    ("decoding", "testing"): "the pytest suites of decoders hold them to expectations",
    ("registry", "errors"): "a missing part is reported in a sentence",
    ("captures", "graphs"): "capture writes the module tree and the compiled graphs of a model",
    ("captures", "formats"): "what an engine's own probe wrote is counted through its reader",
    ("formats", "graphs"): "ait's dump keeps the topology of the model next to its tensors",
    ("graphs", "formats"): "a graph is made of whatever opens as a run",
}
"""The few imports between packages of one line, each with its reason."""

UPWARD_ON_USE = {
    ("captures", "dialects"): "a capture in another tool's layout is loaded when it is asked for",
    ("captures", "diagnosis"): "experiments on a launched program are found by their address",
    ("comparison", "diagnosis"): "compare_models replays the reference's modules when asked to",
    ("runs", "reporting"): "a notebook asks a run for its picture",
    ("alignment", "reporting"): "a notebook asks a plan for its picture",
    ("comparison", "reporting"): "a notebook asks a comparison for its picture",
    ("diagnosis", "reporting"): "a notebook asks a diagnosis for its picture",
}
"""Inside a function only: the part is loaded when a user asks for it."""

TYPES_ONLY = ("numpy", "torch", "_typeshed")


@dataclass(frozen=True)
class Allowance:
    """Third-party packages of a folder: at the top of a file, or inside a function only."""

    top: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()


def allow(top: str = "", inside: str = "") -> Allowance:
    return Allowance(frozenset(top.split()), frozenset(inside.split()))


# The capture side is put on the path of foreign Python environments: what it imports must be there.
THIRD_PARTY: dict[str, Allowance] = {
    "errors": allow(),
    "settings": allow(),
    "registry": allow(),
    "units": allow(),
    "execution": allow(inside="msgspec ray grpc numpy torch"),
    "numerics": allow(top="numpy"),
    "numerics/gpu": allow(top="numpy torch triton"),
    "runs": allow(top="numpy", inside="msgspec ml_dtypes"),
    "runs/stores": allow(inside="fsspec"),
    "captures": allow(top="numpy"),
    "captures/torch": allow(top="numpy torch", inside="transformers"),
    "captures/torch/device": allow(top="numpy torch triton"),
    "captures/paddle": allow(top="numpy paddle"),
    "captures/onnxruntime": allow(top="numpy", inside="onnx onnxruntime"),
    "captures/launch": allow(inside="torch"),
    "formats": allow(top="numpy", inside="torch"),
    "graphs": allow(top="numpy"),
    "alignment": allow(top="numpy"),
    "comparison": allow(top="numpy", inside="pyarrow torch"),
    "operators": allow(top="numpy", inside="ml_dtypes torch torch_npu"),
    "operators/aten": allow(top="numpy torch"),
    "diagnosis": allow(top="numpy", inside="torch"),
    "diagnosis/experiments/live": allow(top="numpy torch"),
    "decoding": allow(
        top="numpy", inside="torch transformers accelerate fms pyarrow torch_npu torch_sendnn"
    ),
    "decoding/pytest_suites": allow(top="numpy pytest", inside="torch"),
    "suites": allow(top="numpy pytest", inside="torch"),
    "dialects": allow(top="numpy", inside="torch torchair"),
    "reporting": allow(),
    "reporting/html": allow(top="numpy", inside="pyarrow"),
    "reporting/viewer": allow(top="numpy"),
    "cli": allow(top="cyclopts rich", inside="torch"),
    "testing": allow(top="numpy torch", inside="pytest transformers"),
    "testing/expectations/pytest_plugin.py": allow(top="pytest"),
    "testing/expectations/pytest_session.py": allow(top="pytest", inside="torch"),
    "__init__": allow(),
    "__main__": allow(),
}

FILES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    kind: str  # "top", "inside" or "types"


def package_of(path: Path) -> str:
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


def imports_in(package: str) -> list[tuple[Path, Import]]:
    files = [path for path in FILES if package_of(path) == package]
    return [(path, seen) for path in files for seen in imports_of(path)]


def layer_of(package: str) -> int | None:
    return next((at for at, packages in enumerate(LAYERS) if package in packages), None)


@pytest.mark.parametrize("package", sorted({*map(package_of, FILES)}))
def test_a_package_imports_only_packages_above_it(package: str) -> None:
    if package in ("testing", "__init__", "__main__"):
        return
    own = layer_of(package)
    assert own is not None, f"{package} is not in the table of packages"
    for path, seen in imports_in(package):
        top, _, rest = seen.module.partition(".")
        if top != "driftline" or not rest:
            continue
        other = rest.partition(".")[0]
        if other in (package, "__version__"):
            continue
        other_layer = layer_of(other)
        where = f"{path.name}:{seen.line} imports {seen.module}"
        assert other_layer is not None, f"{where}, which is no package of the table"
        allowed = other_layer < own or (package, other) in SAME_LINE
        if seen.kind == "inside":
            allowed = allowed or (package, other) in UPWARD_ON_USE
        assert allowed, f"{where}: {package} stands above {other}"


def allowance_of(path: Path) -> tuple[str, Allowance]:
    """The allowance of the nearest folder, or of the file itself, that the table names."""
    relative = path.relative_to(PACKAGE)
    for place in (relative, *relative.parents):
        name = str(place)
        if name in THIRD_PARTY:
            return name, THIRD_PARTY[name]
    return relative.stem, THIRD_PARTY[relative.stem]


@pytest.mark.parametrize("package", sorted({*map(package_of, FILES)}))
def test_a_package_uses_only_the_libraries_it_is_allowed(package: str) -> None:
    for path, seen in imports_in(package):
        place, allowance = allowance_of(path)
        top = seen.module.partition(".")[0]
        if top in sys.stdlib_module_names or top == "driftline":
            continue
        if seen.kind == "types" and top in TYPES_ONLY:
            continue
        allowed = allowance.top | (allowance.inside if seen.kind != "top" else frozenset())
        assert top in allowed, f"{path.name}:{seen.line}: {place} may not import {top} {seen.kind}"


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
