"""A failing ATB operator as a stand-alone script: its definition, inputs and output; numpy only.

The script contains the files of `definitions` that the operator needs, so it shows the error where
Driftline is not installed, and documents in code what was expected.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from driftline.comparison.tolerance.defaults import allowed
from driftline.errors import BadFile
from driftline.numerics.dtypes import DTYPES
from driftline.operators.atb.matching import fitted, formats_of
from driftline.operators.atb.tensors import Dumped, InputTensors
from driftline.operators.definitions.call import Unfit
from driftline.operators.definitions.registry import definition_of, results
from driftline.operators.result import OperatorCall
from driftline.operators.source import Reproduction
from driftline.runs.files.local_files import reason_of

AnyArray = np.ndarray[Any, np.dtype[Any]]

TENSORS = "tensors.npz"
SCRIPT = "repro.py"
_FAMILIES = "driftline.operators.definitions"
_PLAIN = ("float64", "float32", "float16", "complex64", "complex128", "bool")
# Everything else in a file name or a program text could break out of it.
_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)

_HEAD = '''"""{title}

Written by `driftline opcheck --repro`. Needs numpy and {tensors} from the same folder:

    python {script}

Computes what the operator should have given, from its inputs, in float64, and compares that with
what it gave. Exit code 1: the error is there. 0: it is not.
"""

from __future__ import annotations
'''

_TAIL = """

# ---- The call, and the comparison ----------------------------------------------------------------

OPERATOR = {operator!r}
PARAM = json.loads({param!r})
INPUTS = {inputs!r}
OUTPUTS = {outputs!r}
# For each output: bound of an element, is it relative, its floor, percent that must be within, and
# whether rounding in a sum counts (unit roundoff; 0 if not).
BOUNDS = {bounds!r}
TILED = {tiled!r}


def decoded(values, dtype):
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64) if is_float(dtype) else values


def fitted(values, shape):
    # Without the tiles and the padding in which a device may have stored it.
    if values.shape == shape:
        return values
    if TILED and values.ndim == 4 and len(shape) != 4:
        values = values.transpose(0, 2, 1, 3)
        values = values.reshape(*values.shape[:2], -1)
    if [n for n in values.shape if n != 1] == [n for n in shape if n != 1]:
        return values.reshape(shape)
    if TILED and values.ndim == len(shape):
        return values[tuple(slice(0, size) for size in shape)]
    return values


def compared(golden, actual, result, bound):
    error, relative, floor, required, roundoff = bound
    with np.errstate(all="ignore"):
        alike = (golden == actual) | (np.isnan(golden) & np.isnan(actual))
        off = np.where(alike, 0.0, np.abs(actual.astype(float) - golden.astype(float)))
        off = np.where(np.isnan(off), np.inf, off)
        size = np.where(np.isfinite(golden), np.abs(golden.astype(float)), 0.0)
    limit = error * np.maximum(size, floor) if relative else np.full(off.shape, error)
    if roundoff and result.terms > 1:
        scale = scale_of(result)
        scale = size if scale is None else fitted(scale, off.shape)
        limit = limit + np.sqrt(result.terms) * roundoff * np.abs(scale)
    inside = 100.0 * np.count_nonzero(off <= limit) / max(1, off.size)
    return inside, off, inside >= required and not np.isinf(off).any()


