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

VENDORS: dict[str, str] = {
    "torch": "torch transformers triton captures.torch numerics.gpu operators.aten "
    "diagnosis.experiments.live comparison.live_models formats.tensors.torch_file",
    "Paddle": "paddle captures.paddle dialects.paddle_hook formats.tools.paddle_hook "
    "cli.commands.dialects",
    "ONNX Runtime": "onnx onnxruntime captures.onnxruntime cli.commands.dump_onnx",
    "Ascend": "torch_npu torchair formats.ascend operators.atb captures.launch.atb",
    "ait": "dialects.ait dialects.aclcmp formats.ait cli.commands.dialects",
    "other tools": "formats.tools.msprobe formats.tools.transformers_debugger "
    "formats.tools.decoder_output",
    "decoders": "accelerate fms torch_sendnn decoding cli.commands.decoders cli.commands.validate "
    "cli.commands.thresholds reporting.html.decoder reporting.html.tokens",
    "Ray": "ray grpc execution.ray_cluster execution.ray_connection execution.ray_worker",
}
"""Libraries of each vendor, and the parts of the package that are about it. Everything else finds
them by an address in a registry (`FRAMEWORKS`, `FILES`, `FOLDERS`, `EXECUTORS`, `COMMANDS`), and
never imports them."""

NOT_CORE = ("operators", "decoding", "dialects", "testing", "suites", "__init__", "__main__")
"""What may know vendors: one operator at a time, text models, the interfaces of other tools."""

_PROBE = "the probe of ATB is started beside the program; a part of a launch, not a framework"
VENDORS_IN_THE_CORE: dict[tuple[str, str], str] = {
    ("captures/launch/launcher.py", "Ascend"): _PROBE,
    ("captures/launch/errcheck.py", "Ascend"): _PROBE,
    ("captures/launch/derived_files.py", "ait"): "a dump in ait's layout gets ait's side files",
    ("formats/convert/convert.py", "torch"): "`convert --to ait` writes files of torch",
    ("formats/convert/targets.py", "torch"): "`convert --to pt` writes files of torch",
    ("execution/codec.py", "torch"): "a worker of decoders sends logits as torch tensors",
    ("cli/commands/compare.py", "ait"): "`compare -gp -mp` writes the report of `ait compare`",
    ("cli/commands/check.py", "decoders"): "layer files of a decoder are a table to be judged",
    ("cli/commands/dump.py", "ONNX Runtime"): "`dump --engine onnxruntime` hands over to it",
    ("cli/commands/compare.py", "ONNX Runtime"): "`compare a.onnx b.onnx` runs the two files",
    ("reporting/html/report.py", "decoders"): "a decoder's folder has a page of its own",
    ("cli/commands/setup.py", "torch"): "`doctor` lists devices; --aiu compiles a layer",
    ("cli/commands/setup.py", "Ascend"): "`doctor --ascend` looks for the probe of ATB",
    ("cli/commands/setup.py", "decoders"): "`doctor` asks for devices as decoders name them",
}
"""(file, vendor) of the core that imports one all the same, each with its reason."""

INSIDE_COMPARISON = {
    ("cli", "verdict"): "the exit code is the verdict's; tables of layers are judged as they are",
    ("suites", "verdict"): "the table of a decoder's layers is judged by the same rule",
    ("decoding", "measure"): "layers are measured while the model runs, by the engine's own rows",
    ("diagnosis", "verdict"): "sites are judged there; evidence is added and causes are named here",
    ("diagnosis", "measure"): "progress is reported in the engine's terms",
    ("reporting", "measure"): "a picture opens the two tensors of a pair as the engine does",
}
"""Who may look behind `comparison.pipeline`, `options`, `table`, `evidence` and `tolerance`."""


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
    "execution": allow(inside="msgspec numpy torch"),
    "execution/ray_cluster.py": allow(inside="ray"),
    "execution/ray_connection.py": allow(inside="ray grpc"),
    "execution/ray_worker.py": allow(inside="ray numpy"),
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
    "comparison": allow(top="numpy", inside="pyarrow pandas"),
    "comparison/live_models.py": allow(top="numpy", inside="torch"),
    "operators": allow(top="numpy", inside="ml_dtypes torch torch_npu"),
    "operators/aten": allow(top="numpy torch"),
    "diagnosis": allow(top="numpy"),
    "diagnosis/experiments/live": allow(top="numpy torch"),
    "decoding": allow(
        top="numpy", inside="torch transformers accelerate fms pyarrow torch_npu torch_sendnn"
    ),
    "suites": allow(top="numpy pytest", inside="torch"),
    "dialects": allow(top="numpy", inside="torch torchair"),
    "reporting": allow(),
    "reporting/notebook.py": allow(inside="IPython"),
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


@functools.cache
def vendors_of(module: str) -> frozenset[str]:
    """Vendors that a dotted name, ours or a library's, belongs to."""
    name = module.removeprefix("driftline.")
    return frozenset(
        vendor
        for vendor, parts in VENDORS.items()
        if any(name == part or name.startswith(f"{part}.") for part in parts.split())
    )


def vendor_imports() -> Iterator[tuple[str, str, Import]]:
    """(file, vendor, import) wherever a file of the core imports a vendor it does not belong to."""
    for path in FILES:
        file = str(path.relative_to(PACKAGE))
        own = vendors_of(file.removesuffix(".py").replace("/", "."))
        if package_of(path) in NOT_CORE:
            continue
        for seen in imports_of(path):
            if seen.kind != "types":
                for vendor in vendors_of(seen.module) - own:
                    yield file, vendor, seen


def test_the_core_imports_no_vendor() -> None:
    breaches = [
        f"{file}:{seen.line} imports {seen.module} ({vendor})"
        for file, vendor, seen in vendor_imports()
        if (file, vendor) not in VENDORS_IN_THE_CORE
    ]
    assert not breaches, "give it an address in a registry"


def test_every_exception_for_a_vendor_is_still_needed() -> None:
    used = {(file, vendor) for file, vendor, _ in vendor_imports()}
    assert set(VENDORS_IN_THE_CORE) <= used


@pytest.mark.parametrize("part", ["measure", "verdict"])
def test_nobody_looks_behind_the_one_comparison(part: str) -> None:
    for path in FILES:
        package = package_of(path)
        if package == "comparison" or (package, part) in INSIDE_COMPARISON:
            continue
        for seen in imports_of(path):
            inside = f"{seen.module}.".startswith(f"driftline.comparison.{part}.")
            assert not inside, f"{path.name}:{seen.line}: ask comparison.pipeline instead"


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
    assert vendors_of("driftline.captures.paddle.layers") == {"Paddle"}
    assert vendors_of("torch.nn") == {"torch"}
    assert not vendors_of("driftline.captures.session")