def main():
    with np.load(Path(__file__).with_name({tensors!r})) as held:
        tensors = [Tensor(decoded(held[name], dtype), dtype) for name, dtype in INPUTS]
        given = [(name, dtype, decoded(held[name], dtype)) for name, dtype in OUTPUTS]
    dtypes = [""] * (1 + max(int(name.removeprefix("output")) for name, _, _ in given))
    for name, dtype, _ in given:
        dtypes[int(name.removeprefix("output"))] = dtype
    with np.errstate(all="ignore"):
        found = {function}(Call(PARAM, tensors, dtypes))
    fine = True
    for name, dtype, actual in given:
        if name not in BOUNDS:
            continue
        result = found[int(name.removeprefix("output"))]
        golden = fitted(rounded(result.values, dtype), actual.shape)
        if golden.shape != actual.shape:
            print(f"{{OPERATOR}} {{name}}: shape {{actual.shape}}, expected {{golden.shape}}")
            fine = False
            continue
        inside, off, good = compared(golden, actual, result, BOUNDS[name])
        fine = fine and good
        verdict = "right" if good else "WRONG"
        print(f"{{OPERATOR}} {{name}} ({{dtype}} {{actual.shape}}): {{verdict}}")
        required = BOUNDS[name][3]
        print(f"  {{inside:.4g}} % of the elements are within the bound, {{required:g}} % must be")
        print(f"  largest error {{off.max(initial=0.0):g}}")
        for place in np.argsort(-off, axis=None, kind="stable")[:5]:
            at = tuple(int(n) for n in np.unravel_index(place, off.shape))
            if off[at] == 0:
                break
            print(f"  at {{at}}: gave {{actual[at].item()}}, should be {{golden[at].item()}}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
"""


def reproduction_of(
    call: OperatorCall, inputs: InputTensors, outputs: Sequence[Dumped], failing: Sequence[str]
) -> Reproduction | None:
    """The script and its tensors; None if a shape keeps the output from being computed.

    Raises:
        Unfit: The inputs no longer fit; they did when the row was made.
    """
    definition = definition_of(call.op_type)
    if definition is None:
        return None
    formats = formats_of(outputs)
    try:
        golden = results(
            call.op_type, call.param, [dumped.tensor for dumped in inputs.tensors], formats
        )
    except Unfit:
        return None
    bounds: dict[str, tuple[float, bool, float, float, float]] = {}
    for output in outputs:
        # Only failing outputs get a bound: the others are shown nowhere.
        if output.slot in failing and int(output.slot) < len(golden):
            result = fitted(golden[int(output.slot)], output.shape, tiled=output.tiled)
            bound = allowed(output.tensor.dtype, exact=result.exact)
            # Only sums of several terms have rounding that grows with their length.
            roundoff = DTYPES[bound.dtype].unit_roundoff if bound.growth(2) else 0.0
            numbers = (bound.error, bound.relative, bound.floor, bound.share, roundoff)
            bounds[f"output{output.slot}"] = numbers
    inputs_by_name = {f"input{number}": dumped for number, dumped in enumerate(inputs.tensors)}
    produced = {f"output{dumped.slot}": dumped for dumped in outputs}
    # A folder's name is untrusted and goes into a program: letters and digits only.
    place = _UNSAFE.sub("_", call.site)[:200]
    title = f"{call.op_type} at {place} (operation {call.ids}): its output is not right."
    head = _HEAD.format(title=title, tensors=TENSORS, script=SCRIPT)
    tail = _TAIL.format(
        operator=call.op_type,
        param=json.dumps(dict(call.param), default=str),
        inputs=[(name, dumped.tensor.dtype) for name, dumped in inputs_by_name.items()],
        outputs=[(name, dumped.tensor.dtype) for name, dumped in produced.items()],
        bounds=bounds,
        tiled=any(dumped.tiled for dumped in (*inputs.tensors, *outputs)),
        tensors=TENSORS,
        function=definition.__name__,
    )
    return Reproduction(
        call,
        {name: stored(dumped) for name, dumped in inputs_by_name.items()},
        {name: stored(dumped) for name, dumped in produced.items()},
        {name: dumped.tensor.dtype for name, dumped in (inputs_by_name | produced).items()},
        head + "\n" + source_of(definition.__module__) + tail,
    )


def stored(dumped: Dumped) -> AnyArray:
    """A tensor as the script reads it: bfloat16 as bits, rarer formats as values."""
    dtype = dumped.tensor.dtype
    # npz files cannot store bfloat16: its bits are stored instead, and decoded by the script.
    if dtype == "bfloat16":
        return dumped.raw.view(np.uint16).reshape(dumped.shape)
    if dtype in _PLAIN or DTYPES[dtype].kind in ("int", "uint"):
        return dumped.tensor.values.astype(dtype if DTYPES[dtype].bits != 4 else np.int8)
    return dumped.tensor.values


def source_of(module: str) -> str:
    """The text of a definition file and of those it imports, as one program without imports."""
    texts: dict[str, str] = {}
    _collect(module, texts)
    imports = ["import json", "import sys", "from pathlib import Path"]
    bodies: list[str] = []
    for text in texts.values():
        tree = ast.parse(text)
        lines = text.split("\n")
        # Backwards, so that deleting lines does not move those still to be examined.
        for node in reversed(tree.body):
            is_docstring = node is tree.body[0] and isinstance(node, ast.Expr)
            if not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_docstring:
                continue
            assert node.end_lineno is not None
            line = " ".join(lines[node.lineno - 1 : node.end_lineno])
            # Imports of other packages are collected once at the top; those of Driftline are part
            # of the text.
            if isinstance(node, ast.Import) or (
                isinstance(node, ast.ImportFrom)
                and node.module not in ("__future__",)
                and not (node.module or "").startswith("driftline")
            ):
                imports.append(re.sub(r"\s+", " ", line))
            del lines[node.lineno - 1 : node.end_lineno]
        bodies.append(re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n"))
    return "\n".join(sorted(set(imports))) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"


def _collect(module: str, texts: dict[str, str]) -> None:
    """Collect the text of a file behind those of the files it imports."""
    import importlib

    text = inspect.getsource(importlib.import_module(module))
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_FAMILIES + "."):
            assert node.module is not None
            if node.module not in texts:
                _collect(node.module, texts)
    texts[module] = text


def write(reproduction: Reproduction, folder: Path) -> Path:
    """Write a reproduction into a new folder below the given one; returns the script.

    Raises:
        BadFile: It cannot be written.
    """
    call = reproduction.call
    name = f"{call.op_type}_{call.ids}" if call.ids else f"{call.op_type}_{call.site}"
    name = _UNSAFE.sub("_", f"{name}_step{call.step}_rank{call.rank}")[:120]
    place = folder / name
    # Several failing calls may have the same name; none may overwrite another.
    for number in range(1, 1000):
        if not place.exists():
            break
        place = folder / f"{name}.{number}"
    try:
        place.mkdir(parents=True)
        held: dict[str, Any] = {**reproduction.inputs, **reproduction.outputs}
        # Plain arrays only: nothing in the file can run code when it is loaded.
        np.savez(place / TENSORS, **held)
        (place / SCRIPT).write_text(reproduction.script, "utf-8")
    except OSError as trouble:
        raise BadFile(f"{place} cannot be written: {reason_of(trouble)}") from None
    return place / SCRIPT
